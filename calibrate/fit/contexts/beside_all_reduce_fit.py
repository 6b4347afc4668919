"""What an all-reduce in flight adds to a call, from pairs beside one and apart from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from calibrate.fit.contexts.behind_fit import covariance_of, solve
from calibrate.fit.reading import Placed
from calibrate.profile.collectives.beside_all_reduce import BesideAllReduce, BesidePoint
from calibrate.statistics.pair_draws import Pair, medians
from paradl_bench.records.contexts.beside_all_reduce import BesideAllReduceSamples

_Key = tuple[str, str, str, str]
"""(library, operation, level, level of the all-reduce where that is another group's)."""


def fit_beside_all_reduce(
    records: Iterable[Placed[BesideAllReduceSamples]],
) -> tuple[tuple[BesideAllReduce, ...], tuple[str, ...]]:
    """Added latency and factor per (library, operation, level, exchange level), and what was left out.

    Beside = added + factor x apart, fitted as behind compute is (:func:`calibrate.fit.contexts.behind_fit.solve`), to
    repetitions' means over calls that began with the all-reduce in flight.
    """
    groups: dict[_Key, list[Placed[BesideAllReduceSamples]]] = {}
    for directory, record in records:
        key = record.library, record.operation, record.level, record.exchange_level
        groups.setdefault(key, []).append(Placed(directory, record))
    entries: list[BesideAllReduce] = []
    notes: list[str] = []
    for key, own in sorted(groups.items()):
        begun = [each for each in own if each.record.queued()[1]]
        if begun:
            entries.append(_fit(key, begun))
        else:
            notes.append(f"{' '.join(key).strip()} beside an all-reduce: none began before that was done: left out")
    return tuple(entries), tuple(notes)


def _fit(key: _Key, records: Sequence[Placed[BesideAllReduceSamples]]) -> BesideAllReduce:
    points = sorted({(record.ranks, record.message_bytes) for _, record in records})
    pairs = _pairs(records, points)
    apart_s, beside_s = medians(pairs)
    at = np.array([pair.at for pair in pairs])
    added_s, factor = solve(apart_s, beside_s, sizes=len(points))
    shown = tuple(
        BesidePoint(
            ranks=ranks,
            message_bytes=size,
            apart_s=float(np.median(apart_s[at == index])),
            beside_s=float(np.median(beside_s[at == index])),
            fitted_s=added_s + factor * float(np.median(apart_s[at == index])),
        )
        for index, (ranks, size) in enumerate(points)
    )
    waited, begun = np.sum([record.queued() for _, record in records], axis=0)
    exchanges = [record.exchange_bytes for _, record in records]
    library, operation, level, exchange_level = key
    return BesideAllReduce(
        library=library,
        operation=operation,
        level=level,
        exchange_level=exchange_level,
        ranks=(points[0][0], points[-1][0]),
        bytes_range=(min(size for _, size in points), max(size for _, size in points)),
        exchange_bytes=(min(exchanges), max(exchanges)),
        queued=float(waited / begun),
        added_s=added_s,
        factor=factor,
        covariance=covariance_of(pairs),
        residual_relative_median=float(np.median([abs(point.fitted_s / point.beside_s - 1) for point in shown])),
        samples=sum(pair.condition_s.size for pair in pairs),
        points=shown,
    )


def _pairs(records: Sequence[Placed[BesideAllReduceSamples]], points: Sequence[tuple[int, int]]) -> list[Pair]:
    blocks = sorted({(directory, record.block) for directory, record in records})
    # A clock's tick is no time; relative errors need one.
    return [
        Pair(
            blocks.index((directory, record.block)),
            points.index((record.ranks, record.message_bytes)),
            np.maximum(record.apart_s(), 1e-9),
            np.maximum([value for value in record.beside_s() if value is not None], 1e-9),
        )
        for directory, record in records
    ]
