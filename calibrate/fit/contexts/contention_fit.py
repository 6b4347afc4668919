"""Contention phi from sweeps in which several groups ran at once, beside one alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.fit.reading import Placed
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_time import pieces_of, piecewise_seconds
from calibrate.profile.collectives.contention import Contention, ContentionPoint
from calibrate.statistics.pair_draws import Floats, Pair, draw_pairs, medians
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.records.samples import CollectiveSamples

_LEAST_SHARE = 0.3
"""Of the time at some size that bytes have to take, or phi is lost in the noise of the start-up."""

_Alike = tuple[str, str, str, str, str, str, int, int]
"""What a pair shares: library, operation, level, tool, dtype, buffers, ranks, bytes."""


class _Point(NamedTuple):
    ranks: int
    message_bytes: int
    ranks_per_node: int


def fit_contention(
    samples: Iterable[Placed[CollectiveSamples]],
    fits: Sequence[CommunicationFit],
    operations: Mapping[str, CollectiveOperation],
) -> tuple[tuple[Contention, ...], tuple[str, ...]]:
    """phi per (library, operation, level, groups at once), and what was left out and why.

    With s the share of a time that its bytes take under the fit of alpha and beta, the ratio of times is
    1 + (phi - 1) s: phi minimises the sum of absolute errors of that over sizes and blocks, and is at least 1. The
    share is read off the very function that predicts.
    """
    placed = list(samples)
    together: dict[tuple[str, str, str, int], list[Placed[CollectiveSamples]]] = {}
    for directory, record in placed:
        if record.concurrent > 1:
            key = record.library, record.operation, record.level, record.concurrent
            together.setdefault(key, []).append(Placed(directory, record))
    alone = _Alone(record for record in placed if record.record.concurrent == 1)
    entries: list[Contention] = []
    notes: list[str] = []
    for key, records in sorted(together.items()):
        own = [fit for fit in fits if (fit.library, fit.operation, fit.level) == key[:3]]
        found = _fit(key, records, alone, own, operations)
        if isinstance(found, str):
            notes.append(f"{' '.join(key[:3])}, {key[3]} groups at once: {found}: left out")
        else:
            entries.append(found)
    return tuple(entries), tuple(notes)


class _Alone:
    """Records of groups that ran alone, found by likeness: of the same block, else of the directory, else of any."""

    def __init__(self, records: Iterable[Placed[CollectiveSamples]]) -> None:
        self._found: dict[tuple[object, ...], list[CollectiveSamples]] = {}
        for directory, record in records:
            alike = _alike(record)
            for key in ((alike, directory, record.block), (alike, directory), (alike,)):
                self._found.setdefault(key, []).append(record)

    def beside(self, directory: int, record: CollectiveSamples) -> list[CollectiveSamples]:
        """What to hold a record against; empty where nothing alike ran alone."""
        alike = _alike(record)
        keys: tuple[tuple[object, ...], ...] = ((alike, directory, record.block), (alike, directory), (alike,))
        return next((self._found[key] for key in keys if key in self._found), [])


def _alike(record: CollectiveSamples) -> _Alike:
    what = record.library, record.operation, record.level, record.tool, record.dtype, record.buffers
    return *what, record.ranks, record.message_bytes


def _fit(
    key: tuple[str, str, str, int],
    records: Sequence[Placed[CollectiveSamples]],
    alone: _Alone,
    fits: Sequence[CommunicationFit],
    operations: Mapping[str, CollectiveOperation],
) -> Contention | str:
    if not fits or key[1] not in operations:
        return "no fit of alpha and beta says which part of the time its bytes take"
    operation = operations[key[1]]
    groups: dict[tuple[int, int, _Point], list[CollectiveSamples]] = {}
    for directory, record in records:
        if record.message_bytes > 0 and alone.beside(directory, record):
            point = _Point(record.ranks, record.message_bytes, record.ranks_per_node or _per_node(fits))
            groups.setdefault((directory, record.block, point), []).append(record)
    if not groups:
        return "nothing alike ran alone (same tool, ranks, size and level)"
    points = sorted({point for _, _, point in groups})
    blocks = sorted({(directory, block) for directory, block, _ in groups})
    pairs = [
        Pair(
            blocks.index((directory, block)),
            points.index(point),
            _calls(operation, alone.beside(directory, own[0])),
            _calls(operation, own),
        )
        for (directory, block, point), own in sorted(groups.items())
    ]
    if any(pair.alone_s.min() <= 0 for pair in pairs):
        return "a time of 0 seconds is no measurement"
    shares = _shares(operation, fits, points)
    if shares.max() < _LEAST_SHARE:
        return f"bytes take at most {shares.max():.0%} of the time at the sizes measured: sweep larger ones"
    return _describe(key, pairs, points, shares)


def _per_node(fits: Sequence[CommunicationFit]) -> int:
    return max(fit.inner.ranks if fit.inner else 1 for fit in fits)


def _calls(operation: CollectiveOperation, records: Sequence[CollectiveSamples]) -> Floats:
    return np.concatenate([operation.call_seconds(record.samples_s) for record in records])


def _shares(operation: CollectiveOperation, fits: Sequence[CommunicationFit], points: Sequence[_Point]) -> Floats:
    """Per point, how much doubling beta adds to its time, relative: what phi acts on in a prediction."""
    pieces = pieces_of(operation, fits)
    doubled = [piece._replace(beta_s_per_byte=2 * piece.beta_s_per_byte) for piece in pieces]
    once, twice = (np.array([float(piecewise_seconds(each, *point)) for point in points]) for each in (pieces, doubled))
    return np.asarray(twice / once - 1)


def _describe(
    key: tuple[str, str, str, int], pairs: Sequence[Pair], points: Sequence[_Point], shares: Floats
) -> Contention:
    alone_s, together_s = medians(pairs)
    at = np.array([pair.at for pair in pairs])
    ratios = together_s / alone_s
    factor = _phi(ratios, shares[at])
    draws = draw_pairs(pairs)
    drawn = [
        _phi(row, own) for row, own in zip(draws.condition_s / draws.alone_s, shares[at][draws.chosen], strict=True)
    ]
    low, high = np.quantile(drawn, [0.05, 0.95])
    fitted = 1 + (factor - 1) * shares
    measured = np.array([np.median(ratios[at == index]) for index in range(len(points))])
    library, operation, level, concurrent = key
    return Contention(
        library=library,
        operation=operation,
        level=level,
        concurrent=concurrent,
        ranks=(min(point.ranks for point in points), max(point.ranks for point in points)),
        bytes_range=(min(point.message_bytes for point in points), max(point.message_bytes for point in points)),
        factor=factor,
        factor_interval=(min(float(low), factor), max(float(high), factor)),
        residual_relative_median=float(np.median(np.abs(fitted / measured - 1))),
        samples=sum(pair.condition_s.size for pair in pairs),
        points=tuple(
            ContentionPoint(
                ranks=point.ranks,
                message_bytes=point.message_bytes,
                measured_ratio=float(measured[index]),
                fitted_ratio=float(fitted[index]),
            )
            for index, point in enumerate(points)
        ),
    )


def _phi(ratios: Floats, shares: Floats) -> float:
    """The median of 1 + (ratio - 1) / share, weighted by the shares: least absolute errors of the ratios."""
    told = shares > 0
    if not told.any():
        return 1.0
    estimates, weights = (ratios[told] - 1) / shares[told], shares[told]
    order = np.argsort(estimates)
    reached = np.cumsum(weights[order])
    return 1 + max(0.0, float(estimates[order][np.searchsorted(reached, reached[-1] / 2)]))
