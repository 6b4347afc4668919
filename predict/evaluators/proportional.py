"""``proportional``: as ``simulate``, but a shard takes its share of the layer's time, 1/p where the split is even.

What ParaDL's Table 3 assumes of the layers that it splits. Beside ``simulate`` it shows what the measurement of sharded
shapes buys.
"""

from __future__ import annotations

import dataclasses

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy
from predict.costs.cost_model import CostModel
from predict.simulation import prepared
from predict.workload import Configuration, Evaluator, PreparedEvaluation


def prepare(costs: CostModel, point: Configuration) -> PreparedEvaluation:
    """The simulation, with layers' times shared out."""
    return prepared.prepare(dataclasses.replace(costs, proportional=True), point)


def _shares_layers(strategy: Strategy) -> bool:
    return degree_of(strategy, Trait.SHARDS_LAYERS) > 1


EVALUATOR = Evaluator(name="proportional", prepare=prepare, covers=_shares_layers)
