"""Seconds of a collective from its fit: the one place that reads regimes, for the fit itself and for predictions.

A fit may have several regimes, pieces over ranges of message sizes that each have their own alpha and beta (eager and
rendezvous protocols, caches). Inside a piece the algorithm's cost terms hold. Between the largest size of one piece
and the smallest of the next nothing was measured: time runs straight from the one to the other, so that it is
continuous in bytes. Beyond the first and the last piece their own lines go on. No bytes take no time.

The first piece may grow with the logarithm of bytes instead (OSF eq. 18, log below m* and linear above). Below the
smallest size measured it stays at its latency, where eq. 18 falls to minus infinity.

A library changes protocol by the bytes of one step of the algorithm. A ring over p ranks sends m / p a step, so that
pieces of such an algorithm may be ranges of a step's bytes instead.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.profile.collectives.communication import CommunicationFit
from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import Floats
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

_KEPT = 16_384
"""Messages whose coefficients are remembered: those of a few searches."""


class Piece(NamedTuple):
    """One regime: the sizes that it was fitted on, the algorithm that held there, and its parameters.

    Attributes:
        doubling_s: where the piece is logarithmic, seconds a step for each doubling of the message; beta is 0 then.
        inner_alpha_s, inner_beta_s_per_byte: inside a node, of a hierarchical algorithm; 0 of a flat one.
        at_ranks: the one rank count that it was fitted to, where each was fitted by itself; 0 where it holds for all.
        of_step: whether ``low_bytes`` and ``high_bytes`` are of the message of one step, and not of the whole.
    """

    algorithm: Algorithm
    low_bytes: float
    high_bytes: float
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float
    doubling_s: float = 0.0
    inner_alpha_s: float = 0.0
    inner_beta_s_per_byte: float = 0.0
    at_ranks: float = 0.0
    of_step: bool = False

    def parts(self, ranks: ArrayLike) -> Floats:
        """The whole message's bytes over those that the piece's range is of."""
        return self.algorithm.parts(ranks) if self.of_step else np.ones_like(np.asarray(ranks, float))

    @property
    def parameters(self) -> Floats:
        """(5,) what its terms are multiplied by."""
        growth = self.doubling_s or self.beta_s_per_byte
        inner = self.inner_alpha_s, self.inner_beta_s_per_byte
        return np.array([self.alpha_s, growth, self.gamma_s_per_byte, *inner])

    def seconds(self, ranks: ArrayLike, message_bytes: ArrayLike, ranks_per_node: ArrayLike = 1) -> Floats:
        """Seconds under this piece's parameters, wherever its range ends."""
        return np.asarray(self.terms(ranks, message_bytes, ranks_per_node) @ self.parameters)

    def terms(self, ranks: ArrayLike, message_bytes: ArrayLike, ranks_per_node: ArrayLike = 1) -> Floats:
        """(..., 5) coefficients of this piece's parameters."""
        return coefficients(self.algorithm, ranks, message_bytes, ranks_per_node, self._logarithmic_from)

    def terms_of_one(self, ranks: float, message_bytes: float, ranks_per_node: float = 1) -> list[float]:
        """:meth:`terms` of one message."""
        terms: list[float] = self._row(ranks, message_bytes, ranks_per_node)[0].tolist()
        return terms

    def seconds_of_one(self, ranks: float, message_bytes: float, ranks_per_node: float = 1) -> float:
        """:meth:`seconds` of one message."""
        return float((self._row(ranks, message_bytes, ranks_per_node) @ self.parameters)[0])

    @property
    def _logarithmic_from(self) -> float | None:
        return self.low_bytes if self.doubling_s else None

    def _row(self, ranks: float, message_bytes: float, ranks_per_node: float) -> Floats:
        return coefficients_of_one(self.algorithm, ranks, message_bytes, ranks_per_node, self._logarithmic_from)


def coefficients(
    algorithm: Algorithm,
    ranks: ArrayLike,
    message_bytes: ArrayLike,
    ranks_per_node: ArrayLike = 1,
    logarithmic_from: float | None = None,
) -> Floats:
    """What the parameters of a piece are multiplied by, shape (..., 5): the fit's design and every prediction.

    Columns are those of alpha, growth, gamma_r, and of alpha and beta inside a node. Growth is beta; where
    ``logarithmic_from`` is given, seconds a doubling beyond so many bytes, at every step of the algorithm.
    """
    inside, between = algorithm.level_terms(ranks, message_bytes, ranks_per_node)
    columns = (between.alpha_count, between.beta_bytes, between.gamma_bytes, inside.alpha_count, inside.beta_bytes)
    design = np.stack(columns, axis=-1)
    if logarithmic_from is None:
        return design
    return logarithmic_design(design, np.asarray(message_bytes, float) / logarithmic_from)


@functools.lru_cache(_KEPT)
def coefficients_of_one(
    algorithm: Algorithm,
    ranks: float,
    message_bytes: float,
    ranks_per_node: float = 1,
    logarithmic_from: float | None = None,
) -> Floats:
    """:func:`coefficients` of one message, shape (1, 5); predictions ask for the same few, whatever their links."""
    return coefficients(algorithm, ranks, message_bytes, ranks_per_node, logarithmic_from)[None]


def logarithmic_design(design: Floats, ratio: Floats) -> Floats:
    """(..., 5) coefficients of a piece that grows with the logarithm of ``ratio``, bytes over its smallest size."""
    steps = design[..., 0] + design[..., 3]
    nothing = np.zeros(design.shape[:-1])
    columns = (design[..., 0], steps * np.log2(np.maximum(ratio, 1.0)), nothing, design[..., 3], nothing)
    return np.stack(columns, axis=-1)


def pieces_of(operation: CollectiveOperation, fits: Sequence[CommunicationFit]) -> tuple[Piece, ...]:
    """The pieces of the fits of one (library, operation, level), from small messages to large.

    Raises:
        UserError: a fit names an algorithm that the operation lacks.
    """
    return tuple(
        Piece(
            lookup(dict(operation.algorithms), fit.algorithm, f"algorithm of {operation.name}"),
            *fit.regime_range,
            fit.alpha_s,
            fit.beta_s_per_byte,
            fit.gamma_s_per_byte,
            fit.doubling_s,
            *((fit.inner.alpha_s, fit.inner.beta_s_per_byte) if fit.inner else (0.0, 0.0)),
            float(fit.ranks_range[0]) if fit.by_ranks else 0.0,
            fit.step_bytes_range is not None,
        )
        for fit in sorted(fits, key=lambda fit: fit.regime_range)
    )


def piecewise_seconds(
    pieces: Sequence[Piece], ranks: ArrayLike, message_bytes: ArrayLike, ranks_per_node: ArrayLike = 1
) -> Floats:
    """Seconds of a collective over ``ranks`` ranks and ``message_bytes``, broadcast against each other.

    Where rank counts were fitted each by itself, time between two of them runs straight over the logarithms of both;
    beyond them the nearest one's algorithm goes on.

    Args:
        pieces: at least one, of each rank count ordered by size and not overlapping; of a step, all or none.
        ranks_per_node: of the group; what hierarchical algorithms need to know.
    """
    p, m, g = np.broadcast_arrays(*(np.asarray(value, float) for value in (ranks, message_bytes, ranks_per_node)))
    counts = sorted({piece.at_ranks for piece in pieces})
    groups = [[piece for piece in pieces if piece.at_ranks == count] for count in counts]
    seconds = _over_sizes(groups[0], p, m, g)
    for (low, lower), (high, upper) in itertools.pairwise(zip(counts, groups, strict=True)):
        start, end = (
            np.maximum(_over_sizes(group, np.full_like(p, at), m, g), 1e-300)
            for group, at in ((lower, low), (upper, high))
        )
        share = np.log(np.maximum(p, 1) / low) / np.log(high / low)
        seconds = np.where(p > low, start * (end / start) ** np.minimum(share, 1.0), seconds)
        seconds = np.where(p >= high, _over_sizes(upper, p, m, g), seconds)
    return np.where(m > 0, seconds, 0.0)


def _over_sizes(pieces: Sequence[Piece], p: Floats, m: Floats, g: Floats) -> Floats:
    seconds, parts = pieces[0].seconds(p, m, g), pieces[0].parts(p)
    for lower, upper in itertools.pairwise(pieces):
        low, high = lower.high_bytes * parts, upper.low_bytes * parts
        start, end = lower.seconds(p, low, g), upper.seconds(p, high, g)
        seconds = np.where(m > low, start + (end - start) * (m - low) / (high - low), seconds)
        seconds = np.where(m >= high, upper.seconds(p, m, g), seconds)
    return seconds


def seconds_of_one(pieces: Sequence[Piece], ranks: float, message_bytes: float, ranks_per_node: float = 1) -> float:
    """:func:`piecewise_seconds` of one message: the same, but for rounding."""
    if message_bytes <= 0:
        return 0.0
    counts = sorted({piece.at_ranks for piece in pieces})
    if len(counts) == 1:
        return _over_sizes_of_one(pieces, ranks, message_bytes, ranks_per_node)
    # Counts beyond the measured ones take the nearest.
    above = min(max(bisect.bisect_right(counts, ranks), 1), len(counts) - 1)
    low, high = counts[above - 1 : above + 1]
    lower, upper = ([piece for piece in pieces if piece.at_ranks == count] for count in (low, high))
    if ranks <= low or ranks >= high:
        return _over_sizes_of_one(lower if ranks <= low else upper, ranks, message_bytes, ranks_per_node)
    start = max(_over_sizes_of_one(lower, low, message_bytes, ranks_per_node), 1e-300)
    end = max(_over_sizes_of_one(upper, high, message_bytes, ranks_per_node), 1e-300)
    return float(start * (end / start) ** float(np.log(ranks / low) / np.log(high / low)))


def _over_sizes_of_one(pieces: Sequence[Piece], ranks: float, message_bytes: float, ranks_per_node: float) -> float:
    parts = float(pieces[0].parts(ranks)) if pieces[0].of_step else 1.0
    # Only the piece, or the two, that the message needs.
    lower = pieces[0]
    for upper in pieces[1:]:
        low, high = lower.high_bytes * parts, upper.low_bytes * parts
        if low < message_bytes < high:
            start = lower.seconds_of_one(ranks, low, ranks_per_node)
            end = upper.seconds_of_one(ranks, high, ranks_per_node)
            return start + (end - start) * (message_bytes - low) / (high - low)
        if message_bytes < high:
            break
        lower = upper
    return lower.seconds_of_one(ranks, message_bytes, ranks_per_node)


def nearest_fit(
    operation: CollectiveOperation, fits: Sequence[CommunicationFit], ranks: float, message_bytes: float
) -> CommunicationFit:
    """The fit whose rank count, where each was fitted by itself, and whose sizes are nearest."""

    def distance(fit: CommunicationFit) -> tuple[float, float]:
        away = abs(math.log(ranks / fit.ranks_range[0])) if fit.by_ranks else 0.0
        return away, outside(message_bytes / _parts(operation, fit, ranks), fit.regime_range)

    return min(fits, key=distance)


def _parts(operation: CollectiveOperation, fit: CommunicationFit, ranks: float) -> float:
    """The whole message's bytes over those that the fit's regime is of."""
    return 1.0 if fit.step_bytes_range is None else float(pieces_of(operation, [fit])[0].parts(ranks))


def outside(value: float, span: tuple[float, float]) -> float:
    """How far a size lies outside a range, as a ratio's logarithm; 0 inside."""
    low, high = span
    inside = min(max(value, low), high)
    return abs(math.log(max(value, 1) / max(inside, 1)))


def spread_s(
    operation: CollectiveOperation, fits: Sequence[CommunicationFit], ranks: float, message_bytes: float
) -> float:
    """Standard deviation of a predicted time inside the range fitted on: of the nearest fit's parameters, and drift."""
    fit = nearest_fit(operation, fits, ranks, message_bytes)
    (piece,) = pieces_of(operation, [fit])
    row = piece.terms(ranks, message_bytes, fit.inner.ranks if fit.inner else 1)
    variance = max(float(row[:2] @ np.array(fit.covariance) @ row[:2]), 0.0)
    if fit.inner:
        variance += max(float(row[3:] @ np.array(fit.inner.covariance) @ row[3:]), 0.0)
    seconds = float(communication_seconds(operation, fits, ranks, message_bytes))
    return float(np.hypot(np.sqrt(variance), seconds * fit.block_relative_sd))


def communication_seconds(
    operation: CollectiveOperation, fits: Sequence[CommunicationFit], ranks: ArrayLike, message_bytes: ArrayLike
) -> Floats:
    """:func:`piecewise_seconds` of the fits of one (library, operation, level) of a profile; at least one fit.

    Ranks lie on nodes as they did where they were measured.
    """
    per_node = max(fit.inner.ranks if fit.inner else 1 for fit in fits)
    return piecewise_seconds(pieces_of(operation, fits), ranks, message_bytes, per_node)
