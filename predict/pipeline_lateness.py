"""How long a pipeline is expected to take when its ranks are slow by chance (the spread: :mod:`predict.stragglers`).

Stages wait for each other's messages, so no stretch of compute between two meetings tells what a late stage costs: the
one that sets the pace does in every micro-batch, another only once. So the stages that the simulation holds anyway are
given times by chance, a few iterations' worth, and the mean of what they then take is the expectation:

    x_i = tied part of the rank at stage i (of the last of the ranks that share its layers), of F's quantiles; the
    quantiles are spread evenly over the draws, stage by stage in another order (a Latin hypercube), so that few do
    e_j = own part of each event, normal

Of d replicas the last one is late by wait(d) in the measure of how far draws of one replica come apart. Stretched to a
factor on all compute this is the lag of the whole pipeline. The draws are the same each time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from paradl_bench.spec.plan import Ints
from paradl_bench.strategies.mesh import degree_of
from predict.cost_model import PricedPlan
from predict.costs import Floats
from predict.pipeline_simulation import PipelineSimulation, lines_of_stages
from predict.stragglers import RankSpread

_MOST_DRAWS, _FEWEST_DRAWS = 64, 4
_TASKS_TO_SIMULATE = 1_500_000
"""As many as do not take longer than the prediction may: of a larger pipeline there are fewer draws."""


class _Line(NamedTuple):
    """Tasks of a line of stages: stage and whether it computes of each, seconds as a rank in the middle takes."""

    stage: Ints
    computes: np.ndarray
    seconds: Floats
    own_relative_sd: Floats


def pipeline_lag(priced: PricedPlan) -> float:
    """The factor on all compute with which the pipeline takes as long as is expected; 1 where nothing spreads."""
    spread, plan = priced.rank_spread, priced.plan
    if not spread.wait(plan.strategy.ranks):
        return 1.0
    ones = np.ones(len(plan.works))
    simulation = PipelineSimulation(plan, ones, slower=priced.slower)
    costs = priced.costs
    of_works = costs.seconds, costs.compute_slowdown, costs.communication_slowdown
    alone = [simulation.line_s(index, of_works) for index in range(len(lines_of_stages(plan)))]
    slowest = int(np.argmax(alone))
    stage, work, computes = simulation.tasks_of(slowest)
    alike = line = _Line(stage, computes, costs.seconds[work], priced.own_relative_sd[work])
    if priced.slower:
        of_stages = np.asarray([priced.slower[role] for role in lines_of_stages(plan)[slowest]])
        line = alike._replace(seconds=alike.seconds * of_stages[stage])
    replicas = degree_of(plan.strategy, "data")

    def drawn(of: PipelineSimulation, tasks: _Line) -> Floats:
        return np.array([of.line_s(slowest, of_works, added) for added in _added_seconds(tasks, spread, priced)])

    own = drawn(simulation, line)
    if priced.slower and replicas > 1:
        # One replica has the slow rank, the last of the others is late by chance; they are drawn apart.
        others = drawn(PipelineSimulation(plan, ones), alike)
        expected_s = float(np.mean(np.maximum.outer(own, others + _late_s(others, spread, replicas - 1))))
    else:
        expected_s = float(np.mean(own)) + _late_s(own, spread, replicas)
    return _factor(simulation, slowest, of_works, line, alone[slowest], expected_s)


def _late_s(drawn: Floats, spread: RankSpread, replicas: int) -> float:
    """How late the last of so many replicas is, one of which takes as long as was drawn."""
    return float(np.std(drawn, ddof=1)) * spread.wait(replicas) / spread.relative_sd


def _added_seconds(line: _Line, spread: RankSpread, priced: PricedPlan) -> list[Floats]:
    """Per draw, what each task takes longer than in the middle."""
    strategy = priced.plan.strategy
    sharing = strategy.ranks // degree_of(strategy, "data") // degree_of(strategy, "pipeline")
    draws = min(_MOST_DRAWS, max(_FEWEST_DRAWS, _TASKS_TO_SIMULATE // len(line.seconds)))
    generator = np.random.default_rng(0)
    stages = int(line.stage.max()) + 1
    even = (np.arange(draws) + 0.5) / draws
    chances = np.column_stack([generator.permutation(even) for _ in range(stages)]) ** (1 / sharing)
    tied = spread.deviation(chances) * math.sqrt(spread.tied_share)
    computed = np.where(line.computes, line.seconds, 0.0)
    own = computed * line.own_relative_sd * spread.relative_sd * math.sqrt(spread.own_weight)
    found = []
    for row in tied:
        added = computed * row[line.stage]
        found.append(added + own * generator.standard_normal(len(own)) if spread.own_weight else added)
    return found


def _factor(
    simulation: PipelineSimulation,
    index: int,
    of_works: tuple[Floats, Floats, Floats],
    line: _Line,
    alone_s: float,
    expected_s: float,
) -> float:
    """The factor on compute that makes the line take as long as expected: a step of the secant, which is straight."""
    if expected_s <= alone_s:
        return 1.0
    first = expected_s / alone_s - 1
    longer_s = simulation.line_s(index, of_works, np.where(line.computes, first * line.seconds, 0.0))
    return 1 + first * (expected_s - alone_s) / (longer_s - alone_s) if longer_s > alone_s else 1 + first
