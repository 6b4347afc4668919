"""Collectives, by the fits of their operations and what surrounds them."""

from __future__ import annotations

from paradl_bench.plan.works.communication import Collective
from predict.costs.kinds.beside import beside
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: Collective, known: KnownCosts, context: WorkContext) -> Priced:
    strategy, call = context.plan.strategy, context.call
    found = known.communication.cost(work, strategy, call)
    if work.ranks <= 1:
        return Priced(found.cost, context.occurrences, work, True)
    slowdown, remarks = known.communication.with_compute(work, strategy, found.cost.seconds)
    cost = found.cost._replace(remarks=(*found.cost.remarks, *remarks))
    priced = Priced(cost, context.occurrences, work, True, found.modes, slowdown[:2], slowdown[2:4])
    return beside(priced, work.operation, work, known, context)


COSTS = KindCosts(kind=Collective, price=_price)
