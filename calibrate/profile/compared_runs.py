"""Runs that predictions of a profile were held against, and how far off they show ``simulate`` itself to be.

The parts of an interval tell how well a profile's numbers are known. What the simulation leaves out shows in runs
alone: in their errors, as far as the intervals had not expected them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from calibrate.statistics.blocks import student_90
from paradl_bench.core.bounds import PositiveCount, PositiveSeconds, Ranks, Relative
from paradl_bench.core.statistics import Z90, grouped
from paradl_bench.plan.strategy import Strategy, parse_strategy

SERIAL = "serial"
"""Of strategies, the kind that has no axes."""
LEAST_CONFIGURATIONS = 3
"""Of a kind: fewer tell little of its deviation."""
_HALVINGS = 60
"""Of the interval that a deviation is looked for in: as many as a number's digits tell apart."""


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training run beside its prediction by ``simulate``.

    Attributes:
        sha256: over its manifest and ``run.json``. configuration: hash of what a repetition shares with it.
        measured_s: median of its iterations. predicted_s: without what compared runs add to the interval.
        relative_sd: of the prediction, as half of its interval tells, likewise.
    """

    path: str
    sha256: str
    configuration: str
    model: str
    strategy: str
    ranks: Ranks
    batch: PositiveCount
    measured_s: PositiveSeconds
    predicted_s: PositiveSeconds
    relative_sd: Relative

    def __post_init__(self) -> None:
        ranks = parse_strategy(self.strategy).ranks
        if ranks != self.ranks:
            raise ValueError(f"strategy {self.strategy} has {ranks} ranks, not {self.ranks}")

    @property
    def error(self) -> float:
        """How much longer the run took, relative to its prediction."""
        return self.measured_s / self.predicted_s - 1


class PredictionError(NamedTuple):
    """How far off ``simulate`` is for strategies with one kind of axis.

    Attributes:
        configurations: compared ones, repetitions counted once. ranks: the most of them.
        mean: their mean error, relative to the prediction. root_mean_square: of their errors.
        expected: root mean square of what their intervals said of their deviation.
        relative_sd: what is missing there (:func:`_missing`), stretched so that :data:`Z90` of it holds 90%; 0 where
            nothing is, or where fewer than :data:`LEAST_CONFIGURATIONS` were compared.
    """

    configurations: int
    ranks: int
    mean: float
    root_mean_square: float
    expected: float
    relative_sd: float


def kinds_of(strategy: Strategy) -> tuple[str, ...]:
    """The kinds of its axes, each once."""
    return tuple(dict.fromkeys(axis.kind for axis in strategy.axes)) or (SERIAL,)


def prediction_errors(runs: Sequence[ComparedRun]) -> dict[str, PredictionError]:
    """By kind of axis, from all runs with it."""
    kinds = [(kind, run) for run in runs for kind in kinds_of(parse_strategy(run.strategy))]
    of_kinds = grouped(kinds, lambda pair: pair[0])
    return {kind: _error([run for _, run in pairs]) for kind, pairs in of_kinds.items()}


def _error(runs: Sequence[ComparedRun]) -> PredictionError:
    repeated = list(grouped(runs, lambda run: run.configuration).values())
    errors = [median(run.error for run in same) for same in repeated]
    expected = [median(run.relative_sd for run in same) for same in repeated]
    count = len(errors)
    square, known = (math.fsum(value**2 for value in values) / count for values in (errors, expected))
    # Their mean counts as an error too: nobody corrects predictions by it.
    stretch = student_90(count) / Z90 if count >= LEAST_CONFIGURATIONS else 0.0
    return PredictionError(
        configurations=count,
        ranks=max(run.ranks for run in runs),
        mean=math.fsum(errors) / count,
        root_mean_square=math.sqrt(square),
        expected=math.sqrt(known),
        relative_sd=stretch * _missing(errors, expected),
    )


def _missing(errors: Sequence[float], expected: Sequence[float]) -> float:
    """The deviation t that makes errors as large as expected: the mean of e^2 / (s^2 + t^2) is 1, or less at t = 0.

    An error that was expected to be large says little, and hides none of the others (Paule and Mandel, 1982).
    """

    def excess(square: float) -> float:
        pairs = ((error**2, sd**2 + square) for error, sd in zip(errors, expected, strict=True))
        return math.fsum(of / by if by else math.inf * bool(of) for of, by in pairs) / len(errors) - 1

    low, high = 0.0, math.fsum(error**2 for error in errors)
    if not high or excess(0.0) <= 0:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.sqrt(high)
