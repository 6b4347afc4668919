"""Sweeps over rank counts, and the *knee* of each.

That is its largest rank count up to which no point's efficiency falls below a fraction of that at the smallest count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.plan.strategy import Strategy, parse_strategy
from predict.prediction.interval import Timed, efficiency_band
from predict.prediction.prediction import Prediction

_A_RANK = "samples a rank"


class Sweep(NamedTuple):
    """One strategy over rank counts.

    Attributes:
        strategy: the kind of the axis that grows, with what stands inside of it: ``data+f2``.
        knee_range: of the lower and of the upper ends of the bands of their ratios to that at the smallest count.
    """

    strategy: str
    kept: str
    fraction: float
    smallest_ranks: int
    largest_ranks: int
    knee_ranks: int
    knee_range: tuple[int, int]

    @property
    def keeps_samples_a_rank(self) -> bool:
        """Whether the mini-batch grows with the ranks."""
        return self.kept.endswith(_A_RANK)

    def __str__(self) -> str:
        goes_on = ", the most of the sweep" if self.knee_ranks == self.largest_ranks else ""
        low, high = self.knee_range
        band = f" (90%: {low} to {high})" if low < high else ""
        text = f"{self.strategy}, {self.kept}: {self.knee_ranks} ranks{goes_on}{band}."
        return f"{text} Up to there efficiency is at least {self.fraction:.3g} of that at {self.smallest_ranks} ranks."


class _Point(NamedTuple):
    position: int
    prediction: Prediction
    timed: Timed


def check_fraction(fraction: float) -> None:
    """Raise a UserError of a fraction of the efficiency that is not above 0 and at most 1."""
    if not 0 < fraction <= 1:
        raise UserError(f"--knee {fraction:g}: give a fraction above 0 and at most 1")


def with_knees(
    predictions: Sequence[Prediction], timed: Sequence[Timed], *, strong: bool, fraction: float
) -> tuple[tuple[Prediction, ...], tuple[Sweep, ...]]:
    """Predictions with ``knee_ranks`` where they are part of a sweep, and the sweeps.

    A sweep is what one strategy makes of at least two rank counts by its outermost axis, with the samples a rank (weak
    scaling) or all of them (strong) kept.

    Args:
        timed: the iteration of each prediction with its interval.
        fraction: of the efficiency at the smallest rank count, above 0 and at most 1; a UserError else.
    """
    check_fraction(fraction)
    groups: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[_Point]] = {}
    for index, (prediction, timing) in enumerate(zip(predictions, timed, strict=True)):
        key = *line_of(prediction, strong=strong), tuple(prediction.options.items())
        groups.setdefault(key, []).append(_Point(index, prediction, timing))
    with_knee, sweeps = list(predictions), []
    for (name, kept, _), group in groups.items():
        points = sorted(group, key=lambda point: point.prediction.ranks)
        if points[0].prediction.ranks == points[-1].prediction.ranks:
            continue
        sweep = _sweep(name, kept, points, fraction)
        sweeps.append(sweep)
        for point in points:
            use = msgspec.structs.replace(point.prediction.use, knee_ranks=sweep.knee_ranks)
            with_knee[point.position] = msgspec.structs.replace(point.prediction, use=use)
    return tuple(with_knee), tuple(sweeps)


def line_of(prediction: Prediction, *, strong: bool) -> tuple[str, str]:
    """What points of one sweep have in common, in words: what grows, and what is kept."""
    return growing(parse_strategy(prediction.strategy)), _kept(prediction, strong=strong)


def growing(strategy: Strategy) -> str:
    """What points of one sweep share: the outermost axis but for its degree, and all inside of it."""
    if not strategy.axes:
        return strategy.name
    outer, *inner = strategy.axes
    zero = f" with {outer.declared.prefix.what} {outer.prefix}" if outer.declared.prefix and outer.prefix else ""
    return "+".join([outer.kind, *map(str, inner)]) + zero


def _kept(prediction: Prediction, *, strong: bool) -> str:
    return f"batch {prediction.batch}" if strong else f"{prediction.batch / prediction.ranks:.12g} {_A_RANK}"


def _sweep(name: str, kept: str, points: Sequence[_Point], fraction: float) -> Sweep:
    """The knees of the ratios of efficiency to that at the smallest count, and of the ends of their bands.

    All points have one serial reference, so their efficiencies go as the iterations alone.
    """
    smallest, *others = points
    low, middle, high = [1.0], [1.0], [1.0]
    for point in others:
        ratio = point.prediction.use.efficiency / smallest.prediction.use.efficiency
        ends = efficiency_band(point.timed, smallest.timed, ratio)
        for values, value in zip((low, middle, high), (ends[0], ratio, ends[1]), strict=True):
            values.append(value)
    ranks = [point.prediction.ranks for point in points]

    def knee(ratios: Sequence[float]) -> int:
        below = next((index for index, ratio in enumerate(ratios) if ratio < fraction), len(ratios))
        return ranks[max(below - 1, 0)]

    return Sweep(name, kept, fraction, ranks[0], ranks[-1], knee(middle), (knee(low), knee(high)))
