"""Seconds of collectives among groups of ranks, by where they stand: of many sizes at once, from the profile's fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paradl_bench.core.cache_keys import Answers
from paradl_bench.plan.tasks import Collective
from predict.costs.communication.collective_times import CollectiveTimes
from predict.costs.communication.communication_costs import CommunicationCosts
from predict.costs.sourced import Floats, Ints

_BY_THEMSELVES = 64
"""Messages at most that are priced one by one: arrays take longer for few."""


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


class GroupCosts:
    """Collectives of groups, unhindered by compute.

    A *link* is what decides the seconds of a group's collective of so many bytes: its fit at a level, how many ranks
    take part, and how many of them share a node.

    Attributes:
        found: sums of messages over links.
    """

    def __init__(self, communication: CommunicationCosts) -> None:
        self._communication = communication
        self.found = Answers()
        self._fits: dict[tuple[str, str, int, int], int] = {}
        self._times: list[CollectiveTimes] = []
        # The first link is that of a rank by itself, which sends nothing.
        self._links: dict[tuple[int, int, int], int] = {(-1, 1, 1): 0}
        # Of each link its fit, its ranks and those of a node, as arrays.
        self._columns: Ints = np.zeros((3, 0), np.int64)

    def seconds(self, operation: str, group: Group, message_bytes: Floats) -> Floats:
        """Of each message, by itself; of the shape of ``message_bytes``."""
        link = self.link(operation, group)
        if not link:
            return np.zeros(message_bytes.shape)
        fit, ranks, per_node = self._of_links()[:, link].tolist()
        times = self._times[fit]
        # Blocks repeat their messages. What is known of one message by itself serves the links of any hardware.
        distinct, place = np.unique(message_bytes, return_inverse=True)
        if len(distinct) <= _BY_THEMSELVES:
            seconds = np.array([times.seconds_of_one(ranks, size, per_node) for size in distinct.tolist()])
        else:
            seconds = times.seconds(ranks, distinct[None], per_node)[0]
        return np.asarray(seconds[place].reshape(message_bytes.shape))

    def link(self, operation: str, group: Group) -> int:
        """The number of the group's link; 0 of one rank.

        Raises:
            UserError: the profile holds no fit of the operation, or the cluster given holds fewer ranks.
        """
        if group.ranks <= 1:
            return 0
        ranks = 2 if operation == "send_recv" else group.ranks
        per_node = max(1, min(ranks, self._communication.cluster.ranks_per_node // group.stride))
        return self._links.setdefault((self._fit(operation, group, per_node), ranks, per_node), len(self._links))

    def links_of_hops(self, group: Group, ranks: int) -> tuple[int, ...]:
        """Of messages from each place of a pipeline to the next, and from the last to the first; ``ranks`` in all."""
        places = [(place, (place + 1) % group.ranks) for place in range(group.ranks)]
        spans = [self._communication.span_of_hop(ranks, (group.ranks, group.stride), hop) for hop in places]
        return tuple(self.link("send_recv", group._replace(span=span)) for span in spans)

    def seconds_over(self, links: Ints, message_bytes: Floats) -> Floats:
        """Of messages that each go over a link of their own; both are broadcast against each other."""
        links, sizes = np.broadcast_arrays(links, message_bytes)
        fit, ranks, per_node = self._of_links()
        seconds = np.zeros(sizes.shape)
        for at in np.unique(fit[links]).tolist():
            of_fit = fit[links] == at
            if at >= 0:
                over = links[of_fit]
                seconds[of_fit] = self._times[at].seconds(ranks[over], sizes[of_fit].reshape(1, -1), per_node[over])[0]
        return seconds

    def _of_links(self) -> Ints:
        if self._columns.shape[1] < len(self._links):
            self._columns = np.array(list(self._links), np.int64).T
        return self._columns

    def _fit(self, operation: str, group: Group, per_node: int) -> int:
        levels = self._communication.cluster.levels
        level = self._communication.level_of_span(group.span)
        unit = levels[max(levels.index(level) - 1, 0)].ranks
        crossing = group.span >= unit
        at_once = min(unit, group.others) if crossing else -(-unit * group.others // group.span)
        key = operation, level.name, at_once, per_node
        if key not in self._fits:
            work = Collective(operation=operation, message_bytes=1, ranks=2)
            phi = self._communication.contention.of_groups(work, level, at_once, per_node).factor
            times = self._communication.times(operation, level, phi)
            # Of groups that as many others hinder as little, the fit is the same.
            if times not in self._times:
                self._times.append(times)
            self._fits[key] = self._times.index(times)
        return self._fits[key]
