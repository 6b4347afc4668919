"""When every single task of one predicted iteration runs: the simulation with nothing merged.

A *line* is what is simulated together: the stages of a pipeline that send to each other; one role where there is no
pipeline. Ranks of one role do the same at the same time, so a role's times are those of each of its ranks, with the
lag of the slowest (:mod:`predict.evaluators.simulate`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paradl_bench.spec.plan import Phase, Plan, Role, Stream
from paradl_bench.strategies.mesh import degree_of
from predict.cost_model import PricedPlan
from predict.costs import Floats
from predict.evaluators.simulate import lag_of, late_tasks
from predict.pipeline_simulation import PipelineSimulation, ends_of_transfers, lines_of_stages
from predict.simulator import simulate, task_graph
from predict.timeline_actions import PlacedActions, place_actions
from predict.timeline_use import StreamTimes, Use, use_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTimeline:
    """What a role does when.

    Attributes:
        role: index in the plan.
        start_s, end_s: per task, seconds from the start of the iteration.
        actions: which forward or backward of a micro-batch each task belongs to; None without a pipeline.
    """

    plan: Plan
    role: int
    start_s: Floats
    end_s: Floats
    actions: PlacedActions | None = None

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
        return StreamTimes(self.start_s[chosen], self.end_s[chosen])

    def use(self, iteration_s: float) -> Use:
        """How the role's streams are used in an iteration of this length."""
        return use_of(self.on(Stream.COMPUTE), self.on(Stream.COMMUNICATION), iteration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTimeline:
    """Roles that are simulated together.

    Attributes:
        messages: of a pipeline, (stage, task) that sends and (stage, task) that receives; stages count along ``roles``.
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
        """Those of all lines, in the plan's order."""
        return tuple(sorted((role for line in self.lines for role in line.roles), key=lambda role: role.role))

    @property
    def iteration_s(self) -> float:
        """When the last role ends."""
        return max(role.finish_s for role in self.roles)

    @property
    def is_pipeline(self) -> bool:
        """Whether stages take turns."""
        return degree_of(self.plan.strategy, "pipeline") > 1


def timeline_of(priced: PricedPlan, schedule: str) -> IterationTimeline:
    """Simulate a priced plan, every task by itself.

    Args:
        schedule: of a pipeline, the one that it was planned with.
    """
    plan, costs = priced.plan, priced.costs
    of_works = costs.seconds, costs.compute_slowdown, costs.communication_slowdown
    if degree_of(plan.strategy, "pipeline") > 1:
        found = PipelineSimulation(plan, lag_of(priced), merge=False).timelines(*of_works)
        lines = [
            _line_of_stages(plan, roles, line.start_s, line.end_s, schedule)
            for roles, line in zip(lines_of_stages(plan), found, strict=True)
        ]
        return IterationTimeline(priced=priced, lines=tuple(lines))
    alone = []
    for index, (role, seconds) in enumerate(zip(plan.roles, late_tasks(priced), strict=True)):
        line = simulate(task_graph(role), seconds, *(of_work[role.work] for of_work in of_works[1:]))
        alone.append(RoleTimeline(plan=plan, role=index, start_s=line.start_s, end_s=line.end_s))
    return IterationTimeline(priced=priced, lines=tuple(LineTimeline(roles=(role,)) for role in alone))


def _line_of_stages(plan: Plan, roles: tuple[int, ...], start_s: Floats, end_s: Floats, schedule: str) -> LineTimeline:
    borders = np.cumsum([plan.roles[index].tasks for index in roles])[:-1]
    found = tuple(
        RoleTimeline(
            plan=plan,
            role=index,
            start_s=starts,
            end_s=ends,
            actions=place_actions(plan, plan.roles[index], stage, len(roles), schedule),
        )
        for stage, (index, starts, ends) in enumerate(
            zip(roles, np.split(start_s, borders), np.split(end_s, borders), strict=True)
        )
    )
    return LineTimeline(roles=found, messages=_messages(plan, [plan.roles[index] for index in roles]))


def _messages(plan: Plan, roles: list[Role]) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """The n-th receive of a cut and a phase matches its n-th send."""
    sent: dict[tuple[str, int], list[tuple[int, int]]] = {}
    received: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for stage, role in enumerate(roles):
        for (direction, phase, cut), tasks in ends_of_transfers(plan, role).items():
            ends = sent if direction == "send" else received
            ends.setdefault((phase, cut), []).extend((stage, task) for task in tasks)
    return tuple(pair for key, tasks in received.items() for pair in zip(sent[key], tasks, strict=True))
