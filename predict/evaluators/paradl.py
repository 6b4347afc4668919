"""``paradl``: the paper's closed forms of time and memory, for serial and data."""

from __future__ import annotations

from predict.closed_forms import paradl
from predict.cost_model import CostModel
from predict.evaluators.closed_form import has_closed_form, prepare_closed_form
from predict.memory import paradl_memory
from predict.workload import Evaluator, Point, Workload


def prepare(model: CostModel, point: Point) -> Workload:
    """The paper's sums, and its memory with a reuse factor rho of 1."""
    memory = paradl_memory(model.network, point.local_batch, dtype=model.dtype)
    return prepare_closed_form("paradl", paradl, model, point, memory)


EVALUATOR = Evaluator(
    name="paradl",
    summary="ParaDL's closed form: layers and weight update, then one all-reduce",
    prepare=prepare,
    covers=has_closed_form,
)
