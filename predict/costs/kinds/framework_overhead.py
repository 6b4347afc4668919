"""The time between operations: a model's own, shared out over its operations."""

from __future__ import annotations

from paradl_bench.plan.works.computing import FrameworkOverhead
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, PricingContext, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: FrameworkOverhead, known: KnownCosts, context: WorkContext) -> Priced:
    plan = context.plan
    whole = known.model.between(work.phase, *plan.place, plan.shard)
    return Priced(whole.over(plan.between[work.phase]), context.occurrences, work)


def _alone_on_host(work: FrameworkOverhead, known: KnownCosts, place: PricingContext) -> tuple[float, float]:
    return known.model.host_ratio(work.phase, place.ranks_on_host, 1) or 1.0, 0.0


COSTS = KindCosts(kind=FrameworkOverhead, price=_price, alone_on_host=_alone_on_host)
