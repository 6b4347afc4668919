"""The cut of a network into stages whose largest is as small as it gets. Torch-free, and knows nothing of networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_AT_ONCE = 1 << 18
"""Stages that are compared at a time, about: their arrays stay small."""
_ROUNDING = 1e-12
"""Of the whole weight: far above what sums of weights are rounded by."""


class EvenCuts:
    """Cuts at some of the places, into any number of stages.

    Of equally large cuts up to a place the one that sends less is better, then the one whose cuts come earlier. A cut
    into one stage more goes on from the cuts up to every place, which are kept.

    Args:
        places: where stages may start and end. above: weight of all layers before each, none of them below 0. trained:
            how many of those have a parameter; a stage needs one. sent: elements that cross at each.
    """

    def __init__(self, places: Sequence[int], above: Floats, trained: Ints, sent: Sequence[int]) -> None:
        self._places, self._above, self._sent = tuple(places), above, np.array(sent, np.int64)
        # A stage that ends at a place starts before this one.
        self._stop = np.searchsorted(trained, trained, side="left")
        # Up to each place, cut into the stages so far: the largest stage, what is sent, and the order of the cuts among
        # those up to other places.
        self._largest = np.full(len(places), np.inf)
        self._largest[0] = 0.0
        self._elements, self._order = np.zeros(len(places), np.int64), np.arange(len(places))
        self._chosen: list[NDArray[np.int32]] = []
        self._possible: list[bool] = []

    def into(self, stages: int) -> tuple[int, ...] | None:
        """The cuts, one fewer than stages; None where there are too few places."""
        while len(self._chosen) < stages and np.isfinite(self._largest).any():
            self._add_stage()
        if len(self._chosen) < stages or not self._possible[stages - 1]:
            return None
        cuts = [len(self._places) - 1]
        for before in reversed(self._chosen[:stages]):
            cuts.append(int(before[cuts[-1]]))
        return tuple(self._places[index] for index in cuts[-2:0:-1])

    def _add_stage(self) -> None:
        """Go on to the cuts into one stage more, up to each place."""
        count = len(self._places)
        largest, elements, by_cuts = np.full(count, np.inf), np.zeros(count, np.int64), np.zeros(count, np.int64)
        before = np.zeros(count, np.int32)
        for spans in self._spans():
            sizes = np.maximum(self._largest[spans.start], self._above[spans.end] - self._above[spans.start])
            least = np.minimum.reduceat(sizes, spans.rows)
            largest[spans.end[spans.rows]] = least
            tied = np.flatnonzero((sizes == largest[spans.end]) & np.isfinite(sizes))
            if not len(tied):
                continue
            start, end = spans.start[tied], spans.end[tied]
            rows = np.flatnonzero(np.diff(end, prepend=-1))
            key = self._elements[start] * count + self._order[start]
            # A list of cuts is another one, and the place behind them: the lists differ, and so do the keys.
            taken = key == np.repeat(np.minimum.reduceat(key, rows), np.diff(rows, append=len(key)))
            start, end = start[taken], end[taken]
            before[end] = start
            elements[end] = self._elements[start] + self._sent[end]
            by_cuts[end] = self._order[start] * count + end
        self._largest, self._elements, self._order = largest, elements, _ranks(by_cuts)
        self._chosen.append(before)
        self._possible.append(bool(np.isfinite(largest[-1])))

    def _spans(self) -> Iterator[_Spans]:
        """Last stages among which the best up to each place are, some places at a time."""
        known = np.flatnonzero(np.isfinite(self._largest))
        stop = np.minimum(self._stop, known[-1] + 1)
        ends = np.flatnonzero(stop > known[0])
        stop = stop[ends]
        # A stage heavier than what one cut comes to is in no better one, nor are stages before it that are.
        bound = self._bound(ends, known[0], stop)
        stop = np.minimum(stop, np.searchsorted(np.minimum.accumulate(self._largest[::-1])[::-1], bound, side="right"))
        lightest = self._above[ends] - bound - _ROUNDING * self._above[-1]
        start = np.clip(np.searchsorted(self._above, lightest), known[0], stop - 1)
        widths = stop - start
        part = np.cumsum(widths) // _AT_ONCE
        for places in np.split(np.arange(len(ends)), np.flatnonzero(np.diff(part)) + 1):
            if len(places):
                width = widths[places]
                rows = np.cumsum(width) - width
                offset = np.arange(int(width.sum())) - np.repeat(rows, width)
                yield _Spans(np.repeat(start[places], width) + offset, np.repeat(ends[places], width), rows)

    def _bound(self, ends: Ints, first: int, stop: Ints) -> Floats:
        """The largest stage of some cut up to each place: the best one where larger parts never have smaller stages."""
        behind = np.searchsorted(np.maximum.accumulate(self._largest[first:] + self._above[first:]), self._above[ends])
        bounds = np.full(len(ends), np.inf)
        for start in (first + behind - 1, first + behind):
            start = np.clip(start, first, stop - 1)
            bounds = np.minimum(bounds, np.maximum(self._largest[start], self._above[ends] - self._above[start]))
        return bounds


class _Spans(NamedTuple):
    """Stages from place ``start`` to ``end``, ordered by end; ``rows`` are the first of each end's."""

    start: Ints
    end: Ints
    rows: Ints


def _ranks(values: Ints) -> Ints:
    ranks = np.empty(len(values), np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks
