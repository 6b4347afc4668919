"""``osf``: overlap of backward and exchange, and tensor fusion, as the paper's scaling factor has them.

Closed forms of :mod:`predict.closed_forms.osf`. As in the paper overlap is free, copies into buffers take no time and
no rank is later than another. Buffers are filled under the costs as they are; the interval keeps them as they are then.
"""

from __future__ import annotations

import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.closed_forms.iteration import gradient_exchange
from predict.closed_forms.layerwise_plan import layerwise_plan
from predict.closed_forms.osf import Exchange, scaling_factor
from predict.closed_forms.osf_form import Buffers, OverlapForm, describe, fused, fused_as_ddp, ready_seconds
from predict.costs.communication.fusion import Fusion
from predict.costs.cost_model import CostModel
from predict.costs.sourced import Remark
from predict.evaluators.closed_form import (
    KINDS,
    flat_exchange,
    has_closed_form,
    has_closed_settings,
    refuse_what_is_simulated,
)
from predict.workload import Configuration, Evaluator, PreparedEvaluation, Timing


def prepare(model: CostModel, point: Configuration) -> PreparedEvaluation:
    """Fuse, plan and price; remarks say what the grouping makes of the exchange.

    Raises:
        UserError: the strategy is neither serial nor data, or a limit is exceeded.
    """
    if not has_closed_form(point.strategy):
        raise UserError(f"osf has closed forms of {' and '.join(KINDS)}, not of {point.strategy}: take simulate")
    planner_for(point.strategy).check(model.network, point.strategy, point.settings)
    buffers = buffers_of(model, point)
    workload = workload_of(model, point, buffers)
    if point.strategy.ranks > 1:
        workload.remarks.add(*_of_grouping(model, point, workload.timing(), buffers))
    return workload


def workload_of(model: CostModel, point: Configuration, buffers: Buffers) -> PreparedEvaluation:
    """Plan and price these buffers; remarks are those of every grouping.

    Raises:
        UserError: the profile lacks a part, or gradients are to be accumulated.
    """
    refuse_what_is_simulated("osf", point.settings)
    plan = layerwise_plan(model.network, point, buffers.sends)
    priced = model.price(plan)
    form = OverlapForm(plan, model.network, fusion_of(model), buffers)
    if point.strategy.ranks > 1:
        text = "osf takes overlap and copies as free and all ranks as equally fast"
        priced.remarks.add(Remark(text, False), *flat_exchange(point.settings))
    return PreparedEvaluation(
        costs=priced.costs,
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: model.memory(point.strategy, point.settings),
        limits=tuple(map(str, planner_for(point.strategy).limits(model.network, point.settings))),
        time=lambda seconds, *_: form.timing(np.asarray(seconds)),
        iteration_s=lambda seconds, *_: form.timing(np.asarray(seconds)).iteration_s,
        overlap_is_unmeasured=model.overlap_is_unmeasured,
    )


def fusion_of(model: CostModel) -> Fusion:
    """The model's rule of fusion; none where it has none."""
    return model.fusion or Fusion()


def buffers_of(model: CostModel, point: Configuration) -> Buffers:
    """Which gradients are sent together, by the model's rule of fusion."""
    if fusion_of(model).rule == "ddp":
        return fused_as_ddp(model.network, point.settings)
    return fused(model.network, fusion_of(model), ready_of(model, point), _exchange(model, point))


def ready_of(model: CostModel, point: Configuration) -> dict[int, float]:
    """Since the start of backward, when each layer's backward is done, by its index; nothing beside it."""
    compute = layerwise_plan(model.network, point, {})
    return ready_seconds(compute, model.network, model.price(compute).costs.seconds)


def _exchange(model: CostModel, point: Configuration) -> Exchange:
    ranks = point.strategy.ranks

    def seconds(message_bytes: float) -> float:
        work = Collective(operation="all_reduce", message_bytes=max(1, round(message_bytes)), ranks=ranks)
        return model.communication.cost(work, point.strategy).cost.seconds

    return seconds


def _of_grouping(model: CostModel, point: Configuration, timing: Timing, buffers: Buffers) -> tuple[Remark, ...]:
    compute_s = timing.fw_s + timing.bw_s
    in_series, _ = model.collective(gradient_exchange(model.network, point.strategy.ranks), point.strategy)
    without = scaling_factor(compute_s, float(in_series.seconds.sum()))
    factor = scaling_factor(compute_s, timing.ge_s)
    fusion = fusion_of(model)
    texts = [
        f"scaling factor (OSF) {factor:.4f}, without overlap (CSF) {without:.4f}, weight update left out",
        describe(fusion, buffers.bytes, len(buffers.layers)),
    ]
    if fusion.rule == "buffer":
        texts.append(
            "osf adds a buffer's wait behind the all-reduce before it, as the paper's eq. 15 does; eq. 13 is mended"
        )
    return tuple(Remark(text, False) for text in texts)


EVALUATOR = Evaluator(
    name="osf",
    summary="OSF: exchanges beside backward, layer by layer or fused; scaling factor",
    prepare=prepare,
    covers=has_closed_form,
    knows=has_closed_settings,
)
