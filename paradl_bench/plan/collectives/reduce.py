"""Reduce: rank 0 ends with the sum of all ranks' buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.hierarchies import TREE_OF_NODES, binomial_of_nodes
from paradl_bench.plan.cost_terms.pipelining import (
    binomial,
    chain,
    halving,
    reducing,
    reducing_and_back,
    ring,
    two_tree,
)
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_ROOT = 0


OPERATION = CollectiveOperation(
    name="reduce",
    message_bytes_is="the whole buffer",
    bus_factor=lambda ranks: 1.0,
    in_place=True,
    algorithms=(
        Algorithm(
            name="binomial",
            source="binomial tree: log2(p) (alpha + m beta + m gamma) (Thakur, Rabenseifner, Gropp 2005, section 4.6)",
            terms=reducing(binomial),
        ),
        Algorithm(
            name="ring",
            source="ring reduce-scatter, then the root gathers the parts: gloo (gloo/reduce.cc)",
            # Each rank ends with the sum of a part; the root then takes the parts over its one link.
            terms=reducing_and_back(ring),
            libraries=("gloo",),
            parts=lambda p: p,
        ),
        Algorithm(
            name="chain",
            source="pipeline along a chain in NCCL's pieces, as NCCL's ring reduce: its broadcast the other way round",
            terms=reducing(chain),
            libraries=("nccl",),
        ),
        Algorithm(
            name="tree",
            source="ParaDL's footnote 4 (two-tree, Sanders et al. 2009), with pieces of a fixed size",
            terms=reducing(two_tree),
        ),
        Algorithm(
            name="halving_gather",
            source="recursive halving, then a binomial gather (Rabenseifner; Thakur et al., 4.6): MPI, long",
            terms=reducing_and_back(halving),
        ),
        TREE_OF_NODES,
        Algorithm(
            name="binomial_of_nodes",
            source="binomial tree (Thakur, Rabenseifner, Gropp 2005, section 4.6) whose near steps stay inside nodes",
            level_terms=binomial_of_nodes,
        ),
    ),
)


def _call(buffers: Buffers, rank: int, ranks: int, group: ProcessGroup | None) -> Work | None:
    import torch.distributed as dist

    work: Work | None = dist.reduce(buffers.output, group=group, group_dst=_ROOT, async_op=True)
    return work


def _correct(buffers: Buffers, rank: int, ranks: int) -> bool:
    # What the other ranks' buffers hold then is not defined.
    return rank != _ROOT or contents.holds_period(buffers.output, contents.sum_period(range(ranks)))


ROUTINE = Routine(name=OPERATION.name, call=_call, correct=_correct)
