"""Simulation of a pipeline: all of its roles together, since a stage waits for what its neighbours send.

A receive ends when the matching send does; a send takes the time of its messages (alpha + m beta each) on the sender's
communication stream, beside compute. ``overlapped=False`` lets nothing be computed while a transfer is under way, as
ParaDL's closed form assumes; with equal stages both then agree.

Replicas of a stage are one role. Where an axis shares layers, ranks at one position along it form a line of roles from
the first stage to the last, which receive from and send to each other alone; lines are simulated each by itself, the
slowest is the answer.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import Answers
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import group_axes
from paradl_bench.plan.tasks import Collective, Ints, Plan, Role, Sort, Stream, Transfer
from predict.costs.priced import PricedPlan, blocking_tasks
from predict.costs.sourced import Floats
from predict.simulation.phases import PhasedTasks, timing_of_stages
from predict.simulation.pipelines.alike_segments import AlikeSegments, Places, alike_segments, joined
from predict.simulation.pipelines.windows import Windows
from predict.simulation.simulator import (
    LANES,
    Condensed,
    Timeline,
    coalesce,
    iteration_seconds,
    merge_graphs,
    simulate,
    sums_within,
)
from predict.workload import Timing


def lines_of_stages(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Indices of the roles from the first stage to the last, for each distinct position along the other axes."""
    axes = [axis for axis in plan.strategy.axes if not axis.has(Trait.DIVIDES_BATCH)]
    along = next(index for index, axis in enumerate(axes) if axis.has(Trait.STAGES))
    places = np.array(plan.positions).reshape([axis.degree for axis in axes])
    lines = np.moveaxis(places, along, -1).reshape(-1, axes[along].degree)
    return tuple(dict.fromkeys(tuple(line) for line in lines.tolist()))


class PipelineSimulation:
    """A pipeline's plan, coalesced and joined once, to be run under many costs of its works.

    Args:
        straggler: per work, how much longer the slowest rank takes. overlapped: false lets a rank compute nothing
            while it sends. merge: false keeps every task a segment of its own.
        slower: per role, how many times longer its rank computes, and, with ``slow_copies``, copies; empty for all
            alike.
        blocking: works that go on beside what is in flight.
    """

    def __init__(
        self,
        plan: Plan,
        straggler: Floats,
        *,
        overlapped: bool = True,
        merge: bool = True,
        slower: Sequence[float] = (),
        slow_copies: bool = True,
        blocking: frozenset[int] = frozenset(),
    ) -> None:
        # What ranks of a host take from each other, the straggler factor and the answer are all simulated of one plan,
        # and so are other links and devices.
        def find() -> tuple[StageLine, ...]:
            return _lines(plan, overlapped=overlapped, merge=merge, blocking=blocking)

        lines = plan.found.once(("lines", overlapped, merge, blocking), find)
        self.lines = [line.with_straggler(straggler) for line in lines]
        for of_line, line in zip(self.lines, lines_of_stages(plan), strict=True):
            if slower:
                of_line.stretch_stages([slower[index] for index in line], copies=slow_copies)

    @classmethod
    def of_priced(cls, priced: PricedPlan, straggler: Floats, *, merge: bool = True) -> PipelineSimulation:
        """Of a priced plan, with its slow ranks and its calls that go on beside the exchange."""
        return cls(
            priced.plan,
            straggler,
            merge=merge,
            slower=priced.slower,
            slow_copies=priced.slow_copies,
            blocking=priced.blocking,
        )

    def timing(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timing:
        """Phases of the rank that ends last: forward, backward and exchange as it was busy with them, then idle time.

        Communication for layers is a part of forward and backward, as in a run.
        """
        timings = [line.timing(seconds, compute_slowdown, communication_slowdown) for line in self.lines]
        return max(timings, key=lambda timing: timing.iteration_s)

    def iteration_s(self, *costs: Floats) -> Floats:
        """When the last role ends, under each row of costs per work."""
        return np.asarray(np.max([line.iteration_s(*costs) for line in self.lines], axis=0))

    def timelines(self, *costs: Floats) -> list[Timeline]:
        """Those of each of :func:`lines_of_stages`: segments (tasks, unless merged) role after role."""
        return [line.run(*costs) for line in self.lines]


class Computing(NamedTuple):
    """When the ranks of a line compute: segments, from the start of the iteration; arrays of one length.

    Attributes:
        stage: along the line. start_s, end_s: of the segment.
        task_work, task_segment: of every task that computes, its work and the index of the segment that it lies in.
    """

    stage: NDArray[np.integer]
    start_s: Floats
    end_s: Floats
    task_work: Places
    task_segment: NDArray[np.integer]


def _lines(plan: Plan, *, overlapped: bool, merge: bool, blocking: frozenset[int]) -> tuple[StageLine, ...]:
    """The lines of a plan, without straggler factor."""
    alike, transfers = Answers(), _Transfers(plan)

    def find(role: Role) -> _Stage:
        beside = blocking_tasks(plan, role, blocking) if blocking else None
        return _stage(role, transfers, beside, overlapped=overlapped, merge=merge)

    def stage(role: Role) -> _Stage:
        return alike.once(role.arrays, lambda: find(role))

    return tuple(StageLine(plan, [stage(plan.roles[index]) for index in line]) for line in lines_of_stages(plan))


class _Stage(NamedTuple):
    """A role's tasks joined, which do not depend on the line that it stands in."""

    role: Role
    ends: dict[TransferEnd, list[int]]
    condensed: Condensed
    alike: AlikeSegments


def _stage(
    role: Role, transfers: _Transfers, beside: NDArray[np.bool_] | None, *, overlapped: bool, merge: bool
) -> _Stage:
    role = role if overlapped else transfers.with_blocking_sends(role)
    ends = transfers.ends(role)
    condensed = coalesce(
        role,
        merge=merge,
        waiting=_chosen(ends, "receive"),
        waited_for=_chosen(ends, "send"),
        blocking=beside,
    )
    return _Stage(role, ends, condensed, alike_segments(condensed.segment, role.work))


class LineTasks:
    """The single tasks of a line, role after role: millions, while most predictions ask for segments alone."""

    def __init__(self, plan: Plan, roles: Sequence[Role], coalesced: Sequence[Condensed]) -> None:
        # The plan keeps its lines: one that held the plan would keep both from being freed at once.
        self._roles, self._copies = roles, plan.of_sort(Sort.COPY)
        self._segments = [(of_role.segment, of_role.graph.tasks) for of_role in coalesced]

    @cached_property
    def work(self) -> Places:
        """The work of each."""
        return _as_places(np.concatenate([role.work for role in self._roles]))

    @cached_property
    def stage(self) -> Ints:
        """The place along the line of each."""
        return np.repeat(np.arange(len(self._roles), dtype=np.int32), [role.tasks for role in self._roles])

    @cached_property
    def computes(self) -> NDArray[np.bool_]:
        """Whether each lies on the compute stream."""
        return np.asarray(np.concatenate([role.stream for role in self._roles]) == Stream.COMPUTE)

    @cached_property
    def copies(self) -> NDArray[np.bool_]:
        """Whether each is a copy."""
        return np.asarray(self._copies[self.work])

    @cached_property
    def segment(self) -> Places:
        """The segment that holds each."""
        starts = np.cumsum([0, *(count for _, count in self._segments)])
        own = (segment + start for (segment, _), start in zip(self._segments, starts, strict=False))
        return _as_places(np.concatenate(list(own)))


class StageLine:
    """Roles that send to each other, from the first stage to the last."""

    def __init__(self, plan: Plan, stages: Sequence[_Stage]) -> None:
        roles, coalesced = [stage.role for stage in stages], [stage.condensed for stage in stages]
        segments = [{end: stage.condensed.segment[tasks] for end, tasks in stage.ends.items()} for stage in stages]
        meetings = _meetings(plan, roles, [of_role.segment for of_role in coalesced])
        self._graph = merge_graphs([of_role.graph for of_role in coalesced], [*_matches(segments), *meetings])
        self.tasks = LineTasks(plan, roles, coalesced)
        self._straggler = np.ones(len(plan.works))
        # Per task, how many times longer its stage takes; None where all stages are alike.
        self._longer: Floats | None = None
        self._alike = joined([stage.alike for stage in stages])
        self._windows = Windows(self._graph, self._alike.of_segments)
        first = [of_role.first for of_role in coalesced]
        self._segment_work = _as_places(
            np.concatenate([role.work[tasks] for role, tasks in zip(roles, first, strict=True)])
        )
        self._slowdowns = [(np.zeros(0), np.zeros(0))] * 2
        self._role = np.repeat(np.arange(len(roles)), [len(tasks) for tasks in first])
        self._on_compute = self._graph.lane % LANES == Stream.COMPUTE
        names = [work.name_in_breakdowns for work in plan.works]
        self._phased = PhasedTasks(
            phase=np.concatenate([of_role.phase for of_role in coalesced]),
            computes=self._on_compute,
            names=tuple(map(names.__getitem__, self._segment_work.tolist())),
            stage=self._role,
        )

    def with_straggler(self, straggler: Floats) -> StageLine:
        """The same line, whose works take so much longer each."""
        other = copy.copy(self)
        other._straggler = straggler
        return other

    def stretch_stages(self, factors: Sequence[float], *, copies: bool) -> None:
        """Let each stage compute, and copy where copies take longer too, so many times longer."""
        tasks = self.tasks
        longer = tasks.computes | tasks.copies if copies else tasks.computes & ~tasks.copies
        self._longer = np.where(longer, np.asarray(factors)[tasks.stage], 1.0)

    def task_seconds(self, seconds: Floats) -> Floats:
        """Per task, from seconds per work: one row of them or several."""
        of_tasks = np.asarray((seconds * self._straggler).take(self.tasks.work, axis=-1))
        return of_tasks if self._longer is None else of_tasks * self._longer

    def run(
        self,
        seconds: Floats,
        compute_slowdown: Floats,
        communication_slowdown: Floats,
        *,
        added_s: Floats | None = None,
    ) -> Timeline:
        """The timeline of all roles' segments under costs per work, and so many seconds more per task."""
        slowdowns = self._slowdowns_of_segments(compute_slowdown, communication_slowdown)
        return simulate(self._graph, self._segment_seconds(seconds, added_s), *slowdowns)

    def iteration_s(self, seconds: Floats, *slowdowns: Floats) -> Floats:
        """When the last segment ends, under each row of costs per work."""
        of_segments = self._slowdowns_of_segments(*slowdowns)
        if self._longer is not None:
            return iteration_seconds(self._graph, self._segment_seconds(seconds, None), *of_segments)
        return self._windows.iteration_s(self._alike.of_kinds(seconds * self._straggler), *of_segments)

    def _slowdowns_of_segments(self, compute: Floats, communication: Floats) -> tuple[Floats, Floats]:
        return self._of_segments(0, compute), self._of_segments(1, communication)

    def _of_segments(self, number: int, slowdown: Floats) -> Floats:
        """Per segment, from slow-downs per work, which most shifts of costs leave as they are."""
        of_works, found = self._slowdowns[number]
        if not np.array_equal(of_works, slowdown):
            found = slowdown.take(self._segment_work, axis=-1)
            self._slowdowns[number] = slowdown, found
        return found

    def _segment_seconds(self, seconds: Floats, added_s: Floats | None) -> Floats:
        if added_s is None and self._longer is None:
            return self._alike.seconds(seconds * self._straggler)
        of_tasks = self.task_seconds(seconds)
        if added_s is not None:
            of_tasks = np.maximum(of_tasks + added_s, 0.0)
        return sums_within(self.tasks.segment, of_tasks, self._graph.tasks)

    def computing(self, *costs: Floats) -> Computing:
        """When its ranks compute."""
        line, chosen = self.run(*costs), self._on_compute
        index = np.cumsum(chosen) - 1
        tasks = np.flatnonzero(chosen[self.tasks.segment])
        return Computing(
            stage=self._role[chosen],
            start_s=line.start_s[chosen],
            end_s=line.end_s[chosen],
            task_work=self.tasks.work[tasks],
            task_segment=index[self.tasks.segment[tasks]],
        )

    def timing(self, *costs: Floats) -> Timing:
        """Phases of the rank that ends last."""
        return timing_of_stages(self.run(*costs), self._phased)


def _as_places(indices: Ints) -> Places:
    """Indices in the width that numpy looks places up by; narrower ones it would widen in each simulation, slowly."""
    return indices.astype(np.intp)


def ends_of_transfers(plan: Plan, role: Role) -> dict[TransferEnd, list[int]]:
    """Tasks of a role that send and receive, in order."""
    return _Transfers(plan).ends(role)


class TransferEnd(NamedTuple):
    """One end of the messages that cross a cut in one phase, or go from one rank to another one."""

    direction: str
    phase: str
    cut: int
    to: int


class _Transfers:
    """Which works of a plan send and receive."""

    def __init__(self, plan: Plan) -> None:
        ends: dict[TransferEnd, int] = {}
        self._number = np.full(len(plan.works), -1)
        self._sends = np.zeros(len(plan.works), bool)
        for index, work in plan.of_kind(Transfer).items():
            self._number[index] = ends.setdefault(TransferEnd(work.direction, work.phase, work.cut, work.to), len(ends))
            self._sends[index] = work.direction == "send"
        self._ends = list(ends)

    def ends(self, role: Role) -> dict[TransferEnd, list[int]]:
        """Tasks of a role that send and receive, in order."""
        numbers = self._number[role.work]
        tasks = np.flatnonzero(numbers >= 0)
        tasks = tasks[np.argsort(numbers[tasks], kind="stable")]
        used, starts = np.unique(numbers[tasks], return_index=True)
        rows = np.split(tasks, starts[1:])
        return {self._ends[number]: row.tolist() for number, row in zip(used.tolist(), rows, strict=False)}

    def with_blocking_sends(self, role: Role) -> Role:
        """The role with its sends on the compute stream."""
        stream = np.where(self._sends[role.work], np.int32(Stream.COMPUTE), role.stream)
        return dataclasses.replace(role, stream=stream.astype(np.int32))


def _chosen(ends: Mapping[TransferEnd, list[int]], direction: str) -> list[int]:
    return [task for end, tasks in ends.items() if end.direction == direction for task in tasks]


def _matches(ends: Sequence[Mapping[TransferEnd, Ints]]) -> list[tuple[int, Ints, int, Ints]]:
    """(role, segments) that send and (role, segments) that receive the same messages."""
    sends = {
        end[1:]: (role, messages)
        for role, of in enumerate(ends)
        for end, messages in of.items()
        if end.direction == "send"
    }
    return [
        (*sends[end[1:]], role, messages)
        for role, of in enumerate(ends)
        for end, messages in of.items()
        if end.direction == "receive"
    ]


def _meetings(plan: Plan, roles: Sequence[Role], segments: Sequence[Ints]) -> list[tuple[int, Ints, int, Ints]]:
    """(role, segments) that collectives of all stages wait for and (role, segments) of these, between unlike roles.

    Every stage issues as many, each behind one task of its own.
    """
    (stages,) = group_axes(plan.strategy, Trait.STAGES)
    of_all = np.array([isinstance(work, Collective) and stages in work.axes for work in plan.works], bool)
    met = [np.flatnonzero(of_all[role.work]) for role in roles]
    before = [role.dependencies[role.dependency_start[tasks]] for role, tasks in zip(roles, met, strict=True)]
    ends = [
        (segment_of[waited], segment_of[tasks]) for segment_of, waited, tasks in zip(segments, before, met, strict=True)
    ]
    pairs = ((one, other) for one in range(len(roles)) for other in range(len(roles)) if one != other)
    return [(one, ends[one][0], other, ends[other][1]) for one, other in pairs if len(ends[one][0])]
