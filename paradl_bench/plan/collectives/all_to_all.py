"""All-to-all: every rank sends a part of its buffer to each rank, and ends with those for it, in the order of ranks.

Parts may be of unlike sizes, as of rows that a router shares out: a message is then their mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.pipelining import moving, ring_of_parts
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation, CostTerms, Floats, LevelTerms

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def _pairwise_of_nodes(ranks: Floats, message_bytes: Floats, ranks_per_node: Floats) -> LevelTerms:
    inside, between = ranks_per_node - 1, ranks - ranks_per_node
    return LevelTerms(
        CostTerms(inside, inside * message_bytes, 0 * message_bytes),
        CostTerms(between, between * message_bytes, 0 * message_bytes),
    )


OPERATION = CollectiveOperation(
    name="all_to_all",
    message_bytes_is="the part for each rank",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    size_factor=float,
    algorithms=(
        Algorithm(
            name="pairwise",
            source="p - 1 messages in turn (Thakur, Rabenseifner, Gropp 2005, section 4.3: pairwise exchange)",
            # As many messages of as many bytes as a ring on which parts pass, each to another rank.
            terms=moving(ring_of_parts),
        ),
        Algorithm(
            name="pairwise_of_nodes",
            source="the same, with messages inside a node and those between nodes apart",
            level_terms=_pairwise_of_nodes,
        ),
    ),
)


def _elements(message: int, ranks: int) -> tuple[int, int]:
    return message * ranks, message * ranks


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    work: Work | None = dist.all_to_all_single(buffers.output, buffers.input, group=group, async_op=True)
    return work


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    parts = buffers.output.view(ranks, -1)
    start = rank * parts.shape[1]
    return all(contents.holds_period(part, contents.rank_period(at, start=start)) for at, part in enumerate(parts))


ROUTINE = Routine(name=OPERATION.name, elements=_elements, call=_call, correct=_correct)
