"""A timer, which takes what it says."""

from __future__ import annotations

from paradl_bench.plan.works.moving import Wait
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, WorkContext
from predict.costs.sourced import Cost, Source
from predict.costs.spread.assembly import Priced


def _price(work: Wait, known: KnownCosts, context: WorkContext) -> Priced:
    # Neither compute nor communication; what counts as the latter has no error in common with all compute.
    return Priced(Cost(work.seconds, Source.STATED), context.occurrences, work, True)


COSTS = KindCosts(kind=Wait, price=_price)
