"""How single events of a plan spread by themselves, relative to their time (``stragglers`` reads it)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paradl_bench.plan.tasks import Compute, WeightUpdate, Work
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.model_costs import ModelCosts
from predict.costs.sourced import Floats


def relative_spreads(
    works: Sequence[Work], total_s: Floats, layers: LayerCosts, model: ModelCosts, batch: int, ranks_on_host: int
) -> Floats:
    """Per work, the standard deviation of one event over its median; where not measured, the mean of what was.

    Args:
        total_s: per work, seconds of all its occurrences; the mean weighs by them.
    """
    found = np.zeros(len(works))
    for index, work in enumerate(works):
        if isinstance(work, Compute):
            found[index] = layers.relative_spread(work.operation, work.phase, work.shard, batch, ranks_on_host)
        elif isinstance(work, WeightUpdate):
            found[index] = model.relative_spread_of_update(batch, ranks_on_host)
    weights = total_s * (found > 0)
    usual = float(weights @ found / weights.sum()) if weights.sum() else 1.0
    return np.where(found > 0, found, usual)
