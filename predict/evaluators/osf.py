"""``osf``: overlap of backward and exchange, and tensor fusion, as in the paper's scaling factor.

As in the paper overlap is free, copies into buffers take no time and no rank is later than another. Buffers are filled
under the costs as they are; the interval keeps them as they are then.
"""

from __future__ import annotations

from paradl_bench.core.errors import UserError
from paradl_bench.strategies.data.fusion.buffers import Buffers, describe
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.closed_forms.closed_form_evaluation import gradient_exchange, has_closed_form, has_closed_settings
from predict.closed_forms.osf import fusion_of, scaling_factor, workload_of
from predict.costs.cost_model import CostModel
from predict.costs.sourced import Remark
from predict.workload import Configuration, Evaluator, PreparedEvaluation, Timing


def prepare(costs: CostModel, point: Configuration) -> PreparedEvaluation:
    """Fuse, plan and price; remarks say what the grouping makes of the exchange."""
    if not has_closed_form(point.strategy):
        raise UserError(
            f"osf has closed forms for serial and data parallelism, not for {point.strategy}: give --evaluator simulate"
        )
    planner_for(point.strategy).check(costs.network, point.strategy, point.settings)
    buffers = costs.buffers(fusion_of(costs), point.strategy, point.settings)
    workload = workload_of(costs, point, buffers)
    if point.strategy.ranks > 1:
        workload.remarks.add(*_of_grouping(costs, point, workload.timing(), buffers))
    return workload


def _of_grouping(costs: CostModel, point: Configuration, timing: Timing, buffers: Buffers) -> tuple[Remark, ...]:
    compute_s = timing.fw_s + timing.bw_s
    in_series, _ = costs.collective(gradient_exchange(costs.network, point.strategy.ranks), point.strategy)
    without = scaling_factor(compute_s, float(in_series.seconds.sum()))
    factor = scaling_factor(compute_s, timing.ge_s)
    fusion = fusion_of(costs)
    texts = [
        f"scaling factor (OSF) {factor:.4f}, without overlap (CSF) {without:.4f}, weight update left out",
        describe(fusion, buffers.bytes, len(buffers.layers), point.settings.of(ExchangeOptions).fused_by),
    ]
    if fusion.rule == "buffer":
        texts.append(
            "osf adds a buffer's wait for the all-reduce before it, as the paper's eq. 15 does; this corrects eq. 13"
        )
    return tuple(Remark(text, False) for text in texts)


EVALUATOR = Evaluator(name="osf", prepare=prepare, covers=has_closed_form, knows=has_closed_settings)
