"""How many groups communicate over one level at once, and what that does to beta (contention phi).

Groups at once are those that share links: inside a node all groups of the node; above, all that reach out of one unit
of the level inside it. Stages of a pipeline take turns, so groups that differ by their stage are not counted as at
once; nor are those that only share links farther out, where a full bisection is assumed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from calibrate.profile.collectives.contexts import contention_of
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


class ContentionCosts:
    """phi from a cluster that a person gave, else from the profile, else 1 with a remark."""

    def __init__(self, contexts: ContextCosts, cluster: Cluster, *, given: bool) -> None:
        self._contexts = contexts
        self._cluster = cluster
        self._given = given
        self._groups: dict[tuple[object, ...], int] = {}

    def sharing(self, work: Collective, level: Level, strategy: Strategy, taking_part: float = 1.0) -> Sharing:
        """phi of a collective that such a share of the ranks calls: of several leaders a node, they alone do."""
        groups = max(1.0, self.groups_at_once(work, level, strategy) * taking_part)
        return self.of_groups(work, level, groups)

    def of_groups(self, work: Collective, level: Level, groups: float) -> Sharing:
        """phi of a collective that so many groups run at once over the links of one unit of the cluster."""
        if level.contention is not None and (self._given or level.contention > 1):
            return Sharing(level.contention, 0.0, ())
        if groups <= 1:
            return ALONE
        count = f"{round(groups)} groups"
        entry, remarks = self._contexts.likest(Wanted("groups", work.operation, level.name))
        if entry is None:
            measure = f"{measure_with(f'groups={math.ceil(groups)}')} --ranks {work.ranks}"
            text = (
                f"{count} at once over level {level.name!r}: contention was not measured and is taken as 1: {measure}"
            )
            return Sharing(1.0, 0.0, (Remark(text, True),))
        entries = self._contexts.of_other_groups(entry)
        most = max(other.groups for other in entries)
        if groups > most:
            remarks += (Remark(f"contention of {count}, beyond the {most} that were measured at once", True),)
        return Sharing(*contention_of(entries, groups), remarks)

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
