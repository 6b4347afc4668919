"""How far a predicted time of a collective may be off: the one place that says so (docs/model/interval.md).

Four things move it, each a standard deviation in seconds: the fit's parameters, as samples and residuals leave them
open; drift between blocks, which all sizes share, as the few blocks that there were tell of a further one; what a size
has by itself, which no line through its neighbours knows, read from sizes left out; and, at a rank count that was not
measured, how far the algorithm's scaling is off, read from rank counts left out. What is read from points left out is
read near the size asked for.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from calibrate.profile.collectives.communication import (
    CommunicationFit,
    CommunicationPoint,
    ComparableScaling,
)
from calibrate.profile.collectives.communication_time import (
    coefficients_of_one,
    communication_seconds,
    nearest_fit,
    outside,
    pieces_of,
)
from calibrate.statistics.blocks import next_block_stretch, student_90
from paradl_bench.core.statistics import Z90, Floats, grouped
from paradl_bench.core.units import format_bytes
from paradl_bench.plan.cost_terms.terms import CollectiveOperation

NEAR_DOUBLINGS = 2.0
"""Sizes up to four times smaller or larger tell of a size."""
FEWEST_NEAR = 3


class Asked(NamedTuple):
    """Of which collective: how many ranks, how many of them share a node, and the message."""

    ranks: int
    message_bytes: int
    ranks_per_node: int = 1


class NearErrors(NamedTuple):
    """What points of sizes near one tell when they are left out: mean squares of relative errors.

    Attributes:
        of_sizes: of each point, by the fit without its size. of_counts: as :meth:`MeasuredPoints.scaling_errors`.
    """

    of_sizes: float
    of_counts: tuple[float, ...]


class MeasuredPoints:
    """Points that fits of one (library, operation, level) were made of; what they tell is found once."""

    def __init__(self, fits: Sequence[CommunicationFit]) -> None:
        self.fits = fits
        self.points = [point for fit in fits for point in fit.measured]
        self.sizes = _sizes(self.points)
        self.counts = {point.ranks for point in self.points} or {count for fit in fits for count in fit.ranks_range}
        # Of each rank count, where there are several, those that a fit without it was held against.
        self._of_counts = {
            count: [point for point in self.points if point.ranks == count and point.held_out_ranks_s]
            for count in (self.counts if len(self.counts) > 1 else ())
        }
        self._sizes_of_counts = {count: _sizes(points) for count, points in self._of_counts.items()}
        self._near: dict[Hashable, NearErrors] = {}

    def near(self, message_bytes: int) -> NearErrors:
        """Of points of sizes near one, or of the three nearest sizes; for a rank count of the sizes measured there."""
        sizes = _near(self.sizes, message_bytes)
        of_counts = {count: _near(of_count, message_bytes) for count, of_count in self._sizes_of_counts.items()}
        key = sizes, *of_counts.values()
        if key not in self._near:
            points = [point for point in self.points if point.message_bytes in sizes]
            errors = self._scaling_errors(
                {
                    count: [point for point in points if point.message_bytes in of_counts[count]]
                    for count, points in self._of_counts.items()
                }
            )
            self._near[key] = NearErrors(_mean_square(_size_errors(points)), tuple(errors))
        return self._near[key]

    def scaling_errors(self) -> list[float]:
        """Of each rank count left out, the mean square by which the fit without it was off, a doubling of ranks.

        What a size has by itself is taken off.
        """
        return self._scaling_errors(self._of_counts)

    def _scaling_errors(self, of_counts: Mapping[int, Sequence[CommunicationPoint]]) -> list[float]:
        errors_of_counts = []
        for count, points in of_counts.items():
            if points:
                errors = np.array([point.measured_s / (point.held_out_ranks_s or math.inf) - 1 for point in points])
                excess = _mean_square(errors) - _mean_square(_size_errors(points))
                errors_of_counts.append(max(excess, 0.0) / _doublings(count, self.counts - {count}) ** 2)
        return errors_of_counts


def _sizes(points: Sequence[CommunicationPoint]) -> list[int]:
    """The sizes of points, ascending."""
    return sorted({point.message_bytes for point in points})


def _near(sizes: Sequence[int], message_bytes: int) -> tuple[int, ...]:
    """Those near one, or the three nearest."""
    away = [abs(math.log2(max(size, 1) / max(message_bytes, 1))) for size in sizes]
    nearest = sorted(range(len(away)), key=away.__getitem__)[:FEWEST_NEAR]
    close = [at for at, distance in enumerate(away) if distance <= NEAR_DOUBLINGS]
    return tuple(sizes[at] for at in sorted({*close, *nearest}))


def error_modes(
    operation: CollectiveOperation,
    measured: MeasuredPoints,
    asked: Asked,
    seconds: float,
    *,
    contention: float = 1.0,
) -> tuple[tuple[str, float], ...]:
    """What one standard deviation of each source of error adds to a predicted time; equal names move together.

    Args:
        measured: of fits of one (library, operation, level).
        seconds: that they predict. contention: by which beta was multiplied.
    """
    fits = measured.fits
    fit = nearest_fit(operation, fits, asked.ranks, asked.message_bytes)
    (piece,) = pieces_of(operation, [fit])
    terms = piece.terms_of_one(*asked)
    # What grows with the logarithm of bytes is no time on a link, so that flows which share one do not stretch it.
    growth = terms[1] * (1.0 if fit.doubling_s else contention)
    shifts = [alpha_s * terms[0] + beta * growth for alpha_s, beta in cholesky_columns(fit.covariance)]
    if fit.inner:
        shifts += [alpha_s * terms[3] + beta * terms[4] for alpha_s, beta in cholesky_columns(fit.inner.covariance)]
    where = f"{operation.name} at {fit.level}"
    modes = [(f"fit of {where} {fit.regime}, {number}", shift) for number, shift in enumerate(shifts, start=1)]
    modes.append(("drift of communication", seconds * fit.block_relative_sd * next_block_stretch(fit.blocks)))
    # Sizes share what they have by themselves only with those nearest.
    near = format_bytes(2 ** round(math.log2(max(asked.message_bytes, 1))))
    modes.append((f"size of {where}, {near}", seconds * size_relative_sd(measured, asked)))
    modes.append(("communication at other ranks", ranks_sd_s(operation, measured, asked, seconds)))
    return tuple((name, shift) for name, shift in modes if shift)


def other_level_mode(
    operation: CollectiveOperation, fits: Sequence[CommunicationFit], level: str, message_bytes: int, seconds: float
) -> tuple[tuple[str, float], ...]:
    """What stands for a level that was not measured: nothing tells how much faster, or slower, its links are.

    The interval then reaches as far as the time over the fewest ranks that the fits were measured with, or as the time
    predicted if that is more: down to nothing, or up by so much. At a level outside those measured it may be longer.
    """
    if any(fit.level == level for fit in fits):
        return ()
    fewest = min(fit.ranks_range[0] for fit in fits)
    known = float(communication_seconds(operation, fits, fewest, message_bytes))
    return (("level not measured", max(seconds, known) / Z90),)


def size_relative_sd(measured: MeasuredPoints, asked: Asked) -> float:
    """Root mean square by which sizes near this one, left out of the fit, differed from what it said.

    Beyond the sizes measured it grows with the distance in doublings.
    """
    if not measured.sizes:
        return 0.0
    beyond = outside(asked.message_bytes, (measured.sizes[0], measured.sizes[-1])) / math.log(2)
    return math.sqrt(measured.near(asked.message_bytes).of_sizes) * max(1.0, beyond)


def ranks_sd_s(operation: CollectiveOperation, measured: MeasuredPoints, asked: Asked, seconds: float) -> float:
    """Standard deviation at a rank count that was not measured; 0 at one that was.

    Each rank count that was left out tells once how far the scaling is off a doubling, beyond what a size has by
    itself; what is typical of the profile's other collectives at this level counts as one more. Error grows with the
    distance in doublings: a wrong exponent is wrong each time. So few observations make a standard deviation uncertain:
    it is stretched to Student's quantile, with the degrees of freedom that unequal weights leave (Satterthwaite); the
    sizes of a sweep err alike, so they count as one. Where no count was left out anywhere, half of how far the
    operation's algorithms come apart stands for all.
    """
    distance = _doublings(asked.ranks, measured.counts)
    if not distance or not seconds:
        return 0.0
    errors = measured.near(asked.message_bytes).of_counts
    other = next((fit.comparable_scaling for fit in measured.fits if fit.comparable_scaling), None)
    if not errors and other is None:
        return algorithms_apart_s(operation, measured.fits, asked)
    if other is None:
        apart = algorithms_apart_s(operation, measured.fits, asked) / seconds / distance
        other = ComparableScaling(relative_sd=apart, counts=1)
    weight = 1 / (len(errors) + 1)
    variance = weight * (sum(errors) + other.relative_sd**2)
    freedom = 1 / (weight**2 * (len(errors) + 1 / other.counts))
    return seconds * distance * math.sqrt(variance) * student_90(freedom) / Z90


def with_comparable_scaling(fits: Sequence[CommunicationFit]) -> tuple[CommunicationFit, ...]:
    """Fits that know how far scaling over rank counts was off in the other collectives of their level.

    The median over the rank counts left out of them: one whose scaling fails altogether says little of the others.
    """
    groups = grouped(fits, lambda fit: fit.key)
    errors = {key: MeasuredPoints(group).scaling_errors() for key, group in groups.items()}
    informed = []
    for fit in fits:
        others: list[float] = []
        for key, of_key in errors.items():
            if key != fit.key and key[2] == fit.level:
                others += of_key
        comparable = None
        if others:
            comparable = ComparableScaling(relative_sd=math.sqrt(float(np.median(others))), counts=len(others))
        informed.append(msgspec.structs.replace(fit, comparable_scaling=comparable))
    return tuple(informed)


def algorithms_apart_s(operation: CollectiveOperation, fits: Sequence[CommunicationFit], asked: Asked) -> float:
    """Half of how far algorithms take a fit of one rank count, which cannot tell them from each other.

    Each is given the alpha and the beta that it needs for the start-up and the transfer at the count measured that is
    nearest; then the ranks change. One of short messages alone has no say where the transfer outweighs the start-up.
    """
    fit = nearest_fit(operation, fits, asked.ranks, asked.message_bytes)
    (piece,) = pieces_of(operation, [fit])
    low, high = fit.ranks_range
    known = min(max(asked.ranks, low), high)
    terms = piece.terms_of_one(known, asked.message_bytes, asked.ranks_per_node)
    parts = [term * factor for term, factor in zip(terms, piece.parameters.tolist(), strict=True)]
    if fit.doubling_s:
        # What each step adds with the logarithm of bytes grows with the number of steps.
        parts[:2] = parts[0] + parts[1], 0.0
    seconds = []
    for algorithm in operation.algorithms.values():
        if not algorithm.hierarchical and not (algorithm.short and parts[1] > parts[0]):
            before, after = (
                coefficients_of_one(algorithm, ranks, asked.message_bytes)[0].tolist() for ranks in (known, asked.ranks)
            )
            triples = zip(parts[:3], before[:3], after[:3], strict=True)
            seconds.append(sum(part * (new / old) for part, old, new in triples if part and old))
    return (max(seconds) - min(seconds)) / 2 if seconds else 0.0


def _doublings(ranks: int, counts: Iterable[int]) -> float:
    """From a rank count to the nearest of some."""
    return min(abs(math.log2(ranks / count)) for count in counts)


def _size_errors(points: Sequence[CommunicationPoint]) -> Floats:
    return np.array([point.measured_s / point.held_out_s - 1 for point in points if point.held_out_s])


def _mean_square(errors: Floats) -> float:
    return float(np.mean(errors**2)) if len(errors) else 0.0


def cholesky_columns(
    covariance: tuple[tuple[float, float], tuple[float, float]],
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Columns of the covariance's Cholesky factor: alpha and beta differ by ten orders, which eigenvectors lose."""
    (alpha, both), (_, beta) = covariance
    first = math.sqrt(max(alpha, 0.0))
    along = both / first if first else 0.0
    return (first, along), (0.0, math.sqrt(max(beta - along**2, 0.0)))
