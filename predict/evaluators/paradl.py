"""``paradl``: the paper's closed forms of time and memory, for serial, data and GPipe's pipelines."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from paradl_bench.schedules.catalog import schedule_of
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.pipeline.stages import cut_into_stages
from predict.closed_forms import paradl
from predict.cost_model import CostModel
from predict.costs import Floats, Remark
from predict.evaluators.closed_form import has_closed_form, prepare_closed_form
from predict.paradl_memory import paradl_memory
from predict.pipeline_closed_form import PipelineClosedForm
from predict.workload import Evaluator, Point, Timing, Workload


def prepare(model: CostModel, point: Point) -> Workload:
    """The paper's sums, and its memory with a reuse factor rho of 1.

    Raises:
        UserError: the paper has no closed form of the strategy.
    """
    if _is_pipeline(point.strategy):
        return _pipelined(model, point)
    memory = paradl_memory(model.network, point.local_batch, dtype=model.dtype)
    return prepare_closed_form("paradl", paradl, model, point, memory)


def _is_pipeline(strategy: Strategy) -> bool:
    return strategy.name == "pipeline" and strategy.ranks > 1


def _covers(strategy: Strategy) -> bool:
    return has_closed_form(strategy) or _is_pipeline(strategy)


def _pipelined(model: CostModel, point: Point) -> Workload:
    """Stages in lock-step; what is neither forward nor backward of the largest stage is idle time."""
    planner, schedule = planner_for(point.strategy), schedule_of(point.settings.schedule)
    stages_given = point.settings.stages if schedule.stages_per_rank == 1 else ()
    settings = msgspec.structs.replace(point.settings, schedule="gpipe", stages=stages_given)
    plan = planner.plan(model.network, point.strategy, settings)
    priced, form = model.price(plan), PipelineClosedForm(plan)
    share = plan.micro_batches / (len(plan.roles) + plan.micro_batches - 1)

    def time(seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timing:
        step = form(np.asarray(seconds))
        forward, backward = step.fw_s * share, step.bw_s * share
        idle = step.iteration_s - forward - backward - step.wu_s
        return Timing(forward, backward, 0.0, step.wu_s, step.transfers_s, 0.0, idle_s=idle)

    if schedule.name != settings.schedule:
        priced.remarks.add(
            Remark(f"the closed form knows GPipe's schedule alone, and stands for {schedule.name}", True)
        )
    costs = priced.costs
    counts = [np.bincount(role.work, minlength=len(plan.works)).astype(float) for role in plan.roles]
    stages = cut_into_stages(model.network, len(plan.roles), settings)
    uses = [paradl_memory(stage.network, point.local_batch, dtype=model.dtype) for stage in stages]
    return Workload(
        costs=dataclasses.replace(costs, counts=max(counts, key=lambda own: float(own @ costs.seconds))),
        spread=priced.spread,
        remarks=priced.remarks,
        memory=max(uses, key=lambda use: use.peak_bytes),
        limits=tuple(map(str, planner.limits(model.network, settings))),
        time=time,
        iteration_s=lambda *costs: form(np.asarray(costs[0])).iteration_s,
    )


EVALUATOR = Evaluator(
    name="paradl",
    summary="ParaDL's closed form: layers and weight update, then one all-reduce",
    prepare=prepare,
    covers=_covers,
)
