"""Fits of collectives: alpha and beta per (library, operation, level) on the algorithms' cost terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.blocks import between_block_sd, block_sd, quantile_covariance
from calibrate.communication_choice import MIN_SIZES_OF_PIECE, Choice, Fitter, choose
from calibrate.communication_curve import Curve, Floats, Mask, Point, build_curve
from calibrate.communication_points import Key, read_points
from calibrate.communication_time import Piece, piecewise_seconds
from calibrate.profile import Candidate, CommunicationChoice, CommunicationFit, CommunicationPoint, InnerLevel
from calibrate.regression import fit_relative, relative_covariance
from paradl_bench.spec.cluster import NODE
from paradl_bench.spec.cost_terms import CollectiveOperation
from paradl_bench.spec.measurement import CollectiveSamples
from paradl_bench.spec.statistics import MAD_TO_SD
from paradl_bench.terminal import progress

KEPT_CANDIDATES = 8
"""A profile keeps the best of what was considered, not all of some dozens."""


class FittedCommunication(NamedTuple):
    """Fits, what was considered for each, and what was left out and why."""

    fits: tuple[CommunicationFit, ...]
    choices: tuple[CommunicationChoice, ...]
    notes: tuple[str, ...]


def fit_communication(
    samples: Iterable[CollectiveSamples], operations: Mapping[str, CollectiveOperation]
) -> FittedCommunication:
    """Fit every (library, operation, level).

    Args:
        operations: by name, with the algorithms' cost terms.

    Raises:
        UserError: an operation that has no cost terms; one that was imported is left out instead.
    """
    measured = read_points(samples, operations)
    fits: list[CommunicationFit] = []
    choices: list[CommunicationChoice] = []
    notes = list(measured.notes)
    with progress("fitting", len(measured.points)) as bar:
        for key, own in measured.points.items():
            bar.describe(f"fitting {' '.join(key)}")
            sizes = len({point.message_bytes for point in own})
            if sizes >= MIN_SIZES_OF_PIECE:
                inside = () if key[2] == NODE else measured.points.get((key[0], key[1], NODE), ())
                found, choice = fit_points(key, own, operations[key[1]], inside)
                fits += found
                choices.append(choice)
            else:
                notes.append(f"{' '.join(key)}: measured at {sizes} sizes; a fit needs {MIN_SIZES_OF_PIECE}: left out")
            bar.advance()
    return FittedCommunication(tuple(fits), tuple(choices), tuple(notes))


def fit_points(
    key: Key, points: Sequence[Point], operation: CollectiveOperation, inside: Sequence[Point] = ()
) -> tuple[list[CommunicationFit], CommunicationChoice]:
    """Fits of one (library, operation, level), one a regime, from at least three sizes; and what was considered.

    Args:
        inside: points of the level inside a node, which hierarchical algorithms are fitted to as well.
    """
    curve = build_curve(points, inside=inside)
    choice, considered = choose(curve, operation, key[0])
    everything = np.ones(len(curve), bool)
    # Every split of all points may fall where those of the folds did not; one piece always stands.
    one_piece = choice.fitter.form._replace(pieces=1, logarithmic=False)
    pieces = choice.fitter.pieces(everything) or Fitter(curve, one_piece).pieces(everything) or ()
    fits = [_describe(key, points, choice, pieces, index) for index in range(len(pieces))]
    return fits, _considered(key, choice, considered)


def _considered(key: Key, choice: Choice, considered: Sequence[Choice]) -> CommunicationChoice:
    def rank(other: Choice) -> tuple[bool, float]:
        errors = [error for error in other.errors() if error is not None]
        return other is not choice, sum(errors) if errors else np.inf

    kept = sorted(considered, key=rank)[:KEPT_CANDIDATES]
    library, operation, level = key
    return CommunicationChoice(
        library=library,
        operation=operation,
        level=level,
        considered=len(considered),
        candidates=tuple(
            Candidate(form=each.fitter.form.name, held_out_relative_error=sizes, held_out_ranks_relative_error=ranks)
            for each in kept
            for sizes, ranks in [each.errors()]
        ),
    )


def _describe(
    key: Key, points: Sequence[Point], choice: Choice, pieces: tuple[Piece, ...], index: int
) -> CommunicationFit:
    fitter, curve, piece = choice.fitter, choice.fitter.curve, pieces[index]
    all_inside = (curve.message_bytes >= piece.low_bytes) & (curve.message_bytes <= piece.high_bytes)
    inside = all_inside & curve.own
    indices = [int(index) for index in np.flatnonzero(inside)]
    fitted = piecewise_seconds(pieces, curve.ranks, curve.message_bytes, curve.ranks_per_node)
    held_out = fitted if choice.held_out is None else choice.held_out
    library, operation, level = key
    covariance = _covariance(fitter, piece, all_inside)
    return CommunicationFit(
        library=library,
        operation=operation,
        algorithm=piece.algorithm.name,
        level=level,
        regime=_regime(pieces, index),
        alpha_s=piece.alpha_s,
        beta_s_per_byte=piece.beta_s_per_byte,
        gamma_s_per_byte=piece.gamma_s_per_byte,
        doubling_s=piece.doubling_s,
        inner=_inner(piece, curve, inside, covariance),
        covariance=_block(covariance, 0, 1),
        bytes_range=(int(piece.low_bytes), int(piece.high_bytes)),
        ranks_range=(int(curve.ranks[inside].min()), int(curve.ranks[inside].max())),
        residual_relative_median=_median_error(fitted, curve, inside),
        held_out_relative_error=_median_error(held_out, curve, inside),
        held_out_ranks_relative_error=(
            None if choice.held_out_ranks is None else _median_error(choice.held_out_ranks, curve, inside)
        ),
        block_relative_sd=_common_drift([points[i] for i in indices], curve.precision[inside]),
        blocks=max(min(len(points[i].blocks) for i in indices), 2),
        points=int(inside.sum()),
        measured=tuple(
            CommunicationPoint(
                ranks=points[i].ranks,
                message_bytes=points[i].message_bytes,
                measured_s=float(curve.seconds[i]),
                fitted_s=float(fitted[i]),
                held_out_s=float(held_out[i]),
            )
            for i in indices
        ),
    )


def _inner(piece: Piece, curve: Curve, inside: Mask, covariance: Floats) -> InnerLevel | None:
    if not piece.algorithm.hierarchical:
        return None
    return InnerLevel(
        ranks=int(curve.ranks_per_node[inside].max()),
        alpha_s=piece.inner_alpha_s,
        beta_s_per_byte=piece.inner_beta_s_per_byte,
        covariance=_block(covariance, 3, 4),
    )


def _block(covariance: Floats, first: int, second: int) -> tuple[tuple[float, float], tuple[float, float]]:
    rows = covariance[np.ix_((first, second), (first, second))]
    return (float(rows[0, 0]), float(rows[0, 1])), (float(rows[1, 0]), float(rows[1, 1]))


def _common_drift(points: Sequence[Point], precision: Floats) -> float:
    """Standard deviation between blocks of what all sizes share: their weighted mean time relative to their medians.

    What each size has by itself is in the fit's covariance; as drift of everything it would count twice, and, where
    single sizes jump between two modes, for far too much.
    """
    count = min(len(point.blocks) for point in points)
    if count < 2:
        return float(np.median([between_block_sd(point.blocks) for point in points]))
    relative = np.array([[np.median(block) / point.seconds for block in point.blocks[:count]] for point in points])
    return block_sd(precision @ relative / precision.sum())


def _median_error(predicted: Floats, curve: Curve, inside: Mask) -> float:
    return float(np.nanmedian(np.abs(predicted[inside] / curve.seconds[inside] - 1)))


def _regime(pieces: tuple[Piece, ...], index: int) -> str:
    low, high = int(pieces[index].low_bytes), int(pieces[index].high_bytes)
    if len(pieces) == 1:
        return "all"
    if index == 0:
        return f"<={high}"
    return f">={low}" if index == len(pieces) - 1 else f"{low}..{high}"


def _covariance(fitter: Fitter, piece: Piece, inside: Mask) -> Floats:
    """(5, 5) covariance of a piece's parameters: refits of resampled times, and what the form misses beyond them."""
    curve = fitter.curve
    inside = fitter.points_for(piece.algorithm, inside)
    design = fitter.design(piece.algorithm, inside, piece.low_bytes if piece.doubling_s else None)
    precision, seconds = curve.precision[inside], curve.seconds[inside]
    drawn = np.stack(
        [fit_relative(design, times[inside], noise=curve.noise, precision=precision) for times in curve.drawn]
    )
    growth = piece.doubling_s or piece.beta_s_per_byte
    inner = piece.inner_alpha_s, piece.inner_beta_s_per_byte
    solution = np.array([piece.alpha_s, growth, piece.gamma_s_per_byte, *inner])
    free = solution > 0
    spare = max(len(seconds) - int(free.sum()), 1)
    residual_sd = MAD_TO_SD * float(np.median(np.abs(design @ solution / seconds - 1)))
    excess = max(0.0, residual_sd**2 * len(seconds) / spare - curve.noise**2)
    return quantile_covariance(drawn) + relative_covariance(design, seconds, excess, free)
