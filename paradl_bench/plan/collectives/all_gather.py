"""All-gather: every rank ends with all ranks' contributions, in the order of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.hierarchies import ring_of_nodes
from paradl_bench.plan.cost_terms.pipelining import moving, ring_of_parts
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


_ring = moving(ring_of_parts)

OPERATION = CollectiveOperation(
    name="all_gather",
    message_bytes_is="what each rank contributes",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    size_factor=float,
    algorithms=(
        Algorithm(name="ring", source="ParaDL section 4 (T_ag); gloo and NCCL", terms=_ring),
        ring_of_nodes(_ring),
    ),
)


def _elements(message: int, ranks: int) -> tuple[int, int]:
    return message, message * ranks


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    # Renamed in torch 2.13; the old name warns there.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work | None = gather(buffers.output, buffers.input, group=group, async_op=True)
    return work


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    parts = buffers.output.view(ranks, -1)
    return all(contents.holds_period(parts[source], contents.rank_period(source)) for source in range(ranks))


ROUTINE = Routine(name=OPERATION.name, elements=_elements, call=_call, correct=_correct)
