"""The optimizer's step: the whole model's or a shard's, by the elements that a rank updates."""

from __future__ import annotations

from paradl_bench.network.kinds.kernel_shape import optimizer_shape
from paradl_bench.plan.mesh import label_of_gathers, zero_stage
from paradl_bench.plan.works.computing import WeightUpdate
from predict.costs.hardware.what_if_device import Demand, DemandContext
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, PricingContext, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: WeightUpdate, known: KnownCosts, context: WorkContext) -> Priced:
    plan = context.plan
    cost, elements = known.model.shard_update(*plan.place, plan.shard), plan.updated_elements
    of_gathered = cost is not None and plan.shard == label_of_gathers(plan.strategy)
    if cost is None:
        cost, elements = known.model.weight_update(*plan.place), known.updated_elements
    if zero_stage(plan.strategy) > 1 and not of_gathered:
        # Its shards are fp32, and have no copies. Where they were measured, they had none either.
        cost = cost.over(known.model.unmeasured.times_with_copies(work.optimizer))
    return Priced(cost.over(max(elements, 1) / max(work.elements, 1)), context.occurrences, work)


def _alone_on_host(work: WeightUpdate, known: KnownCosts, place: PricingContext) -> tuple[float, float]:
    return known.model.host_ratio(work.way, place.ranks_on_host, 1) or 1.0, 0.0


def _spread_of_event(work: WeightUpdate, known: KnownCosts, place: PricingContext) -> float:
    return known.model.relative_spread_of_update(*place)


def _demand(work: WeightUpdate, context: DemandContext) -> Demand:
    shape = optimizer_shape(work.optimizer, work.elements, work.tensors, context.dtype)
    return Demand(shape.flops, shape.bytes)


COSTS = KindCosts(
    kind=WeightUpdate, price=_price, alone_on_host=_alone_on_host, spread_of_event=_spread_of_event, demand=_demand
)
