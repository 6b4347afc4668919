"""How long a pipeline is expected to take when its ranks are slow by chance.

Stages wait for each other's messages, so no stretch of compute between two meetings tells what a late stage costs.
Stages are given times by chance, a few iterations' worth, and the mean of what they then take is the expectation: the
tied part of each stage from a Latin hypercube of F's quantiles, events' own parts normal. A large pipeline affords few
draws; the pipeline in lock-step, known of many more, is their control variate. Of d replicas the last one is late by
wait(d) in the measure of how far draws of one come apart (docs/model/simulate.md, "The slowest rank").
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.tasks import Ints
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats
from predict.costs.spread.stragglers import RankSpread
from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation, StageLine, lines_of_stages

_MOST_DRAWS, _FEWEST_DRAWS = 64, 4
_LOCK_STEPS = 1024
_TASKS_TO_SIMULATE = 1_500_000
"""As many as do not take longer than the prediction may: of a larger pipeline there are fewer draws."""


class _Tasks(NamedTuple):
    """Tasks of a line of stages: stage and whether it computes of each, seconds as a rank in the middle takes."""

    stage: Ints
    computes: np.ndarray
    seconds: Floats
    own_relative_sd: Floats


def pipeline_straggler(priced: PricedPlan) -> float:
    """The factor on all compute with which the pipeline takes as long as is expected; 1 where nothing spreads."""
    spread, plan = priced.rank_spread, priced.plan
    if not spread.wait(plan.strategy.ranks):
        return 1.0
    ones = np.ones(len(plan.works))
    simulation = PipelineSimulation.of_priced(priced, ones)
    costs = priced.costs
    of_works = costs.seconds, costs.compute_slowdown, costs.communication_slowdown
    alone = [line.run(*of_works).iteration_s for line in simulation.lines]
    slowest = int(np.argmax(alone))
    line = simulation.lines[slowest]
    work = line.tasks.work
    alike = tasks = _Tasks(line.tasks.stage, line.tasks.computes, costs.seconds[work], priced.own_relative_sd[work])
    if priced.slower:
        of_stages = np.asarray([priced.slower[role] for role in lines_of_stages(plan)[slowest]])
        tasks = alike._replace(seconds=alike.seconds * of_stages[line.tasks.stage])
    replicas = degree_of(plan.strategy, Trait.DIVIDES_BATCH)

    def drawn(line: StageLine, tasks: _Tasks) -> Floats:
        chance = _Chance(tasks, spread, priced)
        taken = [line.run(*of_works, added_s=added).iteration_s for added in chance.added_seconds()]
        return steadied(np.array(taken), *chance.lock_steps())

    drawn_s = drawn(line, tasks)
    if priced.slower and replicas > 1:
        # One replica has the slow rank, the last of the others is late by chance; they are drawn apart.
        others = drawn(PipelineSimulation(plan, ones, blocking=priced.blocking).lines[slowest], alike)
        expected_s = float(np.mean(np.maximum.outer(drawn_s, others + _late_s(others, spread, replicas - 1))))
    else:
        expected_s = float(np.mean(drawn_s)) + _late_s(drawn_s, spread, replicas)
    if expected_s <= alone[slowest]:
        return 1.0
    # A step of the secant, which is straight.
    first = expected_s / alone[slowest] - 1
    added_s = np.where(tasks.computes, first * tasks.seconds, 0.0)
    grown_s = line.run(*of_works, added_s=added_s).iteration_s - alone[slowest]
    return 1 + first * (expected_s - alone[slowest]) / grown_s if grown_s > 0 else 1 + first


def _late_s(drawn: Floats, spread: RankSpread, replicas: int) -> float:
    """How late the last of so many replicas is, one of which takes as long as was drawn."""
    return float(np.std(drawn, ddof=1)) * spread.wait(replicas) / spread.relative_sd


def steadied(drawn_s: Floats, like_s: Floats, many_like_s: Floats) -> Floats:
    """Draws moved and stretched to the mean and the deviation that a likeness of them, known of many more, tells of.

    Args:
        like_s: the likeness at the draws; of one length with them, two at least. many_like_s: at many more.
    """
    spread, of_likes = float(np.var(drawn_s, ddof=1)), float(np.var(like_s, ddof=1))
    if not spread or not of_likes:
        return drawn_s
    slope = min(max(float(np.cov(drawn_s, like_s)[0, 1]) / of_likes, 0.0), 1.0)
    mean = float(np.mean(drawn_s)) + slope * float(np.mean(many_like_s) - np.mean(like_s))
    variance = max(spread + slope**2 * (float(np.var(many_like_s)) - of_likes), 0.0)
    return np.asarray(mean + (drawn_s - np.mean(drawn_s)) * math.sqrt(variance / spread))


class _Chance:
    """What tasks of a line take longer than in the middle, draw by draw; the same each time."""

    def __init__(self, line: _Tasks, spread: RankSpread, priced: PricedPlan) -> None:
        strategy = priced.plan.strategy
        self._line, self._spread, self._micro_batches = line, spread, priced.plan.micro_batches
        self._sharing = strategy.ranks // degree_of(strategy, Trait.DIVIDES_BATCH) // degree_of(strategy, Trait.STAGES)
        self._generator = np.random.default_rng(0)
        self._computed = np.where(line.computes, line.seconds, 0.0)
        self._of_stages = np.bincount(line.stage, weights=self._computed)
        draws = min(_MOST_DRAWS, max(_FEWEST_DRAWS, _TASKS_TO_SIMULATE // len(line.seconds)))
        self._tied = self._draw_tied(draws)

    def _draw_tied(self, draws: int) -> Floats:
        """Of shape (draws, stages)."""
        parts = [self._generator.permutation(draws) for _ in self._of_stages]
        chances = (np.column_stack(parts) + self._generator.random((draws, len(parts)))) / draws
        return self._spread.common_deviation(chances ** (1 / self._sharing))

    def added_seconds(self) -> Iterator[Floats]:
        """Per draw, of each task."""
        spread, line = self._spread, self._line
        sd_s = self._computed * spread.own_deviation(line.own_relative_sd)
        for row in self._tied:
            added = self._computed * row[line.stage]
            yield added + sd_s * self._generator.standard_normal(len(sd_s)) if spread.own_weight else added

    def lock_steps(self) -> tuple[Floats, Floats]:
        """The pipeline in lock-step with the tied part of the draws, and of many more."""
        return self._lock_step(self._tied), self._lock_step(self._draw_tied(_LOCK_STEPS))

    def _lock_step(self, tied: Floats) -> Floats:
        stages = self._of_stages * (1 + tied)
        once = 1 / self._micro_batches
        return np.asarray(once * stages.sum(axis=1) + (1 - once) * stages.max(axis=1))
