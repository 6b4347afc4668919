"""When every single task of one predicted iteration runs: the simulation with nothing merged.

A *line* is what is drawn together: the stages of a pipeline that send to each other; one role where there is no
pipeline. A role's times are those of each of its ranks, as the slowest takes (:mod:`predict.simulation.prepared`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.schedules.schedule import Action
from paradl_bench.plan.tasks import Ints, Phase, Plan, Role, Stream
from paradl_bench.records.slow_rank import SlowRank
from predict.costs.priced import PricedPlan, blocking_tasks
from predict.costs.sourced import Floats
from predict.simulation.exposure import StreamTimes
from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation, lines_of_stages
from predict.simulation.pipelines.stage import ends_of_transfers
from predict.simulation.role_simulation import meeting_roles, role_alone
from predict.simulation.role_straggler import straggler_of, straggler_tasks, straggler_tasks_of
from predict.simulation.simulator import BLOCKING
from predict.timeline.slow_timeline import check_drawn, collectives_of, comes_late, waiting_times
from predict.timeline.timeline_use import Use, use_of


class PlacedActions(NamedTuple):
    """Actions of a rank in order, and per task the index of its action; -1 where it belongs to none."""

    actions: tuple[Action, ...]
    of_task: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTimeline:
    """What a role does when.

    Attributes:
        start_s, end_s: per task, seconds from the start of the iteration.
        actions: which forward or backward of a micro-batch each task belongs to; None without a pipeline.
        rank: the slow one that this is of; None for all ranks of the role.
        apart: a slow rank of the role that has a timeline of its own; None without one.
        blocking: works that go on beside what is in flight.
    """

    plan: Plan
    role: int
    start_s: Floats
    end_s: Floats
    actions: PlacedActions | None = None
    rank: int | None = None
    apart: int | None = None
    blocking: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """The role's, or the slow rank's."""
        return self.of_plan.name if self.rank is None else f"{self.of_plan.name}, slow rank {self.rank}"

    @property
    def ranks(self) -> int:
        """How many ranks it is of."""
        return 1 if self.rank is not None else self.of_plan.multiplicity - (self.apart is not None)

    @property
    def of_plan(self) -> Role:
        """The plan's role."""
        return self.plan.roles[self.role]

    @property
    def finish_s(self) -> float:
        """When the last task of the role ends."""
        return float(self.end_s.max(initial=0.0))

    def on(self, stream: Stream, *phases: Phase) -> StreamTimes:
        """The tasks on a stream, of these phases alone where any are given."""
        chosen = self.of_plan.stream == stream
        if phases:
            chosen &= np.isin(self.of_plan.phase, phases)
        return StreamTimes.union(self.start_s[chosen], self.end_s[chosen])

    @property
    def threads(self) -> Ints:
        """Per task, its stream, or one more for calls that go on beside what is in flight."""
        beside = blocking_tasks(self.plan.strategy, self.of_plan.arrays.whole, self.blocking)
        return np.where(beside, np.int32(BLOCKING), self.of_plan.stream)

    def use(self, iteration_s: float) -> Use:
        """How the role's streams are used in an iteration of this length."""
        return use_of(self.on(Stream.COMPUTE), self.on(Stream.COMMUNICATION), iteration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTimeline:
    """Roles that are simulated together.

    Messages of a pipeline are (stage, task) that sends and (stage, task) that receives; stages count along ``roles``.
    """

    roles: tuple[RoleTimeline, ...]
    messages: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimeline:
    """One iteration of a plan, task by task."""

    priced: PricedPlan
    lines: tuple[LineTimeline, ...]

    @property
    def plan(self) -> Plan:
        """What runs."""
        return self.priced.plan

    @property
    def roles(self) -> tuple[RoleTimeline, ...]:
        """Those of all lines, in the plan's order; of a role the slow rank first."""
        every = (role for line in self.lines for role in line.roles)
        return tuple(sorted(every, key=lambda role: (role.role, role.rank is None)))

    @property
    def iteration_s(self) -> float:
        """When the last role ends."""
        return max(role.finish_s for role in self.roles)

    @property
    def is_pipeline(self) -> bool:
        """Whether stages take turns."""
        return degree_of(self.plan.strategy, Trait.STAGES) > 1


def timeline_of(priced: PricedPlan, schedule: str, slow: SlowRank | None = None) -> IterationTimeline:
    """Simulate a priced plan, every task by itself.

    Args:
        schedule: of a pipeline, the one that it was planned with.
        slow: a rank that computes slower, as the plan was priced with.

    Raises:
        UserError: a slow rank that not all others meet in the same collectives.
    """
    plan = priced.plan
    if not priced.slower:
        slow = None
    if slow is not None:
        check_drawn(plan, slow)
    if degree_of(plan.strategy, Trait.STAGES) > 1:
        simulation = PipelineSimulation.of_priced(priced, straggler_of(priced), merge=False)
        times = simulation.timelines(*_of_works(priced))
        lines = [
            _line_of_stages(priced, roles, line.start_s, line.end_s, schedule, slow)
            for roles, line in zip(lines_of_stages(plan), times, strict=True)
        ]
        return IterationTimeline(priced=priced, lines=tuple(lines))
    alone = list(_waiting_for_each_other(priced)) if slow is None else list(_beside_slow(priced, slow))
    return IterationTimeline(priced=priced, lines=tuple(LineTimeline(roles=(role,)) for role in alone))


def _waiting_for_each_other(priced: PricedPlan) -> Iterator[RoleTimeline]:
    """All roles at once: a collective starts when the last role of its group has come to it."""
    for index, times in enumerate(meeting_roles(priced, straggler_tasks(priced))):
        yield RoleTimeline(plan=priced.plan, role=index, start_s=times[0], end_s=times[1], blocking=priced.blocking)


def _simulated(priced: PricedPlan, index: int, seconds: Floats, rank: int | None = None) -> RoleTimeline:
    start_s, end_s = role_alone(priced, priced.plan.roles[index], seconds)
    return RoleTimeline(plan=priced.plan, role=index, start_s=start_s, end_s=end_s, rank=rank, blocking=priced.blocking)


def _beside_slow(priced: PricedPlan, slow: SlowRank) -> Iterator[RoleTimeline]:
    """The slow rank, and all others as they wait for it; roles that do not wait for it at their own pace."""
    plan, slow_role = priced.plan, slow.role_in(priced.plan)
    first = _simulated(
        priced, slow_role, straggler_tasks_of(priced, plan.roles[slow_role], priced.slower[slow_role]), slow.rank
    )
    yield first
    met = collectives_of(plan, first.of_plan)
    windows = StreamTimes(first.start_s[met], first.end_s[met])
    late = straggler_tasks(priced)
    for index, role in enumerate(plan.roles):
        if index == slow_role:
            if role.multiplicity > 1:
                yield _waiting(priced, index, windows, apart=slow.rank)
            continue
        own_pace = _simulated(priced, index, late[index])
        waits = len(collectives_of(plan, role)) == len(met) and own_pace.finish_s <= first.finish_s
        waiting = _waiting(priced, index, windows) if waits else own_pace
        # Where blocks or messages are larger than those of the slow rank it is not this role that waits.
        late_for_one = waits and comes_late(plan, role, StreamTimes(waiting.start_s, waiting.end_s))
        yield own_pace if late_for_one else waiting


def _waiting(priced: PricedPlan, index: int, windows: StreamTimes, apart: int | None = None) -> RoleTimeline:
    plan, role = priced.plan, priced.plan.roles[index]
    seconds, slowdown = (of_work[role.work] for of_work in _of_works(priced)[:2])
    times = waiting_times(plan, role, seconds, slowdown, windows)
    return RoleTimeline(
        plan=plan, role=index, start_s=times.start_s, end_s=times.end_s, apart=apart, blocking=priced.blocking
    )


def _of_works(priced: PricedPlan) -> tuple[Floats, Floats, Floats]:
    """Seconds, and slow-downs of compute and communication, per work."""
    costs = priced.costs
    return costs.seconds, costs.compute_slowdown, costs.communication_slowdown


def _line_of_stages(
    priced: PricedPlan, roles: tuple[int, ...], start_s: Floats, end_s: Floats, schedule: str, slow: SlowRank | None
) -> LineTimeline:
    plan = priced.plan
    of_slow = None if slow is None else slow.role_in(plan)
    borders = np.cumsum([plan.roles[index].tasks for index in roles])[:-1]
    stages = tuple(
        RoleTimeline(
            plan=plan,
            role=index,
            start_s=starts,
            end_s=ends,
            actions=place_actions(plan, plan.roles[index], stage, len(roles), schedule),
            rank=slow.rank if slow is not None and index == of_slow else None,
            blocking=priced.blocking,
        )
        for stage, (index, starts, ends) in enumerate(
            zip(roles, np.split(start_s, borders), np.split(end_s, borders), strict=True)
        )
    )
    return LineTimeline(roles=stages, messages=_messages(plan, [plan.roles[index] for index in roles]))


def place_actions(plan: Plan, role: Role, rank: int, ranks: int, schedule: str) -> PlacedActions:
    """The actions of a rank of a pipeline, on the tasks of its role.

    Args:
        rank, ranks: place along the pipeline's axis, and how many there are.

    Raises:
        ValueError: the tasks are not those of the schedule.
    """
    actions = schedule_of(schedule).order(rank, ranks, plan.micro_batches)
    if role.action is None:
        raise ValueError(f"role {role.name!r}: its tasks belong to no schedule")
    # The exchange of gradients runs beside actions and after them.
    of_task = np.where((role.phase == Phase.FW) | (role.phase == Phase.BW), role.action, np.int32(-1))
    actions_done, first = np.unique(of_task[of_task >= 0], return_index=True)
    phases = role.phase[of_task >= 0][first]
    if len(actions_done) != len(actions) or phases.tolist() != [Phase[action.way] for action in actions]:
        raise ValueError(f"role {role.name!r}: its tasks are not those of schedule {schedule!r}")
    return PlacedActions(actions, of_task)


def _messages(plan: Plan, roles: list[Role]) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """The n-th receive of a cut and a phase matches its n-th send."""
    sent: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    received: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for stage, role in enumerate(roles):
        for (direction, *where), tasks in ends_of_transfers(plan, role).items():
            ends = sent if direction == "send" else received
            ends.setdefault(tuple(where), []).extend((stage, task) for task in tasks)
    return tuple(pair for key, tasks in received.items() for pair in zip(sent[key], tasks, strict=True))
