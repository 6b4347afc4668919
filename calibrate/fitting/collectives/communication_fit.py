"""Fits of collectives: alpha and beta per (library, operation, level) on the algorithms' cost terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.fitting.collectives.communication_choice import Choice, choose, tried
from calibrate.fitting.collectives.communication_curve import Curve, Mask, Point, build_curve
from calibrate.fitting.collectives.communication_points import Key, read_points
from calibrate.fitting.collectives.communication_segments import MIN_SIZES_OF_PIECE, Form
from calibrate.fitting.collectives.communication_spread import with_comparable_scaling
from calibrate.fitting.collectives.outliers import outliers_of
from calibrate.profile.collectives.communication import (
    Candidate,
    CommunicationChoice,
    CommunicationFit,
    CommunicationPoint,
    InnerLevel,
)
from calibrate.profile.collectives.communication_time import Piece, piecewise_seconds
from calibrate.statistics.blocks import between_block_sd, block_sd, quantile_covariance, student_90
from calibrate.statistics.regression import fit_relative_many, relative_covariance
from paradl_bench.core.statistics import MAD_TO_SD, Z90, Floats, grouped
from paradl_bench.core.terminal.command_line import progress
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.records.cluster import NODE
from paradl_bench.records.samples import CollectiveSamples

KEPT_CANDIDATES = 8
"""A profile keeps the best of what was considered, not all of some dozens."""
MAX_SIZES = 48
"""Four a doubling over twelve doublings: more tell nothing that a line of a few pieces can take up."""


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
        for key, points in measured.points.items():
            bar.describe(f"fitting {' '.join(key)}")
            sizes = len({point.message_bytes for point in points})
            if sizes >= MIN_SIZES_OF_PIECE:
                inside = () if key[2] == NODE else measured.points.get((key[0], key[1], NODE), ())
                fits_of_key, choice = fit_points(key, points, operations[key[1]], inside)
                fits += fits_of_key
                choices.append(choice)
            else:
                notes.append(f"{' '.join(key)}: measured at {sizes} sizes; a fit needs {MIN_SIZES_OF_PIECE}: left out")
            bar.advance()
    return FittedCommunication(with_comparable_scaling(fits), tuple(choices), (*notes, *_unscaled(fits)))


def _unscaled(fits: Sequence[CommunicationFit]) -> list[str]:
    """Where no algorithm's scaling holds between the rank counts measured."""
    notes = []
    for key, of_key in grouped((fit for fit in fits if fit.by_ranks), lambda fit: fit.key).items():
        errors: dict[int, float] = {}
        for fit in of_key:
            count = fit.ranks_range[0]
            errors[count] = max(errors.get(count, 0), fit.held_out_ranks_relative_error or 0)
        off = ", ".join(f"{count} ranks by {error:.0%}" for count, error in errors.items() if error)
        notes.append(
            f"{' '.join(key)}: no algorithm scales as well as separate fits at {', '.join(map(str, errors))}"
            f" ranks; other rank counts are a guess (error at a count left out: {off})"
        )
    return notes


def fit_points(
    key: Key, points: Sequence[Point], operation: CollectiveOperation, inside: Sequence[Point] = ()
) -> tuple[list[CommunicationFit], CommunicationChoice]:
    """Fits of one (library, operation, level), one a regime, from at least three sizes; and what was considered.

    Hierarchical algorithms are fitted to the points inside a node as well.
    """
    points = _thinned(points)
    curve = build_curve(points, inside=_thinned(inside))
    choice, considered = choose(curve, operation, key[0])
    # Every split of all points may fall where those of the folds did not; one piece always stands.
    pieces = choice.pieces or tried(curve, [Form((operation.algorithms[operation.algorithm_of(key[0])],))])[0].pieces
    assert pieces is not None
    fits = [_describe(key, points, (curve, choice), pieces, index) for index in range(len(pieces))]
    return fits, _considered(key, choice, considered, curve)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Of sweeps of very many sizes some, evenly spaced in logarithm."""
    sizes = np.unique([point.message_bytes for point in points])
    if len(sizes) <= MAX_SIZES:
        return list(points)
    nearest = np.abs(np.log(np.geomspace(sizes[0], sizes[-1], MAX_SIZES))[:, None] - np.log(sizes)).argmin(axis=1)
    kept = set(sizes[nearest].tolist())
    return [point for point in points if point.message_bytes in kept]


def _considered(key: Key, choice: Choice, considered: Sequence[Choice], curve: Curve) -> CommunicationChoice:
    def rank(other: Choice) -> tuple[bool, float]:
        errors = [error for error in other.errors(curve) if error is not None]
        return other is not choice, sum(errors) if errors else np.inf

    kept = sorted(considered, key=rank)[:KEPT_CANDIDATES]
    library, operation, level = key
    return CommunicationChoice(
        library=library,
        operation=operation,
        level=level,
        considered=len(considered),
        candidates=tuple(
            Candidate(form=form.name, held_out_relative_error=sizes, held_out_ranks_relative_error=ranks)
            for form in kept
            for sizes, ranks in [form.errors(curve)]
        ),
    )


def _describe(
    key: Key, points: Sequence[Point], chosen: tuple[Curve, Choice], pieces: tuple[Piece, ...], index: int
) -> CommunicationFit:
    (curve, choice), piece = chosen, pieces[index]
    at = curve.message_bytes / piece.parts(curve.ranks)
    all_inside = (at >= piece.low_bytes) & (at <= piece.high_bytes)
    if piece.at_ranks:
        all_inside &= curve.ranks == piece.at_ranks
    inside = all_inside & curve.own
    indices = [int(index) for index in np.flatnonzero(inside)]
    fitted = piecewise_seconds(pieces, curve.ranks, curve.message_bytes, curve.ranks_per_node)
    held_out = fitted if choice.held_out is None else choice.held_out
    over_ranks = np.full(len(curve), np.nan) if choice.held_out_ranks is None else choice.held_out_ranks
    library, operation, level = key
    covariance = _covariance(curve, choice.reduction, piece, all_inside)
    return CommunicationFit(
        library=library,
        operation=operation,
        algorithm=piece.algorithm.name,
        level=level,
        regime=_regime(pieces, piece),
        alpha_s=piece.alpha_s,
        beta_s_per_byte=piece.beta_s_per_byte,
        gamma_s_per_byte=piece.gamma_s_per_byte,
        doubling_s=piece.doubling_s,
        inner=_inner(piece, curve, inside, covariance),
        covariance=_block(covariance, 0, 1),
        bytes_range=(int(curve.message_bytes[inside].min()), int(curve.message_bytes[inside].max())),
        step_bytes_range=(piece.low_bytes, piece.high_bytes) if piece.of_step else None,
        ranks_range=(int(curve.ranks[inside].min()), int(curve.ranks[inside].max())),
        residual_relative_median=_median_error(fitted, curve, inside),
        held_out_relative_error=_median_error(held_out, curve, inside),
        held_out_ranks_relative_error=(
            _median_error(over_ranks, curve, inside) if np.isfinite(over_ranks[inside]).any() else None
        ),
        block_relative_sd=_common_drift([points[i] for i in indices], curve.precision[inside]),
        blocks=max(min(len(points[i].blocks) for i in indices), 2),
        points=int(inside.sum()),
        by_ranks=bool(piece.at_ranks),
        outliers=tuple(outliers for i in indices for outliers in outliers_of(points[i])),
        measured=tuple(_measured(points[i], curve.seconds[i], fitted[i], held_out[i], over_ranks[i]) for i in indices),
    )


def _measured(
    point: Point, measured_s: float, fitted_s: float, held_out_s: float, held_out_ranks_s: float
) -> CommunicationPoint:
    return CommunicationPoint(
        ranks=point.ranks,
        message_bytes=point.message_bytes,
        measured_s=float(measured_s),
        fitted_s=float(fitted_s),
        held_out_s=float(held_out_s),
        held_out_ranks_s=float(held_out_ranks_s) if np.isfinite(held_out_ranks_s) else None,
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

    What each size has by itself is in the fit's covariance, and would count twice.
    """
    count = min(len(point.blocks) for point in points)
    if count < 2:
        return float(np.median([between_block_sd(point.blocks) for point in points]))
    relative = np.array([[np.median(block) / point.seconds for block in point.blocks[:count]] for point in points])
    return block_sd(precision @ relative / precision.sum())


def _median_error(predicted: Floats, curve: Curve, inside: Mask) -> float:
    return float(np.nanmedian(np.abs(predicted[inside] / curve.seconds[inside] - 1)))


def _regime(pieces: tuple[Piece, ...], piece: Piece) -> str:
    kin = [other for other in pieces if other.at_ranks == piece.at_ranks]
    low, high = int(piece.low_bytes), int(piece.high_bytes)
    if len(kin) == 1:
        sizes = "all"
    elif piece == kin[0]:
        sizes = f"<={high}"
    else:
        sizes = f">={low}" if piece == kin[-1] else f"{low}..{high}"
    sizes += " a step" * (piece.of_step and len(kin) > 1)
    if not piece.at_ranks:
        return sizes
    return f"{piece.at_ranks:.0f} ranks" + (f", {sizes}" if len(kin) > 1 else "")


def _covariance(curve: Curve, reduction: bool, piece: Piece, inside: Mask) -> Floats:
    """(5, 5) covariance of a piece's parameters: refits of resampled times, and what the form misses beyond them."""
    inside = inside if piece.algorithm.hierarchical else inside & curve.own
    design = piece.terms(curve.ranks[inside], curve.message_bytes[inside], curve.ranks_per_node[inside])
    if not reduction:
        design[:, 2] = 0.0
    precision, seconds, drawn_s = curve.precision[inside], curve.seconds[inside], curve.drawn[:, inside]
    shape = drawn_s.shape
    drawn = fit_relative_many(
        np.broadcast_to(design, (*shape, 5)), drawn_s, noise=curve.noise, precision=np.broadcast_to(precision, shape)
    )
    free = piece.parameters > 0
    spare = max(len(seconds) - int(free.sum()), 1)
    residual_sd = MAD_TO_SD * float(np.median(np.abs(design @ piece.parameters / seconds - 1)))
    excess = max(0.0, residual_sd**2 * len(seconds) / spare - curve.noise**2)
    # Few blocks leave their own spread uncertain: the interval that is made of this is to hold 90% all the same.
    stretch = student_90(curve.blocks - 1) / Z90 if curve.blocks > 1 else 1.0
    return quantile_covariance(drawn) * stretch**2 + relative_covariance(design, seconds, excess, free)
