"""A configuration simulated: the plan's tasks on their streams, with interference and the slowest rank.

What ranks compute between two collectives takes as long as the last of the group is expected to need
(:mod:`predict.simulation.role_straggler`); stages of a pipeline wait for each other's messages
(:mod:`predict.simulation.pipelines.pipeline_straggler`). Roles that differ are simulated together, and wait for each
other in the collectives that they share. Beside a slow rank each role is simulated by itself, and the slowest one is
the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.tasks import Plan, Sort
from paradl_bench.strategies.data.fusion.buffers import describe
from paradl_bench.strategies.data.fusion.fused_plan import check_fusion, fused_plan
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.input_tasks import with_input
from predict.costs.cost_model import CostModel
from predict.costs.input.shared_cores import on_shared_cores
from predict.costs.memory_estimate import EstimatedMemory
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Remark
from predict.simulation.input_tasks import fed, input_of, ranks_on_host
from predict.simulation.pipelines.host_sharing import on_shared_host
from predict.simulation.pipelines.likeness import likeness
from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation
from predict.simulation.pipelines.pipeline_straggler import pipeline_straggler
from predict.simulation.role_simulation import MeetingRoles, RoleSimulation
from predict.simulation.role_straggler import role_straggler, straggler_of_works
from predict.simulation.simulated_ledger import simulated_ledger
from predict.simulation.simulation_error import with_simulation_error
from predict.workload import Configuration, PreparedEvaluation


def prepare(costs: CostModel, point: Configuration) -> PreparedEvaluation:
    """Plan, price, and coalesce the plan for repeated simulation."""
    return workload_of(costs, point, with_simulation_error(price(costs, point), costs.profile))


def price(costs: CostModel, point: Configuration) -> PricedPlan:
    """The plan of a point, priced, with the tasks of its input where that is known."""
    computing, notes = _planned(costs, point)
    terms = input_of(costs, point)
    # What ranks are late by, and take from each other on a host, is of what they compute alone.
    priced = _priced(costs, point, computing, notes)
    if terms is None:
        return priced
    if terms.process_s:
        rest_s = workload_of(costs, point, priced).timing().iteration_s
        terms = on_shared_cores(terms, costs.profile, rest_s, ranks_on_host(costs, point))
    after_backward = point.settings.of(ExchangeOptions).after_backward
    plan = with_input(computing, terms.fetched)
    return fed(priced, plan, terms, costs.input_options.preset, after_backward=after_backward)


def _priced(costs: CostModel, point: Configuration, plan: Plan, notes: Sequence[Remark]) -> PricedPlan:
    priced = costs.price(plan)
    priced.remarks.add(*notes)
    priced.remarks.add(*priced.rank_spread.remarks(point.strategy.ranks), *(Remark(note, False) for note in plan.notes))
    slow = costs.slow_rank
    if slow is not None:
        role = slow.role_in(plan)
        text = f"rank {slow.rank} computes {slow.factor:g} times as long as measured (--slow-rank)"
        priced.remarks.add(Remark(text, False))
        if slow.factor > 1:
            slower = tuple(slow.factor if index == role else 1.0 for index in range(len(plan.roles)))
            priced = dataclasses.replace(priced, slower=slower)
    if degree_of(point.strategy, Trait.STAGES) <= 1:
        return priced
    priced = on_shared_host(costs, priced)
    return dataclasses.replace(priced, straggler=pipeline_straggler(priced))


def _planned(costs: CostModel, point: Configuration) -> tuple[Plan, tuple[Remark, ...]]:
    """As the strategy runs; with a rule of fusion other than DDP's, as Horovod would exchange its gradients."""
    planner, fusion = planner_for(point.strategy), costs.fusion
    if fusion is None or fusion.rule == "ddp":
        return costs.plans.plan(point.strategy, point.settings), ()
    check_fusion(fusion, point.strategy, point.settings)
    planner.check(costs.network, point.strategy, point.settings)
    buffers = costs.buffers(fusion, point.strategy, point.settings)
    plan = fused_plan(costs.network, point.strategy, point.settings, fusion, buffers)
    if point.strategy.ranks == 1:
        return plan, ()
    texts = (
        describe(fusion, buffers.bytes, len(buffers.layers)),
        "the exchange is Horovod's; paradl-bench train runs its messages (--fusion-out) with DDP's copies",
        "memory is predicted with DDP's buckets",
    )
    return plan, tuple(Remark(text, False) for text in texts)


def workload_of(costs: CostModel, point: Configuration, priced: PricedPlan) -> PreparedEvaluation:
    """A priced plan of the point, coalesced for repeated simulation."""
    plan = priced.plan
    if degree_of(point.strategy, Trait.STAGES) > 1:
        return _pipelined(plan, priced, costs, point)
    # The other ranks of a slow one's role keep their pace, but wait for it.
    slow = [(role, by) for role, by in zip(plan.roles, priced.slower, strict=False) if by > 1]
    paces = [*((role, 1.0) for role in plan.roles), *slow]
    played = [(role, role_straggler(priced, role, slower)) for role, slower in paces]
    by_phase, coarse = (
        [RoleSimulation(priced, role, late, across_phases=across_phases) for role, late in played]
        for across_phases in (False, True)
    )
    phases, whole = (
        [MeetingRoles(plan, simulations)] if len(simulations) > 1 and not slow else simulations
        for simulations in (by_phase, coarse)
    )
    of_works = priced.costs
    alone = [
        simulation.run(of_works.seconds, of_works.compute_slowdown, of_works.communication_slowdown)
        for simulation in coarse
    ]
    slowest = max(range(len(played)), key=lambda index: alone[index].iteration_s)
    counts = np.bincount(played[slowest][0].work, minlength=len(plan.works)).astype(float)
    # A timer is neither compute nor communication.
    counts[plan.of_sort(Sort.TIMER, Sort.INPUT)] = 0.0
    return PreparedEvaluation(
        costs=dataclasses.replace(of_works, counts=counts),
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: _memory(costs, point, priced),
        limits=_limits(costs, point, plan),
        time=lambda *shifted: max(
            (simulation.timing(*shifted) for simulation in phases), key=lambda timing: timing.iteration_s
        ),
        of_rows=lambda *shifted: np.asarray(np.max([one.iteration_s(*shifted) for one in whole], axis=0)),
        ledger=lambda: simulated_ledger(priced, costs.slow_rank),
        straggler=by_phase[slowest].straggler(of_works.seconds),
        overlap_is_unmeasured=costs.overlap_is_unmeasured,
    )


def _limits(costs: CostModel, point: Configuration, plan: Plan) -> tuple[str, ...]:
    def find() -> tuple[str, ...]:
        return tuple(map(str, planner_for(point.strategy).limits(costs.network, point.settings)))

    return plan.found.once("limits", find)


def _memory(costs: CostModel, point: Configuration, priced: PricedPlan) -> EstimatedMemory:
    return costs.memory(point.strategy, point.settings).beside_batches(priced.batches_ahead_bytes)


def _pipelined(plan: Plan, priced: PricedPlan, costs: CostModel, point: Configuration) -> PreparedEvaluation:
    """All stages simulated together; parts are counted as on the rank that computes most."""
    seconds = priced.costs.seconds
    simulation = PipelineSimulation.of_priced(priced, straggler_of_works(priced))
    computes = ~plan.of_sort(Sort.INPUT)
    counts = [role.counts(len(plan.works)) * computes for role in plan.roles]
    return PreparedEvaluation(
        costs=dataclasses.replace(
            priced.costs, counts=max(counts, key=lambda of_role: float(of_role @ seconds)).astype(float)
        ),
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: _memory(costs, point, priced),
        limits=_limits(costs, point, plan),
        time=simulation.timing,
        of_rows=simulation.iteration_s,
        ledger=lambda: simulated_ledger(priced, costs.slow_rank),
        likeness=lambda: likeness(priced),
        straggler=priced.straggler,
        overlap_is_unmeasured=costs.overlap_is_unmeasured,
    )
