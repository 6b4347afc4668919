"""Seconds of collectives among groups of ranks, by where they stand: of many sizes at once, from the profile's fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from calibrate.communication_time import Piece
from paradl_bench.spec.plan import Collective
from paradl_bench.spec.strategy import AxisKind, Strategy
from predict.communication_costs import CommunicationCosts
from predict.communication_tables import evaluate
from predict.costs import Floats


class Group(NamedTuple):
    """Ranks that communicate.

    Attributes:
        ranks: how many. span: from the first to the last, side by side. stride: from one to the next.
        others: groups of the same kind within the span that communicate at once; stages of a pipeline do not.
    """

    ranks: int
    span: int
    stride: int
    others: int


def group_along(strategy: Strategy, *kinds: AxisKind) -> Group:
    """The ranks along the axes of these kinds; one rank where there are none."""
    chosen = [index for index, axis in enumerate(strategy.axes) if axis.kind in kinds]
    if not chosen:
        return Group(1, 1, 1, 1)
    span = stride = ranks = others = 1
    for index, axis in enumerate(strategy.axes):
        span *= axis.degree if index >= chosen[0] else 1
        stride *= axis.degree if index > chosen[-1] else 1
        ranks *= axis.degree if index in chosen else 1
        others *= axis.degree if index >= chosen[0] and index not in chosen and axis.kind != "pipeline" else 1
    return Group(ranks, span, stride, others)


class GroupCosts:
    """Collectives of groups, unhindered by compute."""

    def __init__(self, communication: CommunicationCosts) -> None:
        self._communication = communication
        self._pieces: dict[tuple[str, str, int], tuple[Piece, ...]] = {}

    def seconds(self, operation: str, group: Group, message_bytes: Floats) -> Floats:
        """Of each message, by itself; of the shape of ``message_bytes``.

        Raises:
            UserError: the profile holds no fit of the operation, or the cluster given holds fewer ranks.
        """
        if group.ranks <= 1 or not message_bytes.size:
            return np.zeros(message_bytes.shape)
        ranks = 2 if operation == "send_recv" else group.ranks
        per_node = max(1, min(ranks, self._communication.cluster.ranks_per_node // group.stride))
        flat = message_bytes.reshape(1, -1)
        every = np.ones(flat.shape[1], np.int64)
        return evaluate(self._pieces_of(operation, group), ranks * every, flat, per_node * every).reshape(
            message_bytes.shape
        )

    def _pieces_of(self, operation: str, group: Group) -> tuple[Piece, ...]:
        levels = self._communication.cluster.levels
        level = self._communication.level_of_span(group.span)
        unit = levels[max(levels.index(level) - 1, 0)].ranks
        crossing = group.span >= unit
        at_once = min(unit, group.others) if crossing else -(-unit * group.others // group.span)
        key = operation, level.name, at_once
        if key not in self._pieces:
            work = Collective(operation=operation, message_bytes=1, ranks=2)
            phi = self._communication.contention.of_groups(work, level, at_once).factor
            self._pieces[key] = self._communication.pieces(operation, level, phi)
        return self._pieces[key]
