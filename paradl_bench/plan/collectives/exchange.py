"""Exchange: every rank sends its buffer to the next rank and takes the one of the rank before, both at once.

What neighbours do with halos. Messages one way (``send_recv``) tell less where a rank's processor moves what it sends
and what it takes, as gloo's does. Of two ranks each sends to the other. So do nccl-tests' sendrecv and IMB's Sendrecv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.pipelining import direct
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


OPERATION = CollectiveOperation(
    name="exchange",
    message_bytes_is="what each rank sends",
    bus_factor=lambda ranks: 1.0,
    algorithms=(
        Algorithm(name="direct", source="alpha + m beta (Hockney), both ways over links of two ways", terms=direct),
    ),
)


class _Both:
    """Messages that were issued together, waited for as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _elements(message: int, ranks: int) -> tuple[int, int]:
    return message, message


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    if ranks < 2:
        return None
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    operations = [
        dist.P2POp(dist.isend, buffers.input, group=group, group_peer=after),
        dist.P2POp(dist.irecv, buffers.output, group=group, group_peer=before),
    ]
    return cast("Work", _Both(dist.batch_isend_irecv(operations)))


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    return ranks < 2 or contents.holds_period(buffers.output, contents.rank_period((rank - 1) % ranks))


ROUTINE = Routine(name=OPERATION.name, elements=_elements, call=_call, correct=_correct)
