"""Seconds of collectives for many numbers of ranks and bytes at once, from the very fits that price one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import Level
from predict.costs.communication.collective_times import CollectiveTimes
from predict.costs.communication.communication_costs import CommunicationCosts
from predict.costs.sourced import Floats, Ints


class Placed(NamedTuple):
    """Groups of ranks that communicate, one a point; arrays of shape (points,).

    Attributes:
        ranks: of a group. span: from its first rank to its last, side by side.
        per_node: how many of its ranks share a node.
        at_once: of the ranks of a unit of the cluster, how many groups communicate over its link at once.
    """

    ranks: Ints
    span: Ints
    per_node: Ints
    at_once: Callable[[int], Ints]


def inside_group(groups: Ints, ranks: Ints, ranks_per_node: int) -> Placed:
    """The ranks of each of ``groups`` groups, which stand side by side."""
    return Placed(
        ranks, ranks, np.minimum(ranks, ranks_per_node), lambda unit: -(-np.minimum(unit, groups * ranks) // ranks)
    )


def across_groups(groups: Ints, ranks: Ints, ranks_per_node: int) -> Placed:
    """Ranks at one place of each group: as many such collectives at once as a group has ranks."""
    per_node = np.maximum(1, np.minimum(groups, ranks_per_node // ranks))
    return Placed(groups, groups * ranks, per_node, lambda unit: np.minimum(unit, np.minimum(ranks, groups * ranks)))


def all_ranks(ranks: Ints, ranks_per_node: int) -> Placed:
    """All ranks there are."""
    return Placed(ranks, ranks, np.minimum(ranks, ranks_per_node), lambda unit: np.ones_like(ranks))


class CommunicationTables:
    """Collectives over arrays of ranks and bytes.

    Level, contention and the fit are looked up once for all points that share them.
    """

    def __init__(self, communication: CommunicationCosts) -> None:
        self._communication = communication
        self._levels = communication.cluster.levels
        self._times: dict[tuple[str, str, float], CollectiveTimes] = {}
        self._phi: dict[tuple[str, str, int, int], float] = {}

    def seconds(self, operation: str, placed: Placed, message_bytes: Floats, counts: Floats | None = None) -> Floats:
        """Seconds of the collectives of each point, one after the other; groups of one rank take none.

        Args:
            message_bytes: of shape (messages, points). counts: how often each of them is sent, of the same shape.

        Returns:
            Of shape (points,).

        Raises:
            UserError: the profile holds no fit of the operation, or the cluster given holds fewer ranks.
        """
        found = np.zeros(message_bytes.shape[1])
        if not message_bytes.size or int(placed.ranks.max()) <= 1:
            return found
        index = np.searchsorted([level.ranks for level in self._levels], placed.span)
        index = np.minimum(index, self._levels.index(self._communication.level_of_span(int(placed.span.max()))))
        for at in np.unique(index[placed.ranks > 1]).tolist():
            level = self._levels[at]
            at_once = placed.at_once(self._levels[max(at - 1, 0)].ranks)
            here = (index == at) & (placed.ranks > 1)
            kinds = np.stack([at_once, placed.per_node])
            for groups, per_node in np.unique(kinds[:, here], axis=1).T.tolist():
                chosen = np.flatnonzero(here & (at_once == groups) & (placed.per_node == per_node))
                each = self._times_of(operation, level, groups, per_node).seconds(
                    placed.ranks[chosen], message_bytes[:, chosen], placed.per_node[chosen]
                )
                found[chosen] = (each if counts is None else each * counts[:, chosen]).sum(axis=0)
        return found

    def _times_of(self, operation: str, level: Level, groups: int, per_node: int) -> CollectiveTimes:
        key = operation, level.name, groups, per_node
        if key not in self._phi:
            work = Collective(operation=operation, message_bytes=1, ranks=2)
            self._phi[key] = self._communication.contention.of_groups(work, level, groups, per_node).factor
        phi = self._phi[key]
        if (operation, level.name, phi) not in self._times:
            self._times[operation, level.name, phi] = self._communication.times(operation, level, phi)
        return self._times[operation, level.name, phi]
