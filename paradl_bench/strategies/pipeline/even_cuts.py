"""The cut of a network into stages whose largest is as small as it gets. Torch-free, and knows nothing of networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NONE = np.iinfo(np.int64).max


def cut_evenly(
    places: Sequence[int], above: Floats, trained: Ints, sent: Sequence[int], stages: int
) -> tuple[int, ...] | None:
    """Cuts at some of the places; None where there are too few.

    Of equally large cuts up to a place the one that sends less is better, then the one whose cuts come earlier.

    Args:
        places: where stages may start and end. above: weight of all layers before each. trained: how many of those
            have a parameter; a stage needs one. sent: elements that cross at each.
    """
    # Stages far above the mean are rarely part of the answer, but for one that has what no cut can part. Where one has
    # to be, the bound is raised, which no cut that stays below it can be worse for.
    bound = max(2.0 * float(above[-1] - above[0]) / stages, float(np.diff(above).max(initial=0.0)))
    while True:
        spans = _spans(above, trained, bound)
        found = _cut(spans, np.array(sent, np.int64), len(places), stages)
        if found is not None:
            return tuple(places[index] for index in found)
        if math.isinf(bound):
            return None
        bound = 2.0 * bound if 0.0 < bound < above[-1] - above[0] else math.inf


class _Spans(NamedTuple):
    """Stages that are allowed: from place ``start`` to ``end``, ordered by end, with their weight.

    Attributes:
        ends, rows: each place that a stage ends at, and the first of its spans.
        row: per span, which of these.
    """

    start: Ints
    end: Ints
    weight: Floats
    ends: Ints
    rows: Ints
    row: Ints


def _spans(above: Floats, trained: Ints, bound: float) -> _Spans:
    weight = above[:, None] - above[None, :]
    end, start = np.nonzero(np.tri(len(above), k=-1, dtype=bool) & (trained[:, None] != trained) & (weight <= bound))
    ends, rows, row = np.unique(end, return_index=True, return_inverse=True)
    return _Spans(start, end, weight[end, start], ends, rows, row)


def _cut(spans: _Spans, sent: Ints, places: int, stages: int) -> list[int] | None:
    """Indices of the places to cut at."""
    if not len(spans.start):
        return None
    # Up to each place, cut into the stages so far: the largest stage, what is sent, and the order of the cuts among
    # those up to other places.
    largest = np.full(places, math.inf)
    largest[0] = 0.0
    elements, order = np.zeros(places, np.int64), np.arange(places)
    chosen = []
    for _ in range(stages):
        sizes = np.maximum(largest[spans.start], spans.weight)
        least = np.minimum.reduceat(sizes, spans.rows)
        key = elements[spans.start] * places + order[spans.start]
        key[(sizes != least[spans.row]) | np.isinf(sizes)] = _NONE
        best = np.minimum.reduceat(key, spans.rows)
        taken = np.flatnonzero((key == best[spans.row]) & (key != _NONE))
        start, end = spans.start[taken], spans.end[taken]
        before = np.zeros(places, np.int64)
        before[end] = start
        chosen.append(before)
        largest = np.full(places, math.inf)
        largest[spans.ends] = least
        grown = np.zeros(places, np.int64)
        grown[end] = elements[start] + sent[end]
        # A list of cuts is another one, and the place behind them: the lists differ, so the place never decides.
        by_cuts = np.zeros(places, np.int64)
        by_cuts[end] = order[start] * places + end
        elements, order = grown, _ranks(by_cuts)
    if math.isinf(largest[-1]):
        return None
    cuts = [places - 1]
    for before in reversed(chosen):
        cuts.append(int(before[cuts[-1]]))
    return cuts[-2:0:-1]


def _ranks(values: Ints) -> Ints:
    ranks = np.empty(len(values), np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks
