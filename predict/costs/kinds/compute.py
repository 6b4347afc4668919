"""Layers, by what was measured or derived of their operations."""

from __future__ import annotations

from paradl_bench.plan.works.computing import Compute
from predict.costs.compute.backward_split import SPLIT_MODE
from predict.costs.hardware.what_if_device import Demand, DemandContext
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, PricingContext, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: Compute, known: KnownCosts, context: WorkContext) -> Priced:
    place = context.plan.place
    # A layer that is left whole takes longer beside layers that are split: what splits those is called for it too.
    shard = work.shard or context.plan.shard
    if work.phase in ("BW_input", "BW_weight"):
        part = known.layers.part_of_backward(work.operation, work.phase, shard, *place)
        # Both parts share the measurement of the whole, and what one of them takes the other does not.
        modes = ((SPLIT_MODE, part.moved_s),)
        return Priced(part.cost, context.occurrences, (work.operation, "BW", shard), modes=modes)
    cost = known.layers.cost(work.operation, work.phase, shard, *place)
    return Priced(cost, context.occurrences, (work.operation, work.phase, shard))


def _alone_on_host(work: Compute, known: KnownCosts, place: PricingContext) -> tuple[float, float]:
    ratio = known.layers.alone_on_host(place.ranks_on_host, work.operation, work.way, place.local_batch)
    return (ratio.value, ratio.value * ratio.relative_sd) if ratio else (1.0, 0.0)


def _spread_of_event(work: Compute, known: KnownCosts, place: PricingContext) -> float:
    return known.layers.relative_spread(work.operation, work.phase, work.shard, *place)


def _demand(work: Compute, context: DemandContext) -> Demand:
    roofline = context.roofline
    return Demand(*roofline.demand(roofline.layers[work.operation], work.phase, context.local_batch))


def _decisive(work: Compute) -> tuple[str, str, str]:
    """All but the layer: blocks repeat their operations."""
    return work.operation, work.phase, work.shard


COSTS = KindCosts(
    kind=Compute,
    price=_price,
    alone_on_host=_alone_on_host,
    spread_of_event=_spread_of_event,
    decisive=_decisive,
    demand=_demand,
)
