"""``csf``: no overlap; all of compute, then one all-reduce of everything. The baseline to beat."""

from __future__ import annotations

from predict.closed_forms import csf
from predict.cost_model import CostModel
from predict.evaluators.closed_form import has_closed_form, prepare_closed_form
from predict.workload import Evaluator, Point, Workload


def prepare(model: CostModel, point: Point) -> Workload:
    """The sums, time between operations included."""
    return prepare_closed_form("csf", csf, model, point, model.memory(point.strategy, point.settings))


EVALUATOR = Evaluator(
    name="csf",
    summary="no overlap: all of compute, then one all-reduce of everything",
    prepare=prepare,
    covers=has_closed_form,
)
