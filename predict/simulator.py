"""Deterministic simulation of one iteration: tasks on streams, with interference between compute and communication.

What is modelled: a stream runs its tasks one at a time in the plan's order; a task starts when its stream is free and
all tasks that it waits for are done. While a compute task and a collective are both under way, compute progresses at
1/compute_slowdown and the collective at 1/communication_slowdown (DESIGN.md, idea 5): a fluid simulation, whose rates
change only where a task starts or ends. Several roles run together where one waits for what another sends
(:func:`couple`). What is not modelled: preemption, several collectives at once on one rank, and collectives between
roles that differ (a collective starts when its own role reaches it).

Arrays in, arrays out: a task is an index.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paradl_bench.spec.plan import Role, Stream
from predict.costs import Floats, Ints

_COMPUTE = int(Stream.COMPUTE)
_BESIDE = int(Stream.COMMUNICATION) - _COMPUTE
"""From a role's compute lane to its communication lane."""


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks of one role, or of several that wait for each other, as the event loop reads them.

    Attributes:
        streams: per stream, its tasks in order; all streams of one role, then those of the next.
        waits_for: per task, how many tasks it waits for on other streams.
        followers: per task, the tasks on other streams that wait for it. Waiting inside a stream is implied by its
            order.
    """

    streams: tuple[tuple[int, ...], ...]
    waits_for: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]


class Timeline(NamedTuple):
    """When each task ran, and how long streams were active together.

    Attributes:
        start_s, end_s: per task, from the start of the iteration.
        overlap_s: compute and communication both active; of several roles, on the one that ends last.
        exposed_communication_s: communication active while compute is not; likewise.
    """

    start_s: Floats
    end_s: Floats
    overlap_s: float
    exposed_communication_s: float

    @property
    def iteration_s(self) -> float:
        """When the last task ends."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0


@dataclass(frozen=True, slots=True)
class Condensed:
    """A graph in which runs of compute tasks that nothing outside waits in between for are one segment each.

    Simulating the segments gives the same times at their borders as simulating all tasks.

    Attributes:
        graph: of the segments.
        segment: per task of the role, the segment that holds it.
        phase: per segment, the phase of its first task; of all of its tasks, unless phases were joined.
    """

    graph: TaskGraph
    segment: Ints
    phase: Ints

    def sum_seconds(self, task_seconds: Floats) -> Floats:
        """Seconds of the segments from those of the tasks."""
        return np.asarray(np.bincount(self.segment, weights=task_seconds, minlength=len(self.phase)), float)


def task_graph(role: Role) -> TaskGraph:
    """The graph of all tasks of a role."""
    return condense(role, merge=False).graph


def condense(
    role: Role, *, merge: bool = True, across_phases: bool = False, alone: Collection[int] = frozenset()
) -> Condensed:
    """Join compute tasks into segments wherever no other stream waits for, or is waited for, in between.

    Args:
        merge: false keeps every task a segment of its own.
        across_phases: join tasks of unlike phases too, where only the whole iteration is asked for.
        alone: tasks to keep as segments of their own, since other roles wait for them or are waited for by them.
    """
    stream, phase = role.stream.tolist(), role.phase.tolist()
    rows = _other_stream_dependencies(role)
    waited_for = {dependency for row in rows for dependency in row}
    segment: list[int] = []
    first: list[int] = []
    last_of_stream: dict[int, int] = {}
    for task, lane in enumerate(stream):
        previous = last_of_stream.get(lane)
        joins = (
            merge
            and lane == _COMPUTE
            and previous is not None
            and task not in alone
            and previous not in alone
            and not rows[task]
            and previous not in waited_for
            and (across_phases or phase[task] == phase[previous])
        )
        if not joins:
            first.append(task)
        segment.append(segment[previous] if joins and previous is not None else len(first) - 1)
        last_of_stream[lane] = task
    return Condensed(
        graph=_graph_of_segments(first, segment, stream, rows),
        segment=np.array(segment, np.int64),
        phase=np.array([phase[task] for task in first], np.int64),
    )


def _other_stream_dependencies(role: Role) -> list[list[int]]:
    """Per task, the last task that it waits for on each other stream: earlier ones of that stream are done by then."""
    stream = role.stream.tolist()
    starts, dependencies = role.dependency_start.tolist(), role.dependencies.tolist()
    rows = []
    for task in range(role.tasks):
        latest: dict[int, int] = {}
        for dependency in dependencies[starts[task] : starts[task + 1]]:
            lane = stream[dependency]
            if lane != stream[task]:
                latest[lane] = max(dependency, latest.get(lane, -1))
        rows.append(list(latest.values()))
    return rows


def _graph_of_segments(first: list[int], segment: list[int], stream: list[int], rows: list[list[int]]) -> TaskGraph:
    lanes: list[list[int]] = [[] for _ in Stream]
    waits_for = [0] * len(first)
    followers: list[list[int]] = [[] for _ in first]
    for index, task in enumerate(first):
        lanes[stream[task]].append(index)
        sources = {segment[dependency] for dependency in rows[task]}
        waits_for[index] = len(sources)
        for source in sources:
            followers[source].append(index)
    return TaskGraph(tuple(map(tuple, lanes)), tuple(waits_for), tuple(map(tuple, followers)))


def couple(graphs: Sequence[TaskGraph], edges: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> TaskGraph:
    """One graph of several roles; tasks are numbered role after role.

    Args:
        edges: (role, task) that is waited for, and (role, task) that waits.
    """
    starts = [0, *itertools.accumulate(len(graph.waits_for) for graph in graphs)]
    streams = [tuple(task + start for task in lane) for graph, start in _with(graphs, starts) for lane in graph.streams]
    waits_for = [count for graph in graphs for count in graph.waits_for]
    followers = [[task + start for task in row] for graph, start in _with(graphs, starts) for row in graph.followers]
    for (source_role, source), (role, task) in edges:
        followers[starts[source_role] + source].append(starts[role] + task)
        waits_for[starts[role] + task] += 1
    return TaskGraph(tuple(streams), tuple(waits_for), tuple(map(tuple, followers)))


def _with(graphs: Sequence[TaskGraph], starts: Sequence[int]) -> Iterator[tuple[TaskGraph, int]]:
    return zip(graphs, starts, strict=False)


def simulate(graph: TaskGraph, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timeline:
    """Run the tasks.

    Args:
        seconds: per task, alone on the device.
        compute_slowdown, communication_slowdown: per task; read where the task is a collective that runs beside
            compute, and at least 1.

    Raises:
        ValueError: tasks wait for each other in a circle.
    """
    run = _Run(graph, seconds, compute_slowdown, communication_slowdown)
    while run.finished < len(seconds):
        run.advance()
    return run.timeline()


class _Run:
    """The state of a simulation: what is active on every lane (a stream of a role), and what is left of it."""

    def __init__(
        self, graph: TaskGraph, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats
    ) -> None:
        self._graph = graph
        self._left: list[float] = seconds.tolist()
        self._slow_compute: list[float] = compute_slowdown.tolist()
        self._slow_communication: list[float] = communication_slowdown.tolist()
        self._waits_for = list(graph.waits_for)
        self._start, self._end = [0.0] * len(self._left), [0.0] * len(self._left)
        self._queues = [list(reversed(lane)) for lane in graph.streams]
        self._active: list[int | None] = [None] * len(self._queues)
        roles = len(self._queues) // len(Stream)
        self._compute_lanes = [role * len(Stream) + _COMPUTE for role in range(roles)]
        self._overlap, self._exposed = [0.0] * roles, [0.0] * roles
        self._last_end = [0.0] * roles
        self._now = 0.0
        self.finished = 0

    def advance(self) -> None:
        """To the next moment at which a task ends."""
        self._start_ready()
        active = self._active
        rate = [1.0] * len(active)
        for lane in self._compute_lanes:
            exchange = active[lane + _BESIDE]
            if active[lane] is not None and exchange is not None:
                rate[lane], rate[lane + _BESIDE] = (
                    1 / self._slow_compute[exchange],
                    1 / self._slow_communication[exchange],
                )
        waiting = [self._left[task] / rate[lane] for lane, task in enumerate(active) if task is not None]
        if not waiting:
            raise ValueError("the tasks wait for each other in a circle: the plan orders its streams against its edges")
        passed = min(waiting)
        self._now += passed
        for role, lane in enumerate(self._compute_lanes):
            if active[lane + _BESIDE] is not None:
                (self._exposed if active[lane] is None else self._overlap)[role] += passed
        self._finish(passed, rate)

    def _start_ready(self) -> None:
        for lane, queue in enumerate(self._queues):
            if self._active[lane] is None and queue and not self._waits_for[queue[-1]]:
                task = self._active[lane] = queue.pop()
                self._start[task] = self._now

    def _finish(self, passed: float, rate: list[float]) -> None:
        for lane, task in enumerate(self._active):
            if task is None:
                continue
            if self._left[task] / rate[lane] > passed:
                self._left[task] -= passed * rate[lane]
                continue
            self._active[lane] = None
            self._end[task] = self._now
            self._last_end[lane // len(Stream)] = self._now
            self.finished += 1
            for follower in self._graph.followers[task]:
                self._waits_for[follower] -= 1

    def timeline(self) -> Timeline:
        """What happened; overlap and exposure are those of the role that ended last."""
        last = max(range(len(self._last_end)), key=lambda role: self._last_end[role], default=0)
        overlap, exposed = (sums[last] if sums else 0.0 for sums in (self._overlap, self._exposed))
        return Timeline(np.array(self._start), np.array(self._end), overlap, exposed)
