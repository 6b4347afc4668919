"""How far apart neighbours along an axis stand: some in one node, others in two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paradl_bench.records.cluster import Level


def span_of_hop(levels: Sequence[Level], ranks: int, group: tuple[int, int], places: tuple[int, int]) -> int:
    """Ranks side by side of which one unit of a level holds both ends of every message between two places of an axis.

    The ranks of the whole axis where no smaller unit does: of messages that are sent at once, the slowest counts.

    Args:
        levels: from the inside out. ranks: of the strategy. group: the axis' degree, and its stride over ranks.
        places: along the axis, of sender and receiver.
    """
    degree, stride = group
    here, there = places
    every = np.arange(ranks)
    senders = every[every // stride % degree == here]
    receivers = senders + (there - here) * stride
    for level in levels:
        if level.ranks >= degree * stride:
            break
        if np.array_equal(senders // level.ranks, receivers // level.ranks):
            return level.ranks
    return degree * stride
