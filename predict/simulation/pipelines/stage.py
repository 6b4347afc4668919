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
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Brief, Collective, Plan, Role, Stream, TaskArrays, Transfer, Work
from paradl_bench.strategies.passes.input_tasks import INPUT_PHASES
from predict.costs.priced import blocking_tasks
from predict.simulation.phases import PhasedTasks
from predict.simulation.pipelines.alike_segments import Places, alike_segments
from predict.simulation.pipelines.unrolled import Unrolled
from predict.simulation.pipelines.windows import Nodes, Windows, graph_of_nodes
from predict.simulation.simulator import LANES, Edges, coalesce


class StageTasks:
    """Tasks of a stage, joined.

    Args:
        tasks: all of them, or as few as stand for all. works: of the plan.
        transfers, meetings: which works of the plan are these.
        blocking: works that go on beside what is in flight. merge: false keeps every task a segment of its own.
    """

    def __init__(
        self,
        tasks: TaskArrays,
        strategy: Strategy,
        works: Sequence[Work],
        transfers: Transfers,
        meetings: NDArray[np.bool_],
        *,
        blocking: frozenset[int],
        merge: bool,
    ) -> None:
        self.tasks = tasks
        ends = transfers.ends(tasks)
        self.condensed = coalesce(
            tasks,
            merge=merge,
            waiting=_chosen(ends, "receive"),
            waited_for=_chosen(ends, "send"),
            blocking=blocking_tasks(strategy, tasks, blocking) if blocking else None,
        )
        segment = self.condensed.segment
        self.alike = alike_segments(segment, tasks.work)
        self.work: Places = tasks.work[self.condensed.first].astype(np.intp)
        """Per segment, the work of its first task."""
        self.ends = {end: segment[chosen] for end, chosen in ends.items()}
        met = np.flatnonzero(meetings[tasks.work])
        self.meets = segment[tasks.dependencies[tasks.dependency_start[met]]], segment[met]
        """Segments that collectives of all stages wait for, each behind one task of its own, and segments of these."""
        self._works = works

    @cached_property
    def windows(self) -> Windows:
        """Their windows."""
        receives, sends = (
            [segments for end, segments in self.ends.items() if end.direction == direction]
            for direction in ("receive", "send")
        )
        before, met = self.meets
        waits, waited_for = np.concatenate([*receives, met]), np.concatenate([*sends, before])
        return Windows(self.condensed.graph, self.alike, self.work, waits, waited_for)

    @property
    def fetches(self) -> bool:
        """Whether any of them is of the input."""
        return bool(np.isin(self.condensed.phase, INPUT_PHASES).any())

    @cached_property
    def phased(self) -> PhasedTasks:
        """Their segments, as a breakdown reads them."""
        names = [work.name_in_breakdowns for work in self._works]
        return PhasedTasks(
            phase=self.condensed.phase,
            computes=self.condensed.graph.lane % LANES == Stream.COMPUTE,
            names=tuple(map(names.__getitem__, self.work.tolist())),
        )


class Ended(NamedTuple):
    """Where a stage waits for others and is waited for: numbers of its segments, or of its nodes.

    Attributes:
        ends: what sends and receives, in order. meets: as of :class:`StageTasks`.
    """

    ends: Mapping[TransferEnd, NDArray[np.integer]]
    meets: tuple[NDArray[np.integer], NDArray[np.integer]]


class Stage:
    """A role of a pipeline, as the simulation reads it: its nodes, or all of its tasks.

    Args:
        transfers, meetings, blocking, merge: as of :class:`StageTasks`.
        overlapped: false lets it compute nothing while it sends.
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
        self._brief, self._arrays = role.arrays.brief, role.arrays
        # The plan keeps its stages: one that held the plan would keep both from being freed at once.
        strategy, works = plan.strategy, plan.works

        def joined(tasks: TaskArrays) -> StageTasks:
            tasks = tasks if overlapped else transfers.with_blocking_sends(tasks)
            return StageTasks(tasks, strategy, works, transfers, meetings, blocking=blocking, merge=merge)

        self._joined = joined

    @cached_property
    def whole(self) -> StageTasks:
        """All of its tasks."""
        return self._joined(self._arrays.whole)

    @cached_property
    def brief(self) -> StageTasks:
        """As few of its tasks as stand for all."""
        return self.whole if self._brief.is_whole else self._joined(self._brief.tasks)

    @cached_property
    def nodes(self) -> Nodes:
        """Its nodes."""
        return self._nodes_and_ends[0]

    @property
    def ended(self) -> Ended:
        """By numbers of its nodes."""
        return self._nodes_and_ends[1]

    @cached_property
    def _nodes_and_ends(self) -> tuple[Nodes, Ended]:
        found = None if self._brief.is_whole else _unrolled(self._brief, self.brief)
        if found is not None:
            return found
        windows = self.whole.windows
        return Nodes(windows.outer, windows), _ended(self.whole)


def _ended(tasks: StageTasks) -> Ended:
    """By nodes of these tasks."""
    node, (before, met) = tasks.windows.node, tasks.meets
    return Ended({end: node[segments] for end, segments in tasks.ends.items()}, (node[before], node[met]))


def _unrolled(brief: Brief, tasks: StageTasks) -> tuple[Nodes, Ended] | None:
    """Nodes of all micro-batches from those of few; None where one waits for what is too far away to be told."""
    windows = tasks.windows
    ended = _ended(tasks)
    unrolled = Unrolled(brief, brief.action[tasks.condensed.first[windows.first]], windows.distinct.number)
    waits, meets = unrolled.pairs(*windows.waits), unrolled.pairs(*ended.meets)
    if waits is None or meets is None:
        return None
    graph = graph_of_nodes(windows.lane[unrolled.like], [*map(unrolled.places, windows.on_lanes)], waits)
    ends = {end: unrolled.places(nodes) for end, nodes in ended.ends.items()}
    return Nodes(graph, windows, unrolled.like), Ended(ends, meets)


def edges_of(stages: Sequence[Ended]) -> list[Edges]:
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
    return Transfers(plan).ends(role.arrays.whole)


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

    def ends(self, tasks: TaskArrays) -> dict[TransferEnd, list[int]]:
        """Those that send and receive, in order."""
        numbers = self._number[tasks.work]
        chosen = np.flatnonzero(numbers >= 0)
        chosen = chosen[np.argsort(numbers[chosen], kind="stable")]
        used, starts = np.unique(numbers[chosen], return_index=True)
        rows = np.split(chosen, starts[1:])
        return {self._ends[number]: row.tolist() for number, row in zip(used.tolist(), rows, strict=False)}

    def with_blocking_sends(self, tasks: TaskArrays) -> TaskArrays:
        """The same tasks, with sends on the compute stream."""
        stream = np.where(self._sends[tasks.work], np.int32(Stream.COMPUTE), tasks.stream)
        return dataclasses.replace(tasks, stream=stream.astype(np.int32))


def _chosen(ends: Mapping[TransferEnd, list[int]], direction: str) -> list[int]:
    return [task for end, tasks in ends.items() if end.direction == direction for task in tasks]
