"""Reduce-scatter: rank r ends with part r of the sum of all ranks' buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.hierarchies import ring_of_nodes
from paradl_bench.plan.cost_terms.pipelining import reducing, reducing_and_back, ring_of_parts
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_ring = reducing(ring_of_parts)


OPERATION = CollectiveOperation(
    name="reduce_scatter",
    message_bytes_is="the part that each rank keeps",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    size_factor=float,
    algorithms=(
        Algorithm(name="ring", source="ParaDL section 4, as T_ag, with KernelMLP's reduction term", terms=_ring),
        Algorithm(
            name="all_reduce",
            source="torch's gloo, which all-reduces a copy and keeps a part (ProcessGroupGloo::_reduce_scatter_base)",
            # A ring all-reduce of the whole, ranks times message_bytes, of which each rank keeps its part.
            terms=reducing_and_back(ring_of_parts),
            libraries=("gloo",),
        ),
        ring_of_nodes(_ring),
    ),
)


def _elements(message: int, ranks: int) -> tuple[int, int]:
    return message * ranks, message


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    # Renamed in torch 2.13; the old name warns there.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work | None = scatter(buffers.output, buffers.input, group=group, async_op=True)
    return work


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    start = rank * buffers.output.numel()
    return contents.holds_period(buffers.output, contents.sum_period(range(ranks), start=start))


ROUTINE = Routine(name=OPERATION.name, elements=_elements, call=_call, correct=_correct)
