"""How many groups communicate over one level at once, and what that does to beta (contention phi).

Groups at once are those that share links: inside a node all groups of the node; above, all that reach out of one unit
of the level inside it. Stages of a pipeline take turns, so groups that differ by their stage are not counted as at
once; nor are those that only share links farther out, where a full bisection is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.contexts import contention_of
from paradl_bench.core.units import counted
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import group_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import Cluster, Level
from predict.costs.communication.context_costs import ContextCosts, Wanted, measure_with
from predict.costs.sourced import Remark


class Sharing(NamedTuple):
    """phi of a collective, its standard deviation, and what to say of it."""

    factor: float
    factor_sd: float
    remarks: tuple[Remark, ...]


ALONE = Sharing(1.0, 0.0, ())

_THROUGH_NEIGHBOURS = ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter")
"""Collectives that pass from rank to rank. One link of all of a node's carries each of the parts between two nodes."""
_ASSUMED_SD = 0.10
"""Of an assumed phi, relative. It lies so far from those measured, on nodes of 8 H100 and of 4 A100 of public tables,
and on emulated nodes (``benchmarks/published/groups_at_once.py``)."""


class ContentionCosts:
    """phi from a cluster that a person gave, else from the profile, else assumed, with a remark.

    Sweeps between nodes use whole nodes, and so all links of a node. A group of fewer ranks a node has its ranks' share
    of these: phi is assumed to be the inverse of that. It is 1 inside of a node, for what each rank sends to others
    directly, and on links that a person states. A sweep of no more ranks than a node holds had as many on each of two.

    Args:
        cluster: that is predicted. given: by a person.
        fits: of the library; their ranks are those that were swept.
        swept: the cluster that sweeps ran on. Nodes of one that is given may hold more ranks or fewer.
    """

    def __init__(
        self,
        contexts: ContextCosts,
        cluster: Cluster,
        fits: Iterable[CommunicationFit],
        *,
        given: bool,
        swept: Cluster,
    ) -> None:
        self._contexts = contexts
        self._most_per_node = swept.ranks_per_node
        self._swept: dict[tuple[str, str], int] = {}
        for fit in fits:
            key = fit.operation, fit.level
            self._swept[key] = max(fit.ranks_range[1], self._swept.get(key, 0))
        self._cluster = cluster
        self._given = given
        self._groups: dict[tuple[object, ...], int] = {}

    def sharing(
        self, work: Collective, level: Level, strategy: Strategy, per_node: int, taking_part: float = 1.0
    ) -> Sharing:
        """phi of a collective that such a share of the ranks calls: of several leaders a node, they alone do."""
        groups = max(1.0, self.groups_at_once(work, level, strategy) * taking_part)
        return self.of_groups(work, level, groups, per_node)

    def of_groups(self, work: Collective, level: Level, groups: float, per_node: int) -> Sharing:
        """phi of a collective that so many groups run at once over the links of one unit of the cluster.

        Args:
            per_node: ranks of a group that share a node.
        """
        if level.contention is not None and (self._given or level.contention > 1):
            return Sharing(level.contention, 0.0, ())
        entry, remarks = self._contexts.likest(Wanted("groups", work.operation, level.name))
        if entry is None:
            return self._assumed(work, level, groups, per_node)
        if groups <= 1:
            return ALONE
        count = f"{round(groups)} groups"
        entries = self._contexts.of_other_groups(entry)
        most = max(other.groups for other in entries)
        if groups > most:
            remarks += (Remark(f"contention of {count}, beyond the {most} that were measured at once", True),)
        return Sharing(*contention_of(entries, groups), remarks)

    def _assumed(self, work: Collective, level: Level, groups: float, per_node: int) -> Sharing:
        stated = level.alpha_s is not None and level.beta_s_per_byte is not None
        between_nodes = level.name != self._cluster.levels[0].name
        shares = between_nodes and not stated and work.operation in _THROUGH_NEIGHBOURS
        swept = self._swept_per_node(work, level)
        factor = max(1.0, swept / per_node) if shares else 1.0
        if max(groups, factor) <= 1:
            return ALONE
        measure = f"{measure_with(f'groups={math.ceil(max(groups, factor))}')} --ranks {work.ranks}"
        taken = f"contention was not measured and is taken as {factor:.3g}: {measure}"
        at_once = f"{round(groups)} groups at once"
        if factor > groups:
            # One by itself, or fewer than the ranks of a node that was swept.
            at_once = f"{counted(per_node, 'rank')} a node in a group, where sweeps had {swept},"
        text = f"{at_once} over level {level.name!r}: {taken}"
        return Sharing(factor, _ASSUMED_SD * factor if factor > 1 else 0.0, (Remark(text, True),))

    def _swept_per_node(self, work: Collective, level: Level) -> int:
        every = max(self._swept.values(), default=0)
        ranks = self._swept.get((work.operation, level.name), every)
        return max(1, min(self._most_per_node, ranks // 2))

    def groups_at_once(self, work: Collective, level: Level, strategy: Strategy) -> int:
        """Groups of ranks that run such a collective at once over the links of one unit of the cluster."""
        key = work.axes, work.scope, work.per_node, level.name, strategy
        if key not in self._groups:
            self._groups[key] = self._count(work, level, strategy)
        return self._groups[key]

    def _count(self, work: Collective, level: Level, strategy: Strategy) -> int:
        names = [known.name for known in self._cluster.levels]
        index = names.index(level.name)
        unit = self._cluster.levels[max(index - 1, 0)].ranks
        along = set(work.axes)
        apart = [i for i, axis in enumerate(strategy.axes) if i not in along and not axis.has(Trait.STAGES)]
        groups: set[tuple[int, ...]] = set()
        for rank in range(min(unit, strategy.ranks)):
            place = strategy.coordinates(rank)
            group = tuple(place[i] for i in apart)
            if work.scope == "between nodes":
                # Ranks at unlike places of a node are in groups of their own.
                group += (group_of(strategy, work.axes, rank).index(rank) % work.per_node,)
            groups.add(group)
        return len(groups)
