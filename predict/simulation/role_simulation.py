"""Roles coalesced once, to be simulated under many costs of their works: each alone, or all of them as they meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paradl_bench.plan.tasks import Plan, Role, Sort, Stream
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats
from predict.simulation.phases import PhasedTasks, timing_in_turn
from predict.simulation.role_meetings import meetings
from predict.simulation.role_straggler import RoleStraggler
from predict.simulation.simulator import (
    SegmentSums,
    Timeline,
    coalesce,
    iteration_seconds,
    merge_graphs,
    simulate,
    task_graph,
)
from predict.workload import Timing


class RoleSimulation:
    """A role alone."""

    def __init__(self, priced: PricedPlan, role: Role, late: RoleStraggler, *, across_phases: bool) -> None:
        # Roles of a plan are its own, so that which object it is says which role it is.
        self.found_by = across_phases, tuple(sorted(priced.blocking))
        self._coalesced = priced.plan.found.once(
            ("coalesced", id(role), *self.found_by),
            lambda: coalesce(role, across_phases=across_phases, blocking=priced.blocking_tasks(role)),
        )
        self.graph, self.segment = self._coalesced.graph, self._coalesced.segment
        self._sums = priced.plan.found.once(("sums", id(role), *self.found_by), lambda: self._sums_of(priced, role))
        self._late = late
        self._work = role.work
        self._computes = role.stream == Stream.COMPUTE
        self._segment_work = role.work[self._coalesced.first]
        names = [work.name_in_breakdowns for work in priced.plan.works]
        self._phased = PhasedTasks(
            phase=self._coalesced.phase,
            computes=self._computes[self._coalesced.first],
            names=tuple(map(names.__getitem__, self._segment_work.tolist())),
        )

    def _sums_of(self, priced: PricedPlan, role: Role) -> SegmentSums:
        # Being late changes what computes and what copies.
        free = (role.stream == Stream.COMMUNICATION) & ~priced.plan.of_sort(Sort.COPY)[role.work]
        return SegmentSums(self.segment, role.work, free)

    def straggler(self, seconds: Floats) -> float:
        """How much longer the last rank computes than one in the middle, over the whole iteration."""
        alone = seconds[self._work]
        computes = self._computes
        whole = float(alone[computes].sum())
        return float(self._late.of_tasks(alone)[computes].sum()) / whole if whole else 1.0

    def run(self, *costs: Floats) -> Timeline:
        """The timeline of the segments under costs per work: seconds, slow-downs of compute and communication."""
        return simulate(self.graph, *self.of_segments(*costs))

    def of_segments(
        self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats
    ) -> tuple[Floats, ...]:
        """Costs per segment from those per work, of one row or of several."""
        return (
            self._sums.seconds(seconds, self._late.of_tasks),
            compute_slowdown.take(self._segment_work, axis=-1),
            communication_slowdown.take(self._segment_work, axis=-1),
        )

    def iteration_s(self, *costs: Floats) -> Floats:
        """When the last segment ends, under each row of costs per work."""
        return iteration_seconds(self.graph, *self.of_segments(*costs))

    def timing(self, *costs: Floats) -> Timing:
        """The phases of an iteration."""
        return self.timing_of(self.run(*costs))

    def timing_of(self, line: Timeline) -> Timing:
        """Likewise, of a timeline of the segments."""
        return timing_in_turn(line, self._phased)


class MeetingRoles:
    """All roles of a plan, each of which waits for the others where they meet."""

    def __init__(self, plan: Plan, roles: Sequence[RoleSimulation]) -> None:
        self._roles = roles
        graphs = [role.graph for role in roles]
        self._graph = plan.found.once(
            ("merged", *roles[0].found_by),
            lambda: merge_graphs(graphs, list(meetings(plan, graphs, [role.segment for role in roles]))),
        )
        self._borders = np.cumsum([graph.tasks for graph in graphs])[:-1]

    def run(self, *costs: Floats) -> Timeline:
        """The timeline of all segments under costs per work: seconds, slow-downs of compute and communication."""
        return simulate(self._graph, *self._of_segments(*costs))

    def iteration_s(self, *costs: Floats) -> Floats:
        """When the last segment of all ends, under each row of costs per work."""
        return iteration_seconds(self._graph, *self._of_segments(*costs))

    def _of_segments(self, *costs: Floats) -> Iterator[Floats]:
        of_roles = zip(*(role.of_segments(*costs) for role in self._roles), strict=True)
        return (np.concatenate(of_role, axis=-1) for of_role in of_roles)

    def timing(self, *costs: Floats) -> Timing:
        """Phases of the role that ends last."""
        line = self.run(*costs)
        ends = np.split(line.end_s, self._borders)
        last = max(range(len(ends)), key=lambda index: float(ends[index].max(initial=0.0)))
        start_s = np.split(line.start_s, self._borders)[last]
        return self._roles[last].timing_of(line._replace(start_s=start_s, end_s=ends[last]))


def meeting_roles(priced: PricedPlan, seconds: Sequence[Floats]) -> list[tuple[Floats, Floats]]:
    """Per role, when each of its tasks starts and ends, of so many seconds each, where roles wait for each other."""
    plan, costs = priced.plan, priced.costs
    graphs = [task_graph(role, blocking=priced.blocking_tasks(role)) for role in plan.roles]
    works = np.concatenate([role.work for role in plan.roles])
    line = simulate(
        merge_graphs(
            graphs, list(meetings(plan, graphs, [np.arange(role.tasks, dtype=np.int32) for role in plan.roles]))
        ),
        np.concatenate(seconds),
        costs.compute_slowdown[works],
        costs.communication_slowdown[works],
    )
    borders = np.cumsum([role.tasks for role in plan.roles])[:-1]
    return list(zip(np.split(line.start_s, borders), np.split(line.end_s, borders), strict=True))


def role_alone(priced: PricedPlan, role: Role, seconds: Floats) -> tuple[Floats, Floats]:
    """When each task of a role starts and ends, of so many seconds each, that waits for no other role."""
    costs = priced.costs
    line = simulate(
        task_graph(role, blocking=priced.blocking_tasks(role)),
        seconds,
        costs.compute_slowdown[role.work],
        costs.communication_slowdown[role.work],
    )
    return line.start_s, line.end_s
