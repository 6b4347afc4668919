"""``paradl``: the paper's closed forms of time and memory, for every row of its Table 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Phase, Plan, RoleBuilder, Stream
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.closed_forms.closed_form_evaluation import (
    has_closed_form,
    has_closed_settings,
    paradl,
    prepare_closed_form,
    refuse_what_is_simulated,
)
from predict.closed_forms.ledgers import ledger_of_lock_step, ledger_of_terms
from predict.closed_forms.pipeline_closed_form import PipelineClosedForm, lock_step_settings
from predict.closed_forms.shared_closed_form import sharing_axis, terms
from predict.costs.cost_model import CostModel
from predict.costs.memory_estimate import EstimatedMemory
from predict.costs.sourced import Floats, Remark
from predict.workload import Configuration, Evaluator, PreparedEvaluation, Timing


def prepare(costs: CostModel, point: Configuration) -> PreparedEvaluation:
    """The paper's sums, and its memory."""
    if not _covers(point.strategy):
        raise UserError(
            "paradl has closed forms for serial, data, filter, channel and spatial parallelism, for data with one"
            f" of these, and for pipelines alone, not for {point.strategy}: give --evaluator simulate"
        )
    refuse_what_is_simulated("paradl", point.settings)
    memory = costs.paradl_memory(point.strategy, point.settings)
    if _is_pipeline(point.strategy):
        return _pipelined(costs, point, memory)
    if sharing_axis(point.strategy) is not None:
        return _shared(costs, point, memory)
    return prepare_closed_form("paradl", paradl, costs, point, lambda: memory)


def _is_pipeline(strategy: Strategy) -> bool:
    return len(strategy.axes) == 1 and degree_of(strategy, Trait.STAGES) > 1


def _covers(strategy: Strategy) -> bool:
    return has_closed_form(strategy) or _is_pipeline(strategy) or sharing_axis(strategy) is not None


def _shared(costs: CostModel, point: Configuration, memory: EstimatedMemory) -> PreparedEvaluation:
    """A sum over works: each phase's layers and communication, one after the other."""
    planner = planner_for(point.strategy)
    planner.check(costs.network, point.strategy, point.settings)
    form = terms(costs.network, point.strategy, point.settings, dtype=costs.dtype)
    builder = RoleBuilder()
    for term in form:
        builder.add(term.work, Phase[term.phase], Stream.COMPUTE)
    plan = Plan(
        strategy=point.strategy,
        network=costs.network.name,
        local_batch=point.local_batch,
        roles=(builder.build("rank", point.strategy.ranks),),
        works=tuple(builder.works),
    )
    priced = costs.price(plan, as_swept=True)
    times = {phase: np.zeros(len(plan.works)) for phase in ("FW", "BW", "GE", "WU")}
    for term in form:
        times[term.phase][builder.works[term.work]] += term.times
    names = np.array([work.name_in_breakdowns for work in plan.works])

    def time(seconds: Floats, *_: Floats) -> Timing:
        return _add_up(times, names, np.asarray(seconds))

    return PreparedEvaluation(
        costs=dataclasses.replace(priced.costs, counts=np.sum(list(times.values()), axis=0)),
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: memory,
        limits=tuple(map(str, planner.limits(costs.network, point.settings))),
        time=time,
        ledger=lambda: ledger_of_terms(priced, form, builder.works),
    )


def _add_up(times: Mapping[str, Floats], names: NDArray[np.str_], seconds: Floats) -> Timing:
    """Phases one after the other; communication for layers by name, none of it hidden."""
    phases = {phase: float(occurrences @ seconds) for phase, occurrences in times.items()}
    named = {
        phase: {name: float((times[phase] * (names == name)) @ seconds) for name in sorted({*names.tolist()} - {""})}
        for phase in ("FW", "BW")
    }
    return Timing(
        fw_s=phases["FW"],
        bw_s=phases["BW"],
        ge_s=phases["GE"],
        wu_s=phases["WU"],
        exposed_communication_s=phases["GE"] + sum(sum(of_kind.values()) for of_kind in named.values()),
        overlap_s=0.0,
        fw_of_layers_s=named["FW"],
        bw_of_layers_s=named["BW"],
    )


def _pipelined(costs: CostModel, point: Configuration, memory: EstimatedMemory) -> PreparedEvaluation:
    """Stages in lock-step; what is neither forward nor backward of the largest stage is idle time."""
    planner, schedule = planner_for(point.strategy), schedule_of(point.settings.of(PipelineOptions).schedule)
    settings = lock_step_settings(point.settings)
    plan = planner.plan(costs.network, point.strategy, settings)
    priced, form = costs.price(plan, as_swept=True), PipelineClosedForm(plan)
    share = plan.micro_batches / (len(plan.roles) + plan.micro_batches - 1)

    def time(seconds: Floats, *_: Floats) -> Timing:
        step = form(np.asarray(seconds))
        forward, backward = step.fw_s * share, step.bw_s * share
        idle = step.iteration_s - forward - backward - step.wu_s
        return Timing(forward, backward, 0.0, step.wu_s, step.transfers_s, 0.0, idle_s=idle)

    if schedule.name != settings.of(PipelineOptions).schedule:
        priced.remarks.add(
            Remark(f"the closed form knows only GPipe's schedule and uses it instead of {schedule.name}", True)
        )
    seconds = priced.costs.seconds
    counts = [role.counts(len(plan.works)).astype(float) for role in plan.roles]
    return PreparedEvaluation(
        costs=dataclasses.replace(priced.costs, counts=max(counts, key=lambda of_role: float(of_role @ seconds))),
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: memory,
        limits=tuple(map(str, planner.limits(costs.network, settings))),
        time=time,
        ledger=lambda: ledger_of_lock_step(priced, form),
    )


EVALUATOR = Evaluator(name="paradl", prepare=prepare, covers=_covers, knows=has_closed_settings)
