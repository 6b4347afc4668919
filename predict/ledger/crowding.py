"""How much longer a rank computes while the other ranks of its host compute too."""

from __future__ import annotations

from predict.costs.cost_model import SUMS, CostModel
from predict.costs.kinds.kind_costs import PricingContext


def crowding(costs: CostModel, place: PricingContext) -> dict[str, float]:
    """By phase (FW, BW, WU), seconds of the whole model on a shared host over those of one rank alone on it.

    FW and BW have one ratio, that of their sum. 1 where the rank is alone; empty where nothing was measured both ways.
    """
    if place.ranks_on_host == 1:
        return dict.fromkeys(("FW", "BW", "WU"), 1.0)
    crowded, alone = (costs.sums(at).seconds for at in (place, place._replace(ranks_on_host=1)))
    update = SUMS.index("WU")
    computing = [index for index in range(len(SUMS)) if index != update]
    if (crowded == alone).all():
        return {}
    of_layers = float(crowded[computing].sum() / alone[computing].sum())
    of_update = float(crowded[update] / alone[update]) if alone[update] else 1.0
    return {"FW": of_layers, "BW": of_layers, "WU": of_update}
