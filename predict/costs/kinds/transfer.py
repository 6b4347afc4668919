"""What crosses a pipeline's cut: the sender's messages one after the other."""

from __future__ import annotations

from paradl_bench.plan.works.communication import Collective, HaloExchange, Transfer
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: Transfer, known: KnownCosts, context: WorkContext) -> Priced:
    """A send takes the time of its messages; a receive waits for it and takes none."""
    sent = work.message_bytes if work.direction == "send" else ()
    strategy = context.plan.strategy
    message_cost = known.communication.halo_cost(
        HaloExchange(sends_bytes=sent, receives_bytes=(), axes=work.axes),
        strategy,
        after_compute=context.call.after_compute,
    )
    if not sent:
        return Priced(message_cost.cost, context.occurrences, work, True)
    message = Collective(operation="send_recv", message_bytes=sum(sent), ranks=2, axes=work.axes)
    slowdown, remarks = known.communication.with_compute(message, strategy, message_cost.cost.seconds)
    cost = message_cost.cost._replace(remarks=(*message_cost.cost.remarks, *remarks))
    return Priced(cost, context.occurrences, work, True, message_cost.modes, slowdown[:2], slowdown[2:4])


COSTS = KindCosts(kind=Transfer, price=_price)
