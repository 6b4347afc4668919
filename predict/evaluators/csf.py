"""``csf``: no overlap; all of compute, then one all-reduce of everything. The baseline to beat."""

from __future__ import annotations

from predict.closed_forms.closed_form_evaluation import csf, has_closed_form, has_closed_settings, prepare_closed_form
from predict.closed_forms.osf import scaling_factor
from predict.costs.cost_model import CostModel
from predict.costs.sourced import Remark
from predict.workload import Configuration, Evaluator, PreparedEvaluation


def prepare(costs: CostModel, point: Configuration) -> PreparedEvaluation:
    """The sums, time between operations included."""
    workload = prepare_closed_form("csf", csf, costs, point, lambda: costs.memory(point.strategy, point.settings))
    if point.strategy.ranks > 1:
        timing = workload.timing()
        factor = scaling_factor(timing.fw_s + timing.bw_s, timing.ge_s)
        workload.remarks.add(Remark(f"scaling factor (CSF) {factor:.4f}, weight update left out", False))
    return workload


EVALUATOR = Evaluator(name="csf", prepare=prepare, covers=has_closed_form, knows=has_closed_settings)
