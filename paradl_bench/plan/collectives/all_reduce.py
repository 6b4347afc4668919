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
from paradl_bench.plan.cost_terms.pipelining import binomial, halving, reducing, reducing_and_back, ring, two_tree
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


OPERATION = CollectiveOperation(
    name="all_reduce",
    message_bytes_is="the whole buffer",
    bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
    in_place=True,
    algorithms=(
        Algorithm(
            name="ring",
            source="ParaDL section 4 (T_ar) with KernelMLP's reduction term; gloo, and NCCL for large messages",
            terms=reducing_and_back(ring),
            parts=lambda p: p,
        ),
        Algorithm(
            name="tree",
            source="twice ParaDL's footnote 4 (two-tree, Sanders et al. 2009): reduce, then broadcast",
            terms=reducing_and_back(two_tree),
        ),
        Algorithm(
            name="halving_doubling",
            source="recursive halving and doubling (Rabenseifner; Thakur, Rabenseifner, Gropp 2005, section 4.5): MPI",
            terms=reducing_and_back(halving),
        ),
        Algorithm(
            name="recursive_doubling",
            source="log2(p) (alpha + m beta + m gamma) (Thakur, Rabenseifner, Gropp 2005, section 4.5): MPI, short",
            terms=reducing(binomial),
            short=True,
        ),
        ring_of_nodes(reducing_and_back(ring), parts=lambda p: p),
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
