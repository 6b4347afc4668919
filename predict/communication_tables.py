"""Seconds of collectives for many numbers of ranks and bytes at once, from the very fits that price one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.communication_time import Piece, piecewise_seconds
from paradl_bench.spec.cluster import Level
from paradl_bench.spec.plan import Collective
from predict.communication_costs import CommunicationCosts
from predict.costs import Floats, Ints


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

    Level, contention and pieces of the fit are looked up once for all points that share them.
    """

    def __init__(self, communication: CommunicationCosts) -> None:
        self._communication = communication
        self._levels = communication.cluster.levels
        self._pieces: dict[tuple[str, str, float], tuple[Piece, ...]] = {}
        self._phi: dict[tuple[str, str, int], float] = {}

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
            for groups in np.unique(at_once[index == at]).tolist():
                chosen = np.flatnonzero((index == at) & (at_once == groups) & (placed.ranks > 1))
                if not len(chosen):
                    continue
                each = evaluate(
                    self._pieces_of(operation, level, groups),
                    placed.ranks[chosen],
                    message_bytes[:, chosen],
                    placed.per_node[chosen],
                )
                found[chosen] = (each if counts is None else each * counts[:, chosen]).sum(axis=0)
        return found

    def _pieces_of(self, operation: str, level: Level, groups: int) -> tuple[Piece, ...]:
        key = operation, level.name, groups
        if key not in self._phi:
            work = Collective(operation=operation, message_bytes=1, ranks=2)
            self._phi[key] = self._communication.contention.of_groups(work, level, groups).factor
        phi = self._phi[key]
        if (operation, level.name, phi) not in self._pieces:
            self._pieces[operation, level.name, phi] = self._communication.pieces(operation, level, phi)
        return self._pieces[operation, level.name, phi]


def evaluate(pieces: Sequence[Piece], ranks: Ints, message_bytes: Floats, per_node: Ints) -> Floats:
    """As :func:`calibrate.communication_time.piecewise_seconds`, each message by those pieces alone that it needs.

    Args:
        message_bytes: of shape (messages, points); ranks, per_node: of shape (points,).
    """
    if len(pieces) == 1 or any(piece.at_ranks for piece in pieces):
        return piecewise_seconds(pieces, ranks, message_bytes, per_node)
    p, m, g = np.broadcast_arrays(ranks, message_bytes, per_node)
    # Up to the end of the first piece, from there to the start of the second, up to its end, ...
    edges = [edge for low, high in itertools.pairwise(pieces) for edge in (low.high_bytes, high.low_bytes)]
    regime = np.searchsorted(edges, m / pieces[0].parts(p))
    found = np.empty(m.shape)
    for at in np.unique(regime).tolist():
        own = regime == at
        found[own] = piecewise_seconds(pieces[at // 2 : at // 2 + 1 + at % 2], p[own], m[own], g[own])
    return found
