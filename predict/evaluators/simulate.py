"""``simulate``: the plan's tasks on their streams, with interference and the lag of the slowest rank.

A collective starts when the last rank is expected to arrive: what ranks compute between two of them takes as long as
the last of its group is expected to need (:mod:`predict.simulation.lateness`), weight update included, because the next
exchange waits for that as well. Stages of a pipeline wait for each other's messages:
:mod:`predict.simulation.pipeline_lateness`.

Roles that differ (blocks at an edge, uneven shards, leaders) are simulated together, and wait for each other in the
collectives that they share. Halos go between neighbours, which are taken as keeping pace there. Beside a slow rank each
role is simulated by itself, and the slowest one is the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.tasks import Ints, Phase, Plan, Role, Sort, Stream
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.closed_forms.fused_plan import check_fusion, fused_plan
from predict.closed_forms.layerwise_plan import gradient_bytes
from predict.closed_forms.osf import Gradients
from predict.closed_forms.osf_form import backward_order, describe
from predict.costs.cost_model import CostModel
from predict.costs.memory_estimate import EstimatedMemory
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats, Remark
from predict.evaluators.osf import buffers_of, ready_of
from predict.simulation.exposure import exposed_seconds, names_of_layer_communication
from predict.simulation.host_sharing import on_shared_host
from predict.simulation.input_tasks import waits_for_input, with_input
from predict.simulation.lateness import RoleLateness
from predict.simulation.pipeline_lateness import pipeline_lag
from predict.simulation.pipeline_simulation import PipelineSimulation
from predict.simulation.role_meetings import meetings
from predict.simulation.simulator import Timeline, condense, couple, simulate, task_graph
from predict.simulation.slow_rank import remark_on
from predict.workload import Configuration, Evaluator, PreparedEvaluation, Timing


def prepare(model: CostModel, point: Configuration) -> PreparedEvaluation:
    """Plan, price, and condense the plan for repeated simulation."""
    return workload_of(model, point, price(model, point))


def price(model: CostModel, point: Configuration) -> PricedPlan:
    """The plan of a point, priced, with the tasks of its input where that is known.

    Raises:
        UserError: the strategy has no plan, or the profile lacks a part.
    """
    return with_input(model, point, _priced(model, point))


def _priced(model: CostModel, point: Configuration) -> PricedPlan:
    plan, notes = _planned(model, point)
    priced = model.price(plan)
    priced.remarks.add(*notes)
    priced.remarks.add(*priced.rank_spread.remarks(point.strategy.ranks), *(Remark(note, False) for note in plan.notes))
    if model.slow_rank is not None:
        role = model.slow_rank.role_in(plan)
        priced.remarks.add(remark_on(model.slow_rank))
        if model.slow_rank.factor > 1:
            slower = tuple(model.slow_rank.factor if index == role else 1.0 for index in range(len(plan.roles)))
            priced = dataclasses.replace(priced, slower=slower)
    if degree_of(point.strategy, "pipeline") <= 1:
        return priced
    priced = on_shared_host(model, priced)
    return dataclasses.replace(priced, lag=pipeline_lag(priced))


def _planned(model: CostModel, point: Configuration) -> tuple[Plan, tuple[Remark, ...]]:
    """As the strategy runs; with a rule of fusion other than DDP's, as Horovod would exchange its gradients."""
    planner, fusion = planner_for(point.strategy), model.fusion
    if fusion is None or fusion.rule == "ddp":
        return planner.plan(model.network, point.strategy, point.settings), ()
    check_fusion(fusion, point)
    planner.check(model.network, point.strategy, point.settings)
    buffers, ready = buffers_of(model, point), ready_of(model, point)
    sizes = gradient_bytes(model.network, backward_order(model.network))
    gradients = Gradients(
        np.array([ready[layer] for layer in buffers.layers]), [sizes[layer] for layer in buffers.layers]
    )
    plan = fused_plan(model.network, point, fusion, gradients, buffers)
    if point.strategy.ranks == 1:
        return plan, ()
    texts = (
        describe(fusion, buffers.bytes, len(buffers.layers)),
        "exchange as Horovod's, which train does not run; memory is that of DDP's buckets",
    )
    return plan, tuple(Remark(text, False) for text in texts)


def workload_of(model: CostModel, point: Configuration, priced: PricedPlan) -> PreparedEvaluation:
    """A priced plan of the point, condensed for repeated simulation."""
    plan = priced.plan
    if degree_of(point.strategy, "pipeline") > 1:
        return _pipelined(plan, priced, model, point)
    # The other ranks of a slow one's role keep their pace, but wait for it.
    slow = [(role, by) for role, by in zip(plan.roles, priced.slower, strict=False) if by > 1]
    paces = [*((role, 1.0) for role in plan.roles), *slow]
    played = [(role, _lateness(priced, role, slower)) for role, slower in paces]
    by_phase, coarse = (
        [_Simulation(priced, role, late, across_phases=across_phases) for role, late in played]
        for across_phases in (False, True)
    )
    phases, whole = ([_Meeting(plan, each)] if len(each) > 1 and not slow else each for each in (by_phase, coarse))
    costs = priced.costs
    alone = [each.run(costs.seconds, costs.compute_slowdown, costs.communication_slowdown) for each in coarse]
    slowest = max(range(len(played)), key=lambda index: alone[index].iteration_s)
    counts = np.bincount(played[slowest][0].work, minlength=len(plan.works)).astype(float)
    # A timer is neither compute nor communication.
    counts[plan.of_sort(Sort.TIMER, Sort.INPUT)] = 0.0
    return PreparedEvaluation(
        costs=dataclasses.replace(costs, counts=counts),
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: _memory(model, point, priced),
        limits=tuple(map(str, planner_for(point.strategy).limits(model.network, point.settings))),
        time=lambda *costs: max((each.timing(*costs) for each in phases), key=lambda timing: timing.iteration_s),
        iteration_s=lambda *costs: max(each.run(*costs).iteration_s for each in whole),
        lag=by_phase[slowest].lag(costs.seconds),
        overlap_is_unmeasured=model.overlap_is_unmeasured,
    )


def late_tasks(priced: PricedPlan) -> list[Floats]:
    """Per role, seconds of its tasks as the last rank is expected to take for them."""
    plan, seconds = priced.plan, priced.costs.seconds
    if degree_of(plan.strategy, "pipeline") > 1:
        late = seconds * _lag_of_works(priced)
        return [late[role.work] for role in plan.roles]
    return [late_tasks_of(priced, role) for role in plan.roles]


def late_tasks_of(priced: PricedPlan, role: Role, slower: float = 1.0) -> Floats:
    """Seconds of a role's tasks as the last rank is expected to take for them, which is so many times slower or not."""
    return _lateness(priced, role, slower).of_tasks(priced.costs.seconds[role.work])


def lag_of(priced: PricedPlan) -> Floats:
    """Per work, how much longer the slowest rank takes, in the mean over the tasks of all roles."""
    plan = priced.plan
    late, alone = np.zeros(len(plan.works)), np.zeros(len(plan.works))
    for role, seconds in zip(plan.roles, late_tasks(priced), strict=True):
        late += np.bincount(role.work, weights=seconds, minlength=len(late))
        alone += np.bincount(role.work, weights=priced.costs.seconds[role.work], minlength=len(late))
    return np.divide(late, alone, out=np.ones(len(late)), where=alone > 0)


def _lag_of_works(priced: PricedPlan) -> Floats:
    """Of a pipeline, per work: what computes is late."""
    punctual = priced.costs.is_communication | priced.plan.of_sort(Sort.INPUT)
    return np.where(punctual, 1.0, priced.lag)


def _lateness(priced: PricedPlan, role: Role, slower: float = 1.0) -> RoleLateness:
    plan, spread, costs = priced.plan, priced.rank_spread, priced.costs
    end_s = np.zeros(role.tasks)
    if spread.wait(plan.strategy.ranks, slower):
        of_works = costs.seconds, costs.compute_slowdown, costs.communication_slowdown
        graph = task_graph(role, awaited=priced.awaited_tasks(role))
        end_s = simulate(graph, *(of_work[role.work] for of_work in of_works)).end_s
    copies = priced.slow_copies
    return RoleLateness(plan, role, spread, priced.own_relative_sd, end_s, slower=slower, slow_copies=copies)


def _memory(model: CostModel, point: Configuration, priced: PricedPlan) -> EstimatedMemory:
    return model.memory(point.strategy, point.settings).beside_batches(priced.batches_ahead_bytes)


def _pipelined(plan: Plan, priced: PricedPlan, model: CostModel, point: Configuration) -> PreparedEvaluation:
    """All stages simulated together; parts are counted as on the rank that computes most."""
    costs = priced.costs
    simulation = PipelineSimulation(plan, _lag_of_works(priced), slower=priced.slower, slow_copies=priced.slow_copies)
    computes = ~plan.of_sort(Sort.INPUT)
    counts = [np.bincount(role.work, minlength=len(plan.works)) * computes for role in plan.roles]
    return PreparedEvaluation(
        costs=dataclasses.replace(costs, counts=max(counts, key=lambda own: float(own @ costs.seconds)).astype(float)),
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: _memory(model, point, priced),
        limits=tuple(map(str, planner_for(point.strategy).limits(model.network, point.settings))),
        time=simulation.timing,
        iteration_s=simulation.iteration_s,
        lag=priced.lag,
        overlap_is_unmeasured=model.overlap_is_unmeasured,
    )


class _Simulation:
    """A role condensed once, to be run under many costs of its works."""

    def __init__(self, priced: PricedPlan, role: Role, late: RoleLateness, *, across_phases: bool) -> None:
        plan = priced.plan
        self._condensed = condense(role, across_phases=across_phases, awaited=priced.awaited_tasks(role))
        self.graph, self.segment = self._condensed.graph, self._condensed.segment
        first_task = np.unique(self._condensed.segment, return_index=True)[1]
        self._late = late
        self._work = role.work
        self._computes = role.stream == Stream.COMPUTE
        self._segment_work = role.work[first_task]
        self._on_compute = role.stream[first_task] == Stream.COMPUTE
        chosen = self._on_compute & np.isin(self._condensed.phase, (Phase.FW, Phase.BW))
        self._in_turn = np.flatnonzero(chosen)
        self._is_forward = self._condensed.phase[self._in_turn] == Phase.FW
        self._exchange = self._condensed.phase == Phase.GE
        self._of_layers = {
            phase: _communication_of_layers(
                plan, self._segment_work, ~self._on_compute & (self._condensed.phase == phase)
            )
            for phase in (Phase.FW, Phase.BW)
        }

    def lag(self, seconds: Floats) -> float:
        """How much longer the last rank computes than one in the middle, over the whole iteration."""
        alone = seconds[self._work]
        computes = self._computes
        whole = float(alone[computes].sum())
        return float(self._late.of_tasks(alone)[computes].sum()) / whole if whole else 1.0

    def run(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timeline:
        """The timeline of the segments under costs per work."""
        return simulate(self.graph, *self.of_segments(seconds, compute_slowdown, communication_slowdown))

    def of_segments(
        self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats
    ) -> tuple[Floats, ...]:
        """Costs per segment from those per work."""
        return (
            self._condensed.sum_seconds(self._late.of_tasks(seconds[self._work])),
            compute_slowdown[self._segment_work],
            communication_slowdown[self._segment_work],
        )

    def timing(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timing:
        """Where each phase ends, one after the other; micro-batches go forward and backward in turns."""
        return self.timing_of(self.run(seconds, compute_slowdown, communication_slowdown))

    def timing_of(self, line: Timeline) -> Timing:
        """Likewise, of a timeline of the segments."""
        begin_s, waiting = waits_for_input(line, self._condensed.phase, np.ones(len(line.end_s), bool))
        ends = line.end_s[self._in_turn]
        spans = np.diff(ends, prepend=begin_s)
        computed = float(ends.max(initial=begin_s))
        forward = float(spans[self._is_forward].sum())
        exchange = _last(line, self._exchange, computed)
        return Timing(
            fw_s=forward,
            bw_s=computed - begin_s - forward,
            ge_s=exchange - computed,
            wu_s=max(line.iteration_s - waiting.input_s + begin_s - exchange, 0.0),
            **waiting._asdict(),
            exposed_communication_s=line.exposed_communication_s,
            overlap_s=line.overlap_s,
            fw_of_layers_s=self._exposed(line, Phase.FW),
            bw_of_layers_s=self._exposed(line, Phase.BW),
        )

    def _exposed(self, line: Timeline, phase: Phase) -> dict[str, float]:
        """Seconds of communication for layers while compute is not active, by name."""
        return exposed_seconds(line, self._on_compute, self._of_layers[phase])


class _Meeting:
    """Roles condensed once, each of which waits for the others where they meet."""

    def __init__(self, plan: Plan, roles: Sequence[_Simulation]) -> None:
        self._roles = roles
        graphs = [role.graph for role in roles]
        self._graph = couple(graphs, list(meetings(plan, graphs, [role.segment for role in roles])))
        self._borders = np.cumsum([graph.tasks for graph in graphs])[:-1]

    def run(self, *costs: Floats) -> Timeline:
        """The timeline of all segments under costs per work: seconds, slow-downs of compute and communication."""
        of_roles = zip(*(role.of_segments(*costs) for role in self._roles), strict=True)
        return simulate(self._graph, *(np.concatenate(of_role) for of_role in of_roles))

    def timing(self, *costs: Floats) -> Timing:
        """Phases of the role that ends last."""
        line = self.run(*costs)
        ends = np.split(line.end_s, self._borders)
        last = max(range(len(ends)), key=lambda index: float(ends[index].max(initial=0.0)))
        start_s = np.split(line.start_s, self._borders)[last]
        return self._roles[last].timing_of(line._replace(start_s=start_s, end_s=ends[last]))


def _communication_of_layers(plan: Plan, segment_work: Ints, chosen: NDArray[np.bool_]) -> dict[str, list[int]]:
    """Of the segments that were chosen, those of communication for layers, by what it is."""
    segments = np.flatnonzero(chosen).tolist()
    names = names_of_layer_communication([plan.works[work] for work in segment_work[chosen].tolist()])
    found: dict[str, list[int]] = {}
    for segment, name in zip(segments, names, strict=True):
        if name:
            found.setdefault(name, []).append(segment)
    return found


def _last(line: Timeline, chosen: NDArray[np.bool_], earliest: float) -> float:
    return max(earliest, float(line.end_s[chosen].max(initial=0.0)))


EVALUATOR = Evaluator(
    name="simulate",
    summary="the plan's tasks with overlap, interference and the slowest rank",
    prepare=prepare,
)
