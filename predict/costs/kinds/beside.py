"""Calls that go on beside all-reduces in flight."""

from __future__ import annotations

from paradl_bench.plan.works.communication import Collective
from paradl_bench.plan.works.work import Communication
from predict.costs.kinds.kind_costs import KnownCosts, WorkContext
from predict.costs.spread.assembly import Priced


def beside(priced: Priced, operation: str, work: Communication, known: KnownCosts, context: WorkContext) -> Priced:
    """A call as it goes on beside all-reduces in flight, where it may and that was measured."""
    call, strategy = context.call, context.plan.strategy
    if call.beside is None or not priced.cost.seconds:
        return priced
    spanned = Collective(operation=operation, message_bytes=1, ranks=2, axes=work.axes)
    level, exchange_level = (known.communication.level(each, strategy)[0].name for each in (spanned, call.beside))
    found = known.communication.beside.slowdown(operation, level, exchange_level, priced.cost.seconds)
    cost = priced.cost._replace(remarks=(*priced.cost.remarks, *found.remarks))
    if found.factor is None:
        return priced._replace(cost=cost)
    # Compute stands still while it is waited for: there is nothing else that it is slowed beside.
    return priced._replace(cost=cost, slowdown=(1.0, found.factor), slowdown_sd=(0.0, found.factor_sd), awaited=True)
