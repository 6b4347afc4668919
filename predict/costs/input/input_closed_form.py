"""Closed forms of an iteration with its input, and of wait-free backward (S-SGD's DAG, Shi et al. 2018).

    naive                       t_io + t_h2d + t_f + t_b + t_c + t_u
    read and copied ahead       max(t_io + t_h2d, t_f + t_b + t_c + t_u)
    the same, 2 or more ahead   max(t_io, t_h2d, t_f + t_b + t_c + t_u)
    read ahead only             max(t_io, t_h2d + t_f + t_b + t_c + t_u)
    wait-free backward          t_c is what backward does not hide of it

t_io reads for the ranks of one machine; all others are of one rank. The paper prefetches one batch; a second one, read
while the first is copied, is ours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paradl_bench.strategies.passes.input_tasks import Fetch
from predict.costs.sourced import Floats

Seconds = float | Floats


def iteration_seconds(fetch: Fetch, io_s: Seconds, h2d_s: Seconds, rest_s: Seconds) -> Seconds:
    """Seconds of an iteration in the steady state; of numbers, or of arrays entry by entry.

    Args:
        io_s: reading for the ranks of one machine. h2d_s: copying one rank's mini-batch.
        rest_s: forward, backward, what is left of the exchange, and weight update.
    """
    if not fetch.ahead:
        return io_s + h2d_s + rest_s
    if not fetch.to_device:
        return np.maximum(io_s, h2d_s + rest_s)
    return np.maximum(io_s + h2d_s if fetch.ahead == 1 else np.maximum(io_s, h2d_s), rest_s)


class InputWait(NamedTuple):
    """Seconds of an iteration in which computing waits for its input, and those of them in which that is copied."""

    input_s: float
    h2d_s: float


def input_wait(fetch: Fetch, io_s: float, h2d_s: float, rest_s: float) -> InputWait:
    """What :func:`iteration_seconds` has beyond ``rest_s``."""
    waiting = max(float(iteration_seconds(fetch, io_s, h2d_s, rest_s)) - rest_s, 0.0)
    if fetch.ahead and fetch.to_device:
        # One batch is copied when it has been read; of several, one is copied while another one is read.
        return InputWait(waiting, min(h2d_s, waiting) if fetch.ahead == 1 else max(h2d_s - rest_s, 0.0))
    return InputWait(waiting, min(h2d_s, waiting))


def exposed_exchange_seconds(ready_s: Floats, exchange_s: Floats, backward_s: float, *, wait_free: bool) -> float:
    """t_c_no: what the exchanges of layers, one after the other, add behind backward.

        tau_i = max(tau_(i-1) + t_(i-1), ready_i);  t_c_no = max(0, tau_last + t_last - t_b)

    Without wait-free backward all of them follow it.

    Args:
        ready_s: from the start of backward, when each layer's gradient is there; in the order of backward.
        exchange_s: of each of these layers.
        backward_s: all of backward.
    """
    if not wait_free:
        return float(np.sum(exchange_s))
    # Unrolled, the last one ends at the latest of: gradient i ready, then everything from i on without a pause.
    remaining = np.cumsum(exchange_s[::-1])[::-1]
    return max(0.0, float(np.max(ready_s + remaining, initial=0.0)) - backward_s)
