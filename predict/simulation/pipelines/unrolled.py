"""All micro-batches of a stage from the few that stand for them (:class:`~paradl_bench.plan.tasks.Brief`).

Each action of the whole stage has the nodes of the one that it is like. What these wait for is in an action as far in
front of theirs, or in the forward of their micro-batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.tasks import Brief
from paradl_bench.strategies.pipeline.repetition import rows_of
from predict.simulation.pipelines.alike_segments import Places

_NEAR = 2
"""Actions that lie so near are found by their distance; so is a forward that does."""
_Numbers = NDArray[np.integer]


class Unrolled:
    """Numbers of nodes, of all micro-batches.

    Args:
        action: per node of the few micro-batches, the number of the action that it begins in, ascending.
        kinds: per node, a number for what it does.
    """

    def __init__(self, brief: Brief, action: Places, kinds: Places) -> None:
        self._brief, self._action, self._kinds = brief, action, kinds
        count = np.bincount(action, minlength=len(brief.forward_here))
        of_whole = count[brief.like]
        self._start, self._start_here = np.cumsum(of_whole) - of_whole, np.cumsum(count) - count
        self.like: Places = rows_of(count.tolist(), brief.like).items
        """Per node, the one of the few that it is like."""

    def places(self, nodes: _Numbers) -> Places:
        """What some of the few nodes, in order, are in all micro-batches."""
        action, here = self._repeated(nodes)
        return self._place(action, nodes[here])

    def pairs(self, source: _Numbers, target: _Numbers) -> tuple[Places, Places] | None:
        """What pairs of the few nodes are, each target waiting for its source.

        None where what a node waits for is not found where it has to be.
        """
        brief, behind = self._brief, self._action[target] - self._action[source]
        # A node of the forward may begin in an action before it.
        before = brief.forward_here[self._action[target]] - self._action[source]
        is_forward = (before >= 0) & (before <= _NEAR) & (behind > _NEAR)
        # All that is done is told to what follows the last action, from the end.
        at_end = self._action[target] == len(brief.forward_here) - 1
        if not np.all(is_forward | (behind <= _NEAR) | at_end):
            return None
        action, here = self._repeated(target)
        waited_for = np.where(is_forward[here], brief.forward[action] - before[here], action - behind[here])
        sources = source[here]
        places = self._place(np.maximum(waited_for, 0), sources)
        inside = (waited_for >= 0) & (places < len(self.like))
        if not inside.all() or np.any(self._kinds[self.like[places]] != self._kinds[sources]):
            return None
        return places, self._place(action, target[here])

    def _repeated(self, nodes: _Numbers) -> tuple[Places, Places]:
        """Of all micro-batches: the action of each of these nodes, and its place among them."""
        order = np.argsort(self._action[nodes], kind="stable")
        count = np.bincount(self._action[nodes], minlength=len(self._brief.forward_here))
        rows = rows_of(count.tolist(), self._brief.like)
        return rows.action, order[rows.items]

    def _place(self, action: Places, here: _Numbers) -> Places:
        return np.asarray(self._start[action] + here - self._start_here[self._action[here]])
