"""Point to point: the first rank sends its buffer to the last one; the ranks between take no part.

First and last, so that a group over several hosts measures the level between them. A call lasts as long as the receive:
a library that buffers ends the send before the message is on the link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.pipelining import direct
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_SENDER = 0


OPERATION = CollectiveOperation(
    name="send_recv",
    message_bytes_is="the message",
    bus_factor=lambda ranks: 1.0,
    ends_with="receiver",
    algorithms=(Algorithm(name="direct", source="ParaDL section 4 (T_p2p, Hockney): alpha + m beta", terms=direct),),
)


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    if rank == _SENDER:
        return dist.isend(buffers.output, group=group, group_dst=ranks - 1)
    if rank == ranks - 1:
        return dist.irecv(buffers.output, group=group, group_src=_SENDER)
    return None


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    source = _SENDER if rank == ranks - 1 else rank
    return contents.holds_period(buffers.output, contents.rank_period(source))


def _sides(ranks: int) -> tuple[int, ...]:
    return _SENDER, ranks - 1


ROUTINE = Routine(name=OPERATION.name, call=_call, correct=_correct, sides=_sides)
