"""Segments of a role whose tasks do the same works in the same order: micro-batches repeat theirs.

A pipeline has millions of tasks, whose seconds are asked for again with every shift of their costs. Few of its segments
differ, so that the seconds of these are added up alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.tasks import Ints
from predict.costs.sourced import Floats
from predict.simulation.simulator import SegmentSums

Places = NDArray[np.intp]


@dataclass(frozen=True)
class AlikeSegments:
    """Which segments are alike.

    Attributes:
        work, kind: of the tasks of the first segment of each kind, in their order: work, and number of the kind.
        of_segments: per segment, the number of its kind.
    """

    work: Places
    kind: Places
    of_segments: Places

    def seconds(self, of_works: Floats) -> Floats:
        """Per segment, the sum over its tasks, from seconds per work: one row of them or several."""
        return np.asarray(self.of_kinds(of_works).take(self.of_segments, axis=-1))

    def of_kinds(self, of_works: Floats) -> Floats:
        """Likewise, per kind of segment."""
        return self._sums.seconds(of_works)

    @cached_property
    def _sums(self) -> SegmentSums:
        return SegmentSums(self.kind, self.work, np.ones(len(self.work), bool))


def alike_segments(segment: Ints, work: Ints) -> AlikeSegments:
    """The kinds of a role's segments.

    Args:
        segment, work: of every task; every segment has a task.
    """
    order = np.argsort(segment, kind="stable")
    works, count = work[order].astype(np.intp), np.bincount(segment)
    start = np.cumsum(count) - count
    place = np.arange(len(order)) - np.repeat(start, count)
    # A number that tells segments apart as a rule; whether it did is looked at below.
    codes = _scattered(int(work.max(initial=0)) + 1)
    number = np.add.reduceat(codes[works] * (2 * place.astype(np.uint64) + 1), start) if len(start) else start
    _, first, kind = np.unique(number, return_index=True, return_inverse=True)
    like = first[kind]
    equal = count == count[like]
    if equal.all() and not np.array_equal(works, works[np.repeat(start[like], count) + place]):
        equal[:] = False
    if not equal.all():
        first = kind = np.arange(len(count))
    chosen = np.zeros(len(count), bool)
    chosen[first] = True
    tasks = np.repeat(chosen, count)
    return AlikeSegments(works[tasks], np.repeat(kind, count)[tasks], kind)


def _scattered(count: int) -> NDArray[np.uint64]:
    """So many numbers spread over 64 bits, as SplitMix64 draws them (Steele, Lea and Flood, OOPSLA 2014, figure 16).

    (``np.random`` would be loaded for this alone.)
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)


def joined(roles: list[AlikeSegments]) -> AlikeSegments:
    """Those of several roles, one behind the other."""
    before = np.cumsum([0, *(int(role.kind.max(initial=-1)) + 1 for role in roles)]).tolist()
    return AlikeSegments(
        np.concatenate([role.work for role in roles]),
        np.concatenate([role.kind + start for role, start in zip(roles, before, strict=False)]),
        np.concatenate([role.of_segments + start for role, start in zip(roles, before, strict=False)]),
    )
