"""OSF: a scaling factor that considers overlap, and tensor fusion (the paper's equations 3 to 17).

Gradients are counted in the order of backward. With ready_i, when gradient i is there, and t(m) the all-reduce of m
bytes:

    start_i = max(start_(i-1) + wait_(i-1) + t(sent_(i-1)), ready_i)      eq. 8 and 15
    exposed = max(0, start_(n-1) + t(sent_(n-1)) - backward)              T_update - T_overlap of eq. 3 and 11
    OSF     = T_comp / (T_comp + exposed)                                 T_comp: all of forward and backward
    CSF     = T_comp / (T_comp + t(sum of g))                             no overlap, one all-reduce

Mended: eq. 15 as printed starts its inner sum at j = 1 instead of i. Kept as printed: it adds the wait behind the
exchange before it, so a channel that is busy all the time waits twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paradl_bench.strategies.data.fusion.rules import Fusion
from predict.costs.sourced import Floats


def wait_seconds(fusion: Fusion, gradients_ready_s: Floats, last: Sequence[int]) -> Floats:
    """Seconds that each buffer waits behind its last gradient, shape (buffers,): the gap, but at most the timeout."""
    waits = np.zeros(len(last))
    if fusion.rule == "buffer" and len(last) > 1:
        before = np.asarray(last[:-1], np.intp)
        waits[:-1] = np.minimum(gradients_ready_s[before + 1] - gradients_ready_s[before], fusion.timeout_s)
    return waits


def exposed_seconds(ready_s: Floats, wait_s: Floats, exchange_s: Floats, backward_s: float) -> float:
    """T_update - T_overlap: what the exchanges add behind backward.

    Args:
        ready_s: (buffers,) since the start of backward, when the last gradient of each is there.
        wait_s, exchange_s: (buffers,) the wait of each before it is sent, and its all-reduce.
        backward_s: all of backward.
    """
    # Eq. 15 unrolled: the last exchange ends at the latest of: buffer k ready, then all from k on without a pause.
    remaining = np.cumsum((wait_s + exchange_s)[::-1])[::-1]
    return max(0.0, float(np.max(ready_s + remaining, initial=0.0)) - backward_s)


def scaling_factor(compute_s: float, added_s: float) -> float:
    """OSF of what is exposed, CSF of one all-reduce of everything; 1 where nothing takes time."""
    whole_s = compute_s + added_s
    return compute_s / whole_s if whole_s else 1.0
