"""Rules by which gradients share an all-reduce: OSF's paper's equations 12 to 17, MG-WFBP's, DDP's buckets.

Gradients are counted in the order of backward, i = 0, 1, ... n - 1; layers without parameters count to the next one
that has some. gap_i = ready_(i+1) - ready_i, with ready_i when gradient i is there.

A buffer of Q bytes with a timeout (eq. 12 to 14) is sent after gradient i when i is the last one, when gap_i >= timeout
(the wait is the timeout), or when it has no room for gradient i + 1 (the wait is gap_i: the buffer learns of it when
the gradient comes). A gradient larger than Q is sent alone. The printed eq. 13 tests the backward of layer l itself
where eq. 12 and 14 and the prose mean the next one's, so that bytes would be lost; it is mended here.

Of the three other rules each has no wait, since a buffer is known to be complete when its last gradient comes:
adaFusion (eq. 17), MG-WFBP (Shi, Chu and Li 2021) and DDP's buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

Rule = Literal["none", "buffer", "ada", "mg-wfbp", "ddp"]
RULES: tuple[str, ...] = get_args(Rule)
AllReduceSeconds = Callable[[float], float]
"""Seconds of an all-reduce of so many bytes."""


class Fusion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which gradients share an all-reduce.

    Attributes:
        rule: none of them; a ``buffer`` with a timeout, as Horovod's; ``ada``, ``mg-wfbp``; or the buckets of ``ddp``,
            whose size is the plan's setting.
        buffer_bytes: Q, of ``buffer``. timeout_s: how long it waits for the next gradient, of ``buffer``. Defaults are
            Horovod 0.20's, which the paper measured.
    """

    rule: Rule = "none"
    buffer_bytes: int = 64 * 1024 * 1024
    timeout_s: float = 5e-3

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule has to be one of {', '.join(RULES)}, not {self.rule!r}")
        if self.buffer_bytes < 1:
            raise ValueError(f"buffer_bytes has to be at least 1, not {self.buffer_bytes}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s has to be more than 0, not {self.timeout_s}")


class Gradients(NamedTuple):
    """Gradients in the order of backward.

    Attributes:
        ready_s: (n,) when each is there, since any one moment. bytes: (n,) of each.
    """

    ready_s: NDArray[np.float64]
    bytes: Sequence[int]

    @property
    def gap_s(self) -> NDArray[np.float64]:
        """(n - 1,) from each to the next."""
        return np.diff(self.ready_s)


def last_of_buffers(fusion: Fusion, gradients: Gradients, all_reduce_s: AllReduceSeconds) -> tuple[int, ...]:
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
        return _merged_wisely(gradients, all_reduce_s)
    sent: list[int] = []
    held = gradients.bytes[0]
    for index, (gap_s, size) in enumerate(zip(gradients.gap_s.tolist(), gradients.bytes[1:], strict=True)):
        if fusion.rule == "buffer":
            fuses = gap_s < fusion.timeout_s and held + size <= fusion.buffer_bytes
        else:
            fuses = all_reduce_s(held + size) + gap_s < all_reduce_s(held) + all_reduce_s(size)
        if not fuses:
            sent.append(index)
        held = held + size if fuses else size
    return (*sent, len(gradients.bytes) - 1)


def _merged_wisely(gradients: Gradients, all_reduce_s: AllReduceSeconds) -> tuple[int, ...]:
    """MG-WFBP, algorithm 1: merge with the next gradient where that one comes before this one's start-up is over.

    It takes time as a + b m; a is what the line through the all-reduces of all bytes and of half of them leaves at 0.
    """
    whole = float(sum(gradients.bytes))
    start_up_s = max(0.0, 2 * all_reduce_s(whole / 2) - all_reduce_s(whole))
    sent: list[int] = []
    free_s, held = -math.inf, 0
    ready = gradients.ready_s.tolist()
    for index, (ready_s, size) in enumerate(zip(ready, gradients.bytes, strict=True)):
        held += size
        start_s = max(free_s, ready_s)
        if index + 1 < len(ready) and ready[index + 1] < start_s + start_up_s:
            continue
        sent.append(index)
        free_s, held = start_s + all_reduce_s(held), 0
    return tuple(sent)


def waits_for_next(fusion: Fusion, gradients: Gradients, last: Sequence[int]) -> tuple[bool, ...]:
    """Per buffer, whether it is sent because the gradient behind its last one came and had no room in it."""
    if fusion.rule != "buffer":
        return (False,) * len(last)
    gap_s = gradients.gap_s
    return tuple(index < len(gap_s) and bool(gap_s[index] < fusion.timeout_s) for index in last)
