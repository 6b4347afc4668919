"""All-reduce: every rank ends with the sum of all ranks' buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.hierarchies import (
    binomial_of_nodes,
    by_leader,
    chain_and_tree,
    ring_of_nodes,
    segmented,
)
from paradl_bench.plan.cost_terms.pipelining import binomial, depth, reducing, two_tree
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation, CostTerms, Floats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def _ring(ranks: Floats, message_bytes: Floats) -> CostTerms:
    part = message_bytes / ranks
    return CostTerms(2 * (ranks - 1), 2 * (ranks - 1) * part, (ranks - 1) * part)


def _tree(ranks: Floats, message_bytes: Floats) -> CostTerms:
    # Reduce, then broadcast; what arrives in the reduction is added.
    steps, moved = two_tree(ranks, message_bytes)
    return CostTerms(2 * steps, 2 * moved, moved)


def _halving_doubling(ranks: Floats, message_bytes: Floats) -> CostTerms:
    # Each step of the reduce-scatter halves the message, each of the all-gather doubles it: (p-1)/p of it either way.
    part = (ranks - 1) / ranks * message_bytes
    return CostTerms(2 * depth(ranks), 2 * part, part)


OPERATION = CollectiveOperation(
    name="all_reduce",
    message_bytes_is="the whole buffer",
    bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
    in_place=True,
    algorithms=(
        Algorithm(
            name="ring",
            source="ParaDL section 4 (T_ar) with KernelMLP's reduction term; gloo, and NCCL for large messages",
            terms=_ring,
            parts=lambda p: p,
        ),
        Algorithm(
            name="tree",
            source="twice ParaDL's footnote 4 (two-tree, Sanders et al. 2009): reduce, then broadcast",
            terms=_tree,
        ),
        Algorithm(
            name="halving_doubling",
            source="recursive halving and doubling (Rabenseifner; Thakur, Rabenseifner, Gropp 2005, section 4.5): MPI",
            terms=_halving_doubling,
        ),
        Algorithm(
            name="recursive_doubling",
            source="log2(p) (alpha + m beta + m gamma) (Thakur, Rabenseifner, Gropp 2005, section 4.5): MPI, short",
            terms=reducing(binomial),
            short=True,
        ),
        ring_of_nodes(_ring, parts=lambda p: p),
        Algorithm(
            name="tree_of_nodes",
            source="chain through each node, tree between nodes, as NCCL's trees: reduce, then broadcast",
            level_terms=lambda p, m, g: chain_and_tree(2, m, p, g),
        ),
        Algorithm(
            name="recursive_doubling_of_nodes",
            source="recursive doubling (Thakur, Rabenseifner, Gropp 2005, section 4.5), its near steps inside nodes",
            level_terms=binomial_of_nodes,
        ),
        Algorithm(
            name="segmented",
            source="reduce-scatter in the node, all-reduces of the parts between nodes, all-gather",
            level_terms=segmented,
        ),
        Algorithm(
            name="leader",
            source="reduce in the node, all-reduce between leaders, broadcast",
            level_terms=by_leader,
        ),
    ),
)


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    work: Work | None = dist.all_reduce(buffers.output, group=group, async_op=True)
    return work


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    return contents.holds_period(buffers.output, contents.sum_period(range(ranks)))


ROUTINE = Routine(name=OPERATION.name, call=_call, correct=_correct)
