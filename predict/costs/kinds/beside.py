"""Calls that go on beside all-reduces in flight."""

from __future__ import annotations

from paradl_bench.plan.works.communication import Collective
from paradl_bench.plan.works.work import Communication
from predict.costs.kinds.kind_costs import KnownCosts, WorkContext
from predict.costs.spread.assembly import Priced


def beside(priced: Priced, operation: str, work: Communication, known: KnownCosts, context: WorkContext) -> Priced:
    """A call as it goes on beside all-reduces in flight, where it may, and was not measured to queue."""
    call, strategy = context.call, context.plan.strategy
    if call.beside is None or not priced.cost.seconds:
        return priced
    of_call = Collective(operation=operation, message_bytes=1, ranks=2, axes=work.axes)
    factor_and_sd, remarks = known.communication.with_all_reduce(of_call, call.beside, strategy, priced.cost.seconds)
    cost = priced.cost._replace(remarks=(*priced.cost.remarks, *remarks))
    if factor_and_sd is None:
        return priced._replace(cost=cost)
    factor, sd = factor_and_sd
    # Compute stands still while it is waited for: there is nothing else that it is slowed beside.
    return priced._replace(cost=cost, slowdown=(1.0, factor), slowdown_sd=(0.0, sd), blocking=True)
