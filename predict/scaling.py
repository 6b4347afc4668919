"""Sweeps over rank counts: where efficiency begins to fall off.

The *knee* of a sweep is its largest rank count up to which no point's efficiency falls below a fraction of that at the
smallest count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.strategy import parse_strategy
from predict.prediction import Prediction

DEFAULT_FRACTION = 0.8


class Sweep(NamedTuple):
    """One strategy over rank counts.

    Attributes:
        knee_ranks: of the efficiencies as predicted. knee_range: of the lower and of the upper ends of their bands.
    """

    strategy: str
    fraction: float
    smallest_ranks: int
    largest_ranks: int
    knee_ranks: int
    knee_range: tuple[int, int]

    def __str__(self) -> str:
        goes_on = ", the most of the sweep" if self.knee_ranks == self.largest_ranks else ""
        low, high = self.knee_range
        band = f"; {low} to {high} by the ends of its band" if low < high else ""
        text = f"{self.strategy}: {self.knee_ranks} ranks{goes_on}; up to there efficiency is at least"
        return f"{text} {self.fraction:.3g} of that at {self.smallest_ranks}{band}"


def with_knees(
    predictions: Sequence[Prediction], *, strong: bool, fraction: float = DEFAULT_FRACTION
) -> tuple[tuple[Prediction, ...], tuple[Sweep, ...]]:
    """Predictions with ``knee_ranks`` where they are part of a sweep, and the sweeps.

    A sweep is what one strategy makes of at least two rank counts, with the samples a rank (weak scaling) or all of
    them (strong) kept.

    Args:
        fraction: of the efficiency at the smallest rank count, above 0 and at most 1.

    Raises:
        UserError: the fraction is none.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"--knee {fraction:g}: a fraction of the efficiency is above 0 and at most 1")
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, prediction in enumerate(predictions):
        kept = prediction.batch if strong else prediction.batch / prediction.ranks
        key = parse_strategy(prediction.strategy).name, kept, tuple(prediction.options.items())
        groups.setdefault(key, []).append(index)
    found, sweeps = list(predictions), []
    for (name, *_), indices in groups.items():
        points = sorted((predictions[index] for index in indices), key=lambda point: point.ranks)
        if points[0].ranks == points[-1].ranks:
            continue
        sweep = _sweep(str(name), points, fraction)
        sweeps.append(sweep)
        for index in indices:
            found[index] = msgspec.structs.replace(predictions[index], knee_ranks=sweep.knee_ranks)
    return tuple(found), tuple(sweeps)


def _sweep(name: str, points: Sequence[Prediction], fraction: float) -> Sweep:
    least = fraction * points[0].efficiency

    def knee(efficiency: Callable[[Prediction], float]) -> int:
        below = next((index for index, point in enumerate(points) if efficiency(point) < least), len(points))
        return points[max(below - 1, 0)].ranks

    ends = knee(lambda point: point.efficiency_interval[0]), knee(lambda point: point.efficiency_interval[1])
    return Sweep(name, fraction, points[0].ranks, points[-1].ranks, knee(lambda point: point.efficiency), ends)
