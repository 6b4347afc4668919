"""Broadcast: every rank ends with rank 0's buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.hierarchies import TREE_OF_NODES, binomial_at_once_of_nodes, binomial_of_nodes
from paradl_bench.plan.cost_terms.pipelining import binomial, binomial_at_once, chain, depth, moving, two_tree
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation, CostTerms, Floats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_ROOT = 0


def _scatter_all_gather(ranks: Floats, message_bytes: Floats) -> CostTerms:
    moved = 2 * (ranks - 1) / ranks * message_bytes
    return CostTerms(depth(ranks) + ranks - 1, moved, 0 * moved)


OPERATION = CollectiveOperation(
    name="broadcast",
    message_bytes_is="the whole buffer",
    bus_factor=lambda ranks: 1.0,
    in_place=True,
    algorithms=(
        Algorithm(
            name="binomial",
            source="binomial tree, not in pieces: log2(p) (alpha + m beta); gloo, MPICH for short messages",
            terms=moving(binomial),
        ),
        Algorithm(
            name="chain",
            source="pipeline along a chain (Sanders et al. 2009, section 1) in NCCL's pieces, as NCCL's ring broadcast",
            terms=moving(chain),
            libraries=("nccl",),
        ),
        Algorithm(
            name="tree",
            source="ParaDL's footnote 4 (two-tree, Sanders et al. 2009), with pieces of a fixed size",
            terms=moving(two_tree),
        ),
        Algorithm(
            name="scatter_all_gather",
            source="binomial scatter, then ring all-gather (Thakur, Rabenseifner, Gropp 2005, section 4.2): MPI, long",
            terms=_scatter_all_gather,
        ),
        TREE_OF_NODES,
        Algorithm(
            name="binomial_of_nodes",
            source="binomial tree (Thakur, Rabenseifner, Gropp 2005, section 4.2) whose near steps stay inside nodes",
            level_terms=binomial_of_nodes,
        ),
        Algorithm(
            name="binomial_at_once",
            source="binomial tree whose sends share a link, none waiting for another: MPI's while sends are buffered",
            terms=moving(binomial_at_once),
        ),
        Algorithm(
            name="binomial_at_once_of_nodes",
            source="the same over ranks side by side on nodes, whose near steps stay inside them",
            level_terms=binomial_at_once_of_nodes,
        ),
    ),
)


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    work: Work | None = dist.broadcast(buffers.output, group=group, group_src=_ROOT, async_op=True)
    return work


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    return contents.holds_period(buffers.output, contents.rank_period(_ROOT))


ROUTINE = Routine(name=OPERATION.name, call=_call, correct=_correct)
