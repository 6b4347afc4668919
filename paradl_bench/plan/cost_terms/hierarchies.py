"""Algorithms that treat links inside a node and links between nodes apart.

p ranks, g of them on each of n = p / g nodes. A hierarchy is fitted with four parameters, alpha and beta of either
level. Sweeps on one node hold the inner two alone; sweeps over nodes hold all. Where ranks share one node, the links
between nodes cost nothing, and where no two ranks share one, those inside.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paradl_bench.plan.cost_terms.pipelining import depth, messages_at_once
from paradl_bench.plan.cost_terms.terms import Algorithm, CostTerms, Floats, LevelTerms, TermsFunction


def ring_of_nodes(ring: TermsFunction, parts: Callable[[Floats], Floats] | None = None) -> Algorithm:
    """A flat ring whose messages inside a node start faster than those between nodes.

    Over p ranks it crosses node boundaries in n of its p hops; its bandwidth is that of the slowest link. NCCL's own
    model of its rings counts so (``src/graph/tuning.cc``: inter-node steps and the others).

    Args:
        ring: its terms where all hops are alike. parts: as of :class:`~paradl_bench.plan.cost_terms.terms.Algorithm`.
    """

    def level_terms(ranks: Floats, message_bytes: Floats, ranks_per_node: Floats) -> LevelTerms:
        steps, moved, _ = ring(ranks, message_bytes)
        nodes = ranks / ranks_per_node
        between = np.where(nodes > 1, (nodes - 1) / np.maximum(ranks - 1, 1), 0.0)
        outside = np.where(nodes > 1, moved, 0.0)
        return LevelTerms(
            CostTerms(steps * (1 - between), moved - outside, 0 * moved),
            CostTerms(steps * between, outside, 0 * moved),
        )

    return Algorithm(
        name="ring_of_nodes",
        source="ring whose hops inside nodes start faster than those between (NCCL's tuning.cc counts them apart)",
        level_terms=level_terms,
        parts=parts,
    )


def chain_and_tree(passes: int, message_bytes: Floats, ranks: Floats, ranks_per_node: Floats) -> LevelTerms:
    """A chain through each node and a tree between nodes, ``passes`` times (2: reduce, then broadcast).

    As NCCL's trees; messages are cut into pieces, so that each link carries the message once a pass and bandwidth is
    that of the slowest link.
    """
    nodes = ranks / ranks_per_node
    moved = passes * message_bytes
    outside = np.where(nodes > 1, moved, 0.0)
    return LevelTerms(
        CostTerms(passes * (ranks_per_node - 1), np.where(ranks_per_node > 1, moved - outside, 0.0), 0 * moved),
        CostTerms(passes * depth(nodes), outside, 0 * moved),
    )


TREE_OF_NODES = Algorithm(
    name="tree_of_nodes",
    source="chain through each node, tree between nodes, in pieces: the message once over each link",
    level_terms=lambda ranks, message_bytes, per_node: chain_and_tree(1, message_bytes, ranks, per_node),
)
"""Of a broadcast or a reduction."""


def binomial_of_nodes(ranks: Floats, message_bytes: Floats, ranks_per_node: Floats) -> LevelTerms:
    """A binomial tree over ranks that stand side by side on nodes: far steps first, those inside nodes last.

    The whole message at every step. Exact where nodes and the ranks of each are powers of two; else what the tree over
    nodes and that in the last of them take, one after the other.
    """
    inside, between = depth(np.minimum(ranks_per_node, ranks)), depth(ranks / ranks_per_node)
    return LevelTerms(
        CostTerms(inside, inside * message_bytes, 0 * message_bytes),
        CostTerms(between, between * message_bytes, 0 * message_bytes),
    )


def binomial_at_once_of_nodes(ranks: Floats, message_bytes: Floats, ranks_per_node: Floats) -> LevelTerms:
    """The same tree where no send waits for another: a rank's children share its link.

    A rank sends inside its node while it sends to other nodes, over other links; what is counted inside is the last
    node's tree, after the message has come there.
    """
    inside, nodes = np.minimum(ranks_per_node, ranks), ranks / ranks_per_node
    return LevelTerms(
        CostTerms(depth(inside), messages_at_once(inside) * message_bytes, 0 * message_bytes),
        CostTerms(depth(nodes), messages_at_once(nodes) * message_bytes, 0 * message_bytes),
    )


def segmented(ranks: Floats, message_bytes: Floats, ranks_per_node: Floats) -> LevelTerms:
    """Reduce-scatter in the node, g concurrent ring all-reduces of m/g between nodes, all-gather in the node.

    That the g rings share the node's link is left to beta.
    """
    nodes, inner = ranks / ranks_per_node, ranks_per_node - 1
    part = message_bytes / ranks_per_node
    return LevelTerms(
        CostTerms(2 * inner, 2 * inner * part, 0 * part),
        CostTerms(2 * (nodes - 1), 2 * (nodes - 1) / nodes * part, 0 * part),
    )


def by_leader(ranks: Floats, message_bytes: Floats, ranks_per_node: Floats) -> LevelTerms:
    """Reduce to a leader in the node, all-reduce between leaders along trees, broadcast in the node."""
    nodes = ranks / ranks_per_node
    inner = 2 * depth(ranks_per_node)
    return LevelTerms(
        CostTerms(inner, np.where(ranks_per_node > 1, 2 * message_bytes, 0.0), 0 * message_bytes),
        CostTerms(2 * depth(nodes), np.where(nodes > 1, 2 * message_bytes, 0.0), 0 * message_bytes),
    )
