"""Algorithms that treat links inside a node and links between nodes apart.

p ranks, g of them on each of n = p / g nodes. A hierarchy is fitted with four parameters, alpha and beta of either
level. Sweeps on one node hold the inner two alone; sweeps over nodes hold all. Where ranks share one node, the links
between nodes cost nothing, and where no two ranks share one, those inside.
"""

from __future__ import annotations

import numpy as np

from paradl_bench.plan.cost_terms.pipelining import depth, messages_at_once
from paradl_bench.plan.cost_terms.terms import CostTerms, Floats, LevelTerms


def flat_over_nodes(steps: Floats, moved: Floats, ranks: Floats, ranks_per_node: Floats) -> LevelTerms:
    """A flat algorithm whose messages inside a node start faster than those between nodes.

    A ring over p ranks crosses node boundaries in n of its p hops; its bandwidth is that of the slowest link. NCCL's
    own model of its rings counts so (``src/graph/tuning.cc``: inter-node steps and the others).

    Args:
        steps: messages one after the other. moved: bytes over the slowest link.
    """
    nodes = ranks / ranks_per_node
    fraction = np.where(nodes > 1, (nodes - 1) / np.maximum(ranks - 1, 1), 0.0)
    outside = np.where(nodes > 1, moved, 0.0)
    return LevelTerms(
        CostTerms(steps * (1 - fraction), moved - outside, 0 * moved), CostTerms(steps * fraction, outside, 0 * moved)
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


def binomial_of_nodes(message_bytes: Floats, ranks: Floats, ranks_per_node: Floats) -> LevelTerms:
    """A binomial tree over ranks that stand side by side on nodes: far steps first, those inside nodes last.

    The whole message at every step. Exact where nodes and the ranks of each are powers of two; else what the tree over
    nodes and that in the last of them take, one after the other.
    """
    inside, between = depth(np.minimum(ranks_per_node, ranks)), depth(ranks / ranks_per_node)
    return LevelTerms(
        CostTerms(inside, inside * message_bytes, 0 * message_bytes),
        CostTerms(between, between * message_bytes, 0 * message_bytes),
    )


def binomial_at_once_of_nodes(message_bytes: Floats, ranks: Floats, ranks_per_node: Floats) -> LevelTerms:
    """The same tree where no send waits for another: a rank's children share its link.

    A rank sends inside its node while it sends to other nodes, over other links; what is counted inside is the last
    node's tree, after the message has come there.
    """
    inside, nodes = np.minimum(ranks_per_node, ranks), ranks / ranks_per_node
    return LevelTerms(
        CostTerms(depth(inside), messages_at_once(inside) * message_bytes, 0 * message_bytes),
        CostTerms(depth(nodes), messages_at_once(nodes) * message_bytes, 0 * message_bytes),
    )


def segmented(message_bytes: Floats, ranks: Floats, ranks_per_node: Floats) -> LevelTerms:
    """Reduce-scatter in the node, g concurrent ring all-reduces of m/g between nodes, all-gather in the node.

    Reduce-scatter in the node, all-reduces of the parts between nodes at once, all-gather. That the g rings share the
    node's link is left to beta.
    """
    nodes, inner = ranks / ranks_per_node, ranks_per_node - 1
    part = message_bytes / ranks_per_node
    return LevelTerms(
        CostTerms(2 * inner, 2 * inner * part, 0 * part),
        CostTerms(2 * (nodes - 1), 2 * (nodes - 1) / nodes * part, 0 * part),
    )


def by_leader(message_bytes: Floats, ranks: Floats, ranks_per_node: Floats) -> LevelTerms:
    """Reduce to a leader in the node, all-reduce between leaders along trees, broadcast in the node.

    Reduce in the node, all-reduce between leaders, broadcast.
    """
    nodes = ranks / ranks_per_node
    inner = 2 * depth(ranks_per_node)
    return LevelTerms(
        CostTerms(inner, np.where(ranks_per_node > 1, 2 * message_bytes, 0.0), 0 * message_bytes),
        CostTerms(2 * depth(nodes), np.where(nodes > 1, 2 * message_bytes, 0.0), 0 * message_bytes),
    )
