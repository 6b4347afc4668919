"""OSF's closed form of a configuration, for any grouping of its gradients."""

from __future__ import annotations

import numpy as np

from paradl_bench.strategies.data.fusion.buffers import Buffers
from paradl_bench.strategies.data.fusion.layerwise_plan import layerwise_plan
from paradl_bench.strategies.data.fusion.rules import Fusion
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.closed_forms.closed_form_evaluation import flat_exchange, refuse_what_is_simulated
from predict.closed_forms.osf_form import OverlapForm
from predict.costs.cost_model import CostModel
from predict.costs.sourced import Remark
from predict.workload import Configuration, PreparedEvaluation


def workload_of(costs: CostModel, point: Configuration, buffers: Buffers) -> PreparedEvaluation:
    """Plan and price these buffers; remarks are those of every grouping.

    Raises:
        UserError: the profile lacks a part, or gradients are to be accumulated.
    """
    refuse_what_is_simulated("osf", point.settings)
    plan = layerwise_plan(costs.network, point.strategy, point.settings, buffers.sends)
    priced = costs.price(plan)
    form = OverlapForm(plan, costs.network, fusion_of(costs), buffers)
    if point.strategy.ranks > 1:
        text = "osf takes overlap and copies as free and all ranks as equally fast"
        priced.remarks.add(Remark(text, False), *flat_exchange(point.settings))
    return PreparedEvaluation(
        costs=priced.costs,
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: costs.memory(point.strategy, point.settings),
        limits=tuple(map(str, planner_for(point.strategy).limits(costs.network, point.settings))),
        time=lambda seconds, *_: form.timing(np.asarray(seconds)),
        iteration_s=lambda seconds, *_: form.timing(np.asarray(seconds)).iteration_s,
        ledger=lambda: form.ledger(priced),
        overlap_is_unmeasured=costs.overlap_is_unmeasured,
    )


def fusion_of(costs: CostModel) -> Fusion:
    """The model's rule of fusion; none where it has none."""
    return costs.fusion or Fusion()
