"""Deterministic simulation of one iteration: tasks on streams, with interference between compute and communication.

What is modelled: a stream runs its tasks one at a time in the plan's order; a task starts when its stream is free and
all tasks that it waits for are done. While a compute task and a collective are both under way, compute progresses at
1/compute_slowdown and the collective at 1/communication_slowdown (DESIGN.md, idea 5): a fluid simulation, whose rates
change only where a task starts or ends. What is not modelled: preemption, several collectives at once on one rank, and
roles that differ (one role stands for all ranks, and a collective starts when this role reaches it).

Arrays in, arrays out: a task is an index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paradl_bench.spec.plan import Role, Stream
from predict.costs import Floats, Ints

_COMPUTE = int(Stream.COMPUTE)
_COMMUNICATION = int(Stream.COMMUNICATION)


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks of one role, as the event loop reads them.

    Attributes:
        streams: per stream, its tasks in order.
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
        overlap_s: compute and communication both active.
        exposed_communication_s: communication active while compute is not.
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


def condense(role: Role, *, merge: bool = True, across_phases: bool = False) -> Condensed:
    """Join compute tasks into segments wherever no other stream waits for, or is waited for, in between.

    Args:
        merge: false keeps every task a segment of its own.
        across_phases: join tasks of unlike phases too, where only the whole iteration is asked for.
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


def simulate(graph: TaskGraph, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timeline:
    """Run the tasks.

    Args:
        seconds: per task, alone on the device.
        compute_slowdown, communication_slowdown: per task; read where the task is a collective that runs beside
            compute, and at least 1.

    Raises:
        ValueError: tasks wait for each other in a circle.
    """
    left, slow_compute, slow_communication = (
        seconds.tolist(),
        compute_slowdown.tolist(),
        communication_slowdown.tolist(),
    )
    waits_for = list(graph.waits_for)
    start, end = [0.0] * len(left), [0.0] * len(left)
    queues = [list(reversed(lane)) for lane in graph.streams]
    active: list[int | None] = [None] * len(queues)
    now = overlap = exposed = 0.0
    finished = 0
    while finished < len(left):
        _start_ready(queues, active, waits_for, start, now)
        compute, exchange = active[_COMPUTE], active[_COMMUNICATION]
        beside = compute is not None and exchange is not None
        rate = [1.0] * len(active)
        if beside:
            assert exchange is not None
            rate[_COMPUTE], rate[_COMMUNICATION] = 1 / slow_compute[exchange], 1 / slow_communication[exchange]
        waiting = [left[task] / rate[lane] for lane, task in enumerate(active) if task is not None]
        if not waiting:
            raise ValueError("the tasks wait for each other in a circle: the plan orders its streams against its edges")
        passed = min(waiting)
        now += passed
        if beside:
            overlap += passed
        elif exchange is not None:
            exposed += passed
        for lane, task in enumerate(active):
            if task is None:
                continue
            if left[task] / rate[lane] > passed:
                left[task] -= passed * rate[lane]
                continue
            active[lane] = None
            end[task] = now
            finished += 1
            for follower in graph.followers[task]:
                waits_for[follower] -= 1
    return Timeline(np.array(start), np.array(end), overlap, exposed)


def _start_ready(
    queues: list[list[int]], active: list[int | None], waits_for: list[int], start: list[float], now: float
) -> None:
    for lane, queue in enumerate(queues):
        if active[lane] is None and queue and not waits_for[queue[-1]]:
            task = active[lane] = queue.pop()
            start[task] = now
