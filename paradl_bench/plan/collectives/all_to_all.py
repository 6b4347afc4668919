"""All-to-all: every rank sends each rank, itself included, a part of its own; what it ends with has one part of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.pipelining import moving
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation, CostTerms, Floats, LevelTerms

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def _pairs(ranks: Floats, message_bytes: Floats) -> tuple[Floats, Floats]:
    """(steps, bytes): a part of the message to each other rank, one after the other."""
    return ranks - 1, (ranks - 1) / ranks * message_bytes


def _pairs_of_nodes(ranks: Floats, message_bytes: Floats, ranks_per_node: Floats) -> LevelTerms:
    part = message_bytes / ranks
    inside, between = ranks_per_node - 1, ranks - ranks_per_node
    return LevelTerms(
        CostTerms(inside, inside * part, 0 * part),
        CostTerms(between, between * part, 0 * part),
    )


OPERATION = CollectiveOperation(
    name="all_to_all",
    message_bytes_is="what each rank sends to all, itself included",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    algorithms=(
        Algorithm(
            name="pairs",
            source="p - 1 messages of m/p (Thakur, Rabenseifner, Gropp 2005, section 4.3: pairwise exchange)",
            terms=moving(_pairs),
            parts=lambda p: p,
        ),
        Algorithm(
            name="pairs_of_nodes",
            source="the same, with messages inside a node and those between nodes apart",
            level_terms=_pairs_of_nodes,
            parts=lambda p: p,
        ),
    ),
)


def _elements(message: int, ranks: int) -> tuple[int, int]:
    whole = message - message % ranks
    return whole, whole


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    work: Work | None = dist.all_to_all_single(buffers.output, buffers.input, group=group, async_op=True)
    return work


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    size = buffers.output.numel() // ranks
    parts = buffers.output.view(ranks, -1)
    starts = rank * size
    return all(
        contents.holds_period(parts[source], contents.rank_period(source, start=starts)) for source in range(ranks)
    )


ROUTINE = Routine(name=OPERATION.name, elements=_elements, call=_call, correct=_correct)
