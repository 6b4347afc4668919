"""Collectives, by the fits of their operations and what surrounds them."""

from __future__ import annotations

from paradl_bench.plan.works.communication import Collective
from predict.costs.kinds.beside import beside
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: Collective, known: KnownCosts, context: WorkContext) -> Priced:
    strategy, call = context.plan.strategy, context.call
    collective_cost = known.communication.cost(work, strategy, call)
    if work.ranks <= 1:
        return Priced(collective_cost.cost, context.occurrences, work, True)
    slowdown, remarks = known.communication.with_compute(work, strategy, collective_cost.cost.seconds)
    cost = collective_cost.cost._replace(remarks=(*collective_cost.cost.remarks, *remarks))
    priced = Priced(cost, context.occurrences, work, True, collective_cost.modes, slowdown[:2], slowdown[2:4])
    return beside(priced, work.operation, work, known, context)


COSTS = KindCosts(kind=Collective, price=_price)
