"""A stage of a pipeline: its role's tasks joined, what it exchanges with other stages, and its windows.

None of it depends on the line that the stage stands in: stages that do the same share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import group_axes
from paradl_bench.plan.tasks import Collective, Plan, Role, Stream, Transfer
from predict.costs.priced import blocking_tasks
from predict.simulation.phases import PhasedTasks
from predict.simulation.pipelines.alike_segments import Places, alike_segments
from predict.simulation.pipelines.windows import Windows
from predict.simulation.simulator import LANES, Edges, coalesce


class Stage:
    """A role's tasks joined.

    Args:
        transfers, meetings: which works of the plan are these.
        blocking: works that go on beside what is in flight.
        overlapped: false lets it compute nothing while it sends. merge: false keeps every task a segment of its own.
    """

    def __init__(
        self,
        plan: Plan,
        role: Role,
        transfers: Transfers,
        meetings: NDArray[np.bool_],
        *,
        blocking: frozenset[int],
        overlapped: bool,
        merge: bool,
    ) -> None:
        beside = blocking_tasks(plan, role, blocking) if blocking else None
        self.role = role if overlapped else transfers.with_blocking_sends(role)
        ends = transfers.ends(self.role)
        self.condensed = coalesce(
            self.role,
            merge=merge,
            waiting=_chosen(ends, "receive"),
            waited_for=_chosen(ends, "send"),
            blocking=beside,
        )
        segment = self.condensed.segment
        self.alike = alike_segments(segment, self.role.work)
        self.work: Places = self.role.work[self.condensed.first].astype(np.intp)
        """Per segment, the work of its first task."""
        self.ends = {end: segment[tasks] for end, tasks in ends.items()}
        met = np.flatnonzero(meetings[self.role.work])
        self.meets = segment[self.role.dependencies[self.role.dependency_start[met]]], segment[met]
        """Segments that collectives of all stages wait for, each behind one task of its own, and segments of these."""
        self._names = [work.name_in_breakdowns for work in plan.works]

    @cached_property
    def windows(self) -> Windows:
        """Its windows."""
        receives, sends = (
            [segments for end, segments in self.ends.items() if end.direction == direction]
            for direction in ("receive", "send")
        )
        before, met = self.meets
        waits, waited_for = np.concatenate([*receives, met]), np.concatenate([*sends, before])
        return Windows(self.condensed.graph, self.alike, self.work, waits, waited_for)

    @cached_property
    def phased(self) -> PhasedTasks:
        """Its segments, as a breakdown reads them."""
        return PhasedTasks(
            phase=self.condensed.phase,
            computes=self.condensed.graph.lane % LANES == Stream.COMPUTE,
            names=tuple(map(self._names.__getitem__, self.work.tolist())),
        )


def edges_of(stages: Sequence[Stage]) -> list[Edges]:
    """Between stages of a line: what sends and what receives, and collectives of all."""
    sends = {
        end[1:]: (place, messages)
        for place, stage in enumerate(stages)
        for end, messages in stage.ends.items()
        if end.direction == "send"
    }
    matches = [
        (*sends[end[1:]], place, messages)
        for place, stage in enumerate(stages)
        for end, messages in stage.ends.items()
        if end.direction == "receive"
    ]
    pairs = ((one, other) for one in range(len(stages)) for other in range(len(stages)) if one != other)
    # Every stage issues as many.
    met = [(one, stages[one].meets[0], other, stages[other].meets[1]) for one, other in pairs]
    return [*matches, *(edges for edges in met if len(edges[1]))]


def meetings_of(plan: Plan) -> NDArray[np.bool_]:
    """Per work, whether it is a collective of all stages."""
    (stages,) = group_axes(plan.strategy, Trait.STAGES)
    return np.array([isinstance(work, Collective) and stages in work.axes for work in plan.works], bool)


def ends_of_transfers(plan: Plan, role: Role) -> dict[TransferEnd, list[int]]:
    """Tasks of a role that send and receive, in order."""
    return Transfers(plan).ends(role)


class TransferEnd(NamedTuple):
    """One end of the messages that cross a cut in one phase, or go from one rank to another one."""

    direction: str
    phase: str
    cut: int
    to: int


class Transfers:
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
