"""Groups of ranks that communicate at once, beside one alone, and which part of the time their bytes take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from calibrate.fitting.contexts.pairs import About, Measured, NotFitted, Point
from calibrate.fitting.reading import Placed
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_time import pieces_of, piecewise_seconds
from paradl_bench.core.statistics import Floats
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.records.samples import CollectiveSamples

_LEAST_SHARE = 0.3
"""Of the time at some size that bytes have to take, or phi is lost in the noise of the start-up."""

_Alike = tuple[object, ...]
"""What a pair shares: library, operation, level, tool, dtype, buffers, ranks, bytes."""


def paired_groups(
    samples: Iterable[Placed[CollectiveSamples]], operations: Mapping[str, CollectiveOperation]
) -> Iterator[tuple[About, Measured]]:
    """Groups at once, each block's with what ran alone: of the same block, else of the directory, else of any."""
    alone: dict[tuple[object, ...], list[CollectiveSamples]] = {}
    together: dict[tuple[int, int, Point, int, _Alike], list[CollectiveSamples]] = {}
    for directory, record in samples:
        what = record.library, record.operation, record.level, record.tool, record.dtype, record.buffers
        alike: _Alike = (*what, record.ranks, record.message_bytes)
        if record.concurrent == 1:
            for key in ((alike, directory, record.block), (alike, directory), (alike,)):
                alone.setdefault(key, []).append(record)
        elif record.message_bytes > 0 and record.operation in operations:
            point = Point(record.ranks, record.message_bytes, record.ranks_per_node or 0)
            together.setdefault((directory, record.block, point, record.concurrent, alike), []).append(record)
    for (directory, block, point, groups, alike), at_once in sorted(together.items()):
        first = at_once[0]
        keys: tuple[tuple[object, ...], ...] = ((alike, directory, block), (alike, directory), (alike,))
        beside = next((alone[key] for key in keys if key in alone), [])
        about = About("groups", first.library, first.operation, first.level, groups=groups)
        call_seconds = operations[first.operation].call_seconds
        idle_s, together_s = (
            np.concatenate([call_seconds(record.samples_s) for record in records]) if records else np.zeros(0)
            for records in (beside, at_once)
        )
        # What nothing alike ran alone beside tells nothing.
        yield about, Measured(point, (directory, block), idle_s, together_s if beside else np.zeros(0))


class ByteShares:
    """What doubling beta adds to a time, relative, under the fits that predict it: what phi acts on.

    Raises:
        NotFitted: no fit says it, nothing ran alone, or bytes take too little of every time.
    """

    def __init__(
        self,
        about: About,
        measured: Sequence[Measured],
        fits: Sequence[CommunicationFit],
        operations: Mapping[str, CollectiveOperation],
    ) -> None:
        self._fits = [fit for fit in fits if fit.key == (about.library, about.operation, about.level)]
        if not self._fits:
            raise NotFitted("no fit of alpha and beta says which part of the time its bytes take")
        pieces = pieces_of(operations[about.operation], self._fits)
        self._once, self._twice = pieces, [p._replace(beta_s_per_byte=2 * p.beta_s_per_byte) for p in pieces]
        points = sorted({sample.point for sample in measured if sample.idle_s.size})
        if not points:
            raise NotFitted("nothing alike ran alone (same tool, ranks, size and level)")
        most = float(self.of(points).max())
        if most < _LEAST_SHARE:
            raise NotFitted(f"bytes take at most {most:.0%} of the time at the sizes measured: sweep larger ones")

    def of(self, points: Sequence[Point]) -> Floats:
        """Of each size."""
        known = max(fit.inner.ranks if fit.inner else 1 for fit in self._fits)
        of_points = [(point.ranks, point.message_bytes, point.ranks_per_node or known) for point in points]
        once, twice = (
            np.array([float(piecewise_seconds(pieces, *point)) for point in of_points])
            for pieces in (self._once, self._twice)
        )
        return np.asarray(twice / once - 1)
