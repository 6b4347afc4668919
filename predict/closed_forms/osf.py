"""OSF: a scaling factor that considers overlap, and tensor fusion (the paper's equations 3 to 17).

Gradients are counted in the order of backward, i = 0, 1, ... n - 1 (the paper counts layers from the input, so its
layer L is 0 here and its layer 1 is n - 1); layers without parameters count to the next one that has some. With
ready_i, when gradient i is there, gap_i = ready_(i+1) - ready_i (the paper's bw of layer l - 1), g_i its bytes and t(m)
the all-reduce of m bytes:

    start_i = max(start_(i-1) + wait_(i-1) + t(sent_(i-1)), ready_i)      eq. 8 and 15
    exposed = max(0, start_(n-1) + t(sent_(n-1)) - backward)              T_update - T_overlap of eq. 3 and 11
    OSF     = T_comp / (T_comp + exposed)                                 T_comp: all of forward and backward
    CSF     = T_comp / (T_comp + t(sum of g))                             no overlap, one all-reduce

Fusion by a buffer of Q bytes and a timeout (eq. 12 to 14): the buffer is sent after gradient i when i is the last one,
when gap_i >= timeout (the wait is the timeout), or when it has no room for gradient i + 1 (the wait is gap_i: the
buffer learns of it when the gradient comes). A gradient larger than Q is sent alone.

Mended: the printed eq. 13 tests the backward of layer l itself where eq. 12 and 14 and the prose mean the next one's,
so that bytes would be lost; eq. 15 starts its inner sum at j = 1 instead of i. Kept as printed: eq. 15 adds the wait
behind the exchange before it, so a channel that is busy all the time waits twice.

Of the three other rules each has no wait, since a buffer is known to be complete when its last gradient comes:
adaFusion (eq. 17), MG-WFBP (Shi, Chu and Li 2021) and DDP's buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from predict.costs.communication.fusion import Fusion
from predict.costs.sourced import Floats

Exchange = Callable[[float], float]
"""Seconds of an all-reduce of so many bytes."""


class Gradients(NamedTuple):
    """Gradients in the order of backward.

    Attributes:
        ready_s: (n,) when each is there, since any one moment. bytes: (n,) of each.
    """

    ready_s: Floats
    bytes: Sequence[int]

    @property
    def gap_s(self) -> Floats:
        """(n - 1,) from each to the next."""
        return np.diff(self.ready_s)


def last_of_buffers(fusion: Fusion, gradients: Gradients, exchange: Exchange) -> tuple[int, ...]:
    """Indices of the gradients after which the buffer is sent; the last one is always among them.

    Raises:
        ValueError: the rule is ``ddp``, whose buckets follow from the network.
    """
    if fusion.rule == "ddp":
        raise ValueError("DDP's buckets are those of its planner")
    if not len(gradients.bytes):
        return ()
    if fusion.rule == "none":
        return tuple(range(len(gradients.bytes)))
    if fusion.rule == "mg-wfbp":
        return _merged_wisely(gradients, exchange)
    sent: list[int] = []
    held = gradients.bytes[0]
    for index, (gap_s, size) in enumerate(zip(gradients.gap_s.tolist(), gradients.bytes[1:], strict=True)):
        if fusion.rule == "buffer":
            fuses = gap_s < fusion.timeout_s and held + size <= fusion.buffer_bytes
        else:
            fuses = exchange(held + size) + gap_s < exchange(held) + exchange(size)
        if not fuses:
            sent.append(index)
        held = held + size if fuses else size
    return (*sent, len(gradients.bytes) - 1)


def _merged_wisely(gradients: Gradients, exchange: Exchange) -> tuple[int, ...]:
    """MG-WFBP, algorithm 1: merge with the next gradient where that one comes before this one's start-up is over.

    It takes time as a + b m; a is what the line through the all-reduces of all bytes and of half of them leaves at 0.
    """
    whole = float(sum(gradients.bytes))
    start_up_s = max(0.0, 2 * exchange(whole / 2) - exchange(whole))
    sent: list[int] = []
    free_s, held = -math.inf, 0
    ready = gradients.ready_s.tolist()
    for index, (ready_s, size) in enumerate(zip(ready, gradients.bytes, strict=True)):
        held += size
        start_s = max(free_s, ready_s)
        if index + 1 < len(ready) and ready[index + 1] < start_s + start_up_s:
            continue
        sent.append(index)
        free_s, held = start_s + exchange(held), 0
    return tuple(sent)


def wait_seconds(fusion: Fusion, gradients_ready_s: Floats, last: Sequence[int]) -> Floats:
    """Seconds that each buffer waits behind its last gradient, shape (buffers,): the gap, but at most the timeout."""
    waits = np.zeros(len(last))
    if fusion.rule == "buffer" and len(last) > 1:
        before = np.asarray(last[:-1], np.intp)
        waits[:-1] = np.minimum(gradients_ready_s[before + 1] - gradients_ready_s[before], fusion.timeout_s)
    return waits


def waits_for_next(fusion: Fusion, gradients: Gradients, last: Sequence[int]) -> tuple[bool, ...]:
    """Per buffer, whether it is sent because the gradient behind its last one came and had no room in it."""
    if fusion.rule != "buffer":
        return (False,) * len(last)
    gap_s = gradients.gap_s
    return tuple(index < len(gap_s) and bool(gap_s[index] < fusion.timeout_s) for index in last)


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
