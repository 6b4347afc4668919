"""How far a collective's seconds may be off: the directions of its fit, its drift, and ranks beyond the fit's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from calibrate.communication_time import Piece, pieces_of
from calibrate.profile import CommunicationFit
from paradl_bench.spec.cost_terms import CollectiveOperation
from paradl_bench.spec.plan import Collective
from paradl_bench.spec.statistics import MAD_TO_SD


def communication_modes(
    work: Collective,
    ranks_per_node: int,
    fits: Sequence[CommunicationFit],
    collective: CollectiveOperation,
    contention: float,
    seconds: float,
) -> tuple[tuple[str, float], ...]:
    """Two independent directions of (alpha, beta), drift between blocks, and rank counts left out of the fit."""
    fit = min(fits, key=lambda each: outside(work.message_bytes, each.bytes_range))
    (piece,) = pieces_of(collective, [fit])
    terms = [float(term) for term in piece.terms(work.ranks, work.message_bytes, ranks_per_node)]
    where = f"{work.operation} at {fit.level} {fit.regime}"
    # What grows with the logarithm of bytes is no time on a link, so that flows which share one do not stretch it.
    growth = terms[1] * (1.0 if fit.doubling_s else contention)
    directions = [alpha_s * terms[0] + beta * growth for alpha_s, beta in cholesky_columns(fit.covariance)]
    if fit.inner:
        directions += [alpha_s * terms[3] + beta * terms[4] for alpha_s, beta in cholesky_columns(fit.inner.covariance)]
    modes = [(f"fit of {where}, {number}", shift) for number, shift in enumerate(directions, start=1)]
    modes.append(("drift of communication", seconds * fit.block_relative_sd))
    if work.ranks > fit.ranks_range[1]:
        error = fit.held_out_ranks_relative_error
        shift = _algorithms_apart(work, collective, piece, fit) if error is None else seconds * MAD_TO_SD * error
        modes.append(("communication beyond ranks", shift))
    return tuple((name, shift) for name, shift in modes if shift)


def _algorithms_apart(work: Collective, collective: CollectiveOperation, piece: Piece, fit: CommunicationFit) -> float:
    """Half of how far apart algorithms take a fit of one rank count, which cannot tell them from each other.

    Each is given the alpha and the beta that it needs for the start-up and the transfer measured; then the ranks grow.
    """
    measured = piece.terms(fit.ranks_range[1], work.message_bytes) * np.array(
        [piece.alpha_s, piece.doubling_s or piece.beta_s_per_byte, piece.gamma_s_per_byte, 0.0, 0.0]
    )
    if fit.doubling_s:
        # What each step adds with the logarithm of bytes grows with the number of steps.
        measured[:2] = measured[:2].sum(), 0.0
    seconds = []
    for algorithm in collective.algorithms.values():
        if not algorithm.hierarchical:
            before = algorithm.terms(fit.ranks_range[1], work.message_bytes)
            after = algorithm.terms(work.ranks, work.message_bytes)
            pairs = zip(measured[:3], before, after, strict=True)
            seconds.append(sum(float(part * (new / old)) for part, old, new in pairs if part))
    return (max(seconds) - min(seconds)) / 2


def cholesky_columns(
    covariance: tuple[tuple[float, float], tuple[float, float]],
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Columns of the covariance's Cholesky factor: alpha and beta differ by ten orders, which eigenvectors lose."""
    (alpha, both), (_, beta) = covariance
    first = math.sqrt(max(alpha, 0.0))
    along = both / first if first else 0.0
    return (first, along), (0.0, math.sqrt(max(beta - along**2, 0.0)))


def outside(value: int, span: tuple[int, int]) -> float:
    """How far a size lies outside a range, as a ratio's logarithm; 0 inside."""
    low, high = span
    inside = min(max(value, low), high)
    return abs(math.log(max(value, 1) / max(inside, 1)))
