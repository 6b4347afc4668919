"""What crosses a pipeline's cut: the sender's messages one after the other."""

from __future__ import annotations

import math

from paradl_bench.plan.works.communication import Collective, HaloExchange, Transfer
from predict.costs.communication.backends import DEFAULT_BACKENDS
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, PlanContext, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: Transfer, known: KnownCosts, context: WorkContext) -> Priced:
    """A send takes the time of its messages; a receive waits for it and takes none."""
    sent = work.message_bytes if work.direction == "send" else ()
    strategy = context.plan.strategy
    span = _span(work, known, context.plan)
    message_cost = known.communication.halo_cost(
        HaloExchange(sends_bytes=sent, receives_bytes=(), axes=work.axes), strategy, context.call._replace(span=span)
    )
    if not sent:
        return Priced(message_cost.cost, context.occurrences, work, True)
    message = Collective(operation="send_recv", message_bytes=sum(sent), ranks=2, axes=work.axes)
    slowdown, remarks = known.communication.with_compute(message, strategy, message_cost.cost.seconds, span)
    cost = message_cost.cost._replace(remarks=(*message_cost.cost.remarks, *remarks))
    priced = Priced(cost, context.occurrences, work, True, message_cost.modes, slowdown[:2], slowdown[2:4])
    if context.call.beside is None:
        return priced
    # NCCL keeps groups apart in streams. Over gloo, messages and gradients wait for each other (docs/model/plans.md).
    return priced._replace(blocking=known.communication.backend == DEFAULT_BACKENDS["cuda"])


def _span(work: Transfer, known: KnownCosts, plan: PlanContext) -> int:
    """Ranks side by side that hold both ends: stages of one node send each other what no link between nodes sees."""
    (axis,), strategy = work.axes, plan.strategy
    degree, stride = strategy.axes[axis].degree, math.prod(inner.degree for inner in strategy.axes[axis + 1 :])
    places = (work.cut, work.to) if work.to >= 0 else (plan.stage_ranks[work.cut], plan.stage_ranks[work.cut + 1])
    return known.communication.span_of_hop(strategy.ranks, (degree, stride), places)


COSTS = KindCosts(kind=Transfer, price=_price)
