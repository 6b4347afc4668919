"""Halos, as messages to neighbours that are all under way at once."""

from __future__ import annotations

from paradl_bench.plan.works.communication import HaloExchange
from predict.costs.kinds.beside import beside
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: HaloExchange, known: KnownCosts, context: WorkContext) -> Priced:
    halo = known.communication.halo_cost(work, context.plan.strategy, context.call)
    priced = Priced(halo.cost, context.occurrences, work, True, halo.modes)
    return beside(priced, known.communication.halo_operation(work), work, known, context)


COSTS = KindCosts(kind=HaloExchange, price=_price)
