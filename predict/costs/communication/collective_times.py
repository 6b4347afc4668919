"""Seconds of one collective for any ranks and bytes, by the pieces of its fit, and what lies beyond that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_residuals import Residuals, residuals_of
from calibrate.profile.collectives.communication_time import Piece, pieces_of, piecewise_seconds, seconds_of_one
from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import Floats
from paradl_bench.core.units import format_bytes
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import Level
from predict.costs.sourced import Remark


class CollectiveTimes(NamedTuple):
    """A collective through one library at one level, under so much contention; stated ones have no residuals."""

    pieces: tuple[Piece, ...]
    residuals: Residuals = Residuals()

    def seconds(self, ranks: ArrayLike, message_bytes: ArrayLike, per_node: ArrayLike) -> Floats:
        """Of groups of so many ranks, ``per_node`` of which share a node; of the arguments' common shape."""
        return np.asarray(
            fitted_seconds(self.pieces, ranks, message_bytes, per_node) * self.residuals.factor(ranks, message_bytes)
        )

    def seconds_of_one(self, ranks: float, message_bytes: float, per_node: float) -> float:
        """:meth:`seconds` of one message: the same, but for rounding."""
        fitted_s = seconds_of_one(self.pieces, ranks, message_bytes, per_node)
        return fitted_s * self.residuals.factor_of_one(ranks, message_bytes)


def published_remarks(fits: Sequence[CommunicationFit], operation: str) -> tuple[Remark, ...]:
    """Whose sweeps were fitted."""
    names = dict.fromkeys(fit.published for fit in fits if fit.published)
    return tuple(Remark(f"published, not measured here: sweeps of {name}", False, operation) for name in names)


def fitted_seconds(pieces: Sequence[Piece], ranks: ArrayLike, message_bytes: ArrayLike, per_node: ArrayLike) -> Floats:
    """As the profile's ``piecewise_seconds``, each message by those pieces alone that it needs."""
    if len(pieces) == 1 or any(piece.at_ranks for piece in pieces):
        return piecewise_seconds(pieces, ranks, message_bytes, per_node)
    # Up to the end of the first piece, from there to the start of the second, up to its end, ...
    edges = [edge for low, high in itertools.pairwise(pieces) for edge in (low.high_bytes, high.low_bytes)]
    asked = [np.asarray(value, float) for value in (ranks, message_bytes, per_node)]
    p, m, g = np.broadcast_arrays(*asked)
    regime = np.searchsorted(edges, m / pieces[0].parts(p))
    seconds = np.empty(m.shape)
    for at in np.flatnonzero(np.bincount(regime.ravel())).tolist():
        in_regime = regime == at
        seconds[in_regime] = piecewise_seconds(
            pieces[at // 2 : at // 2 + 1 + at % 2], p[in_regime], m[in_regime], g[in_regime]
        )
    return seconds


def beyond_remarks(work: Collective, fits: Sequence[CommunicationFit]) -> tuple[Remark, ...]:
    """What is extrapolated where a call lies beyond the ranks or the bytes that its fits were made of."""
    remarks = []
    low, high = min(fit.ranks_range[0] for fit in fits), max(fit.ranks_range[1] for fit in fits)
    if any(fit.by_ranks for fit in fits) and work.ranks not in {fit.ranks_range[0] for fit in fits}:
        off = max(fit.held_out_ranks_relative_error or 0.0 for fit in fits)
        text = (
            f"{work.operation} scales with ranks like none of the known algorithms: a rank count left out of the fit"
            f" was predicted {off:.0%} wrong"
        )
        remarks.append(Remark(text, True))
    if not low <= work.ranks <= high:
        side = f"beyond {high}" if work.ranks > high else f"below {low}"
        remarks.append(Remark(f"{work.operation} {side} ranks", True))
    smallest, largest = min(fit.bytes_range[0] for fit in fits), max(fit.bytes_range[1] for fit in fits)
    if not smallest <= work.message_bytes <= largest:
        above = work.message_bytes > largest
        side = f"beyond {format_bytes(largest)}" if above else f"below {format_bytes(smallest)}"
        remarks.append(Remark(f"{work.operation} {side}", True, format_bytes(work.message_bytes)))
    return tuple(remarks)


def times_on(
    collective: CollectiveOperation, fits: Sequence[CommunicationFit], level: Level, contention: float
) -> CollectiveTimes:
    """The fit, with what the level states in its place and contention on beta; residuals where the level states none.

    What contention and other links change, they change by as much of what was measured as of what was fitted.
    """
    if level.alpha_s is not None and level.beta_s_per_byte is not None:
        algorithm = fits[0].algorithm if fits else collective.default_algorithm
        stated = lookup(dict(collective.algorithms), algorithm, f"algorithm of {collective.name}")
        return CollectiveTimes((Piece(stated, 1.0, 1.0, level.alpha_s, contention * level.beta_s_per_byte, 0.0),))
    pieces = tuple(
        piece._replace(
            alpha_s=piece.alpha_s if level.alpha_s is None else level.alpha_s,
            beta_s_per_byte=contention
            * (piece.beta_s_per_byte if level.beta_s_per_byte is None else level.beta_s_per_byte),
            doubling_s=piece.doubling_s if level.beta_s_per_byte is None else 0.0,
        )
        for piece in pieces_of(collective, fits)
    )
    stated_in_part = level.alpha_s is not None or level.beta_s_per_byte is not None
    return CollectiveTimes(pieces) if stated_in_part else CollectiveTimes(pieces, residuals_of(fits))
