"""Deterministic simulation of one iteration: tasks on streams, with interference between compute and communication.

A stream runs its tasks one at a time in the plan's order; a task starts when its stream is free and all tasks that it
waits for are done. While a compute task and a collective are both under way, compute progresses at 1/compute_slowdown
and the collective at 1/communication_slowdown: a fluid simulation, whose rates change only where a task starts or ends.
Calls that compute waits for may be given a lane of their own, on which they do not queue for the collectives in flight
and are slowed beside them. Not modelled: preemption, and more collectives than these two at once on one rank.

Arrays in, arrays out: a task is an index. The event loop is :mod:`predict.simulation.engine.engine_compiled` where that
was built with the same interface, else :mod:`predict.simulation.engine.engine_python`, which does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import numbered
from paradl_bench.plan.tasks import Ints, Role, Stream, TaskArrays
from predict.costs.sourced import Floats
from predict.simulation.engine import engine_python

_COMPUTE, _COMMUNICATION = int(Stream.COMPUTE), int(Stream.COMMUNICATION)
LANES = len(Stream) + 1
"""Of a role: its streams, and one of the calls that compute waits for beside what is in flight."""
BLOCKING = len(Stream)
_OF_INPUT = [int(Stream.INPUT), int(Stream.COPY_ENGINE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Tasks of one role, or of several that wait for each other, as the event loop reads them.

    Attributes:
        lane: per task, what it runs on: the :data:`LANES` of the first role, then those of the next. Tasks of a lane
            run in the order of their numbers.
        lane_start, queue: compressed rows: lane i runs ``queue[lane_start[i]:lane_start[i + 1]]``, one after the other.
        waits_for: per task, how many tasks it waits for on other lanes.
        follower_start, followers: compressed rows: per task, those on other lanes that wait for it. Waiting inside a
            lane is implied by its order.
    """

    lane: Ints
    lane_start: Ints
    queue: Ints
    waits_for: Ints
    follower_start: Ints
    followers: Ints
    of_input: NDArray[np.bool_] | None = field(init=False)
    """Per task, whether it fetches input for another iteration; None where none does."""

    def __post_init__(self) -> None:
        sizes = np.diff(self.lane_start).reshape(-1, LANES)
        fetches = bool(sizes[:, _OF_INPUT].any())
        object.__setattr__(self, "of_input", np.isin(self.lane % LANES, _OF_INPUT) if fetches else None)

    @classmethod
    def of_edges(cls, lane: Ints, roles: int, source: Ints, target: Ints) -> TaskGraph:
        """The graph of so many roles in which each target waits for the source of the same index."""
        tasks, lanes = len(lane), roles * LANES
        by_source = np.argsort(source, kind="stable")
        return cls(
            lane=_as_indices(lane),
            lane_start=_row_starts(lane, lanes),
            queue=_as_indices(np.argsort(lane, kind="stable")),
            waits_for=_as_indices(np.bincount(target, minlength=tasks)),
            follower_start=_row_starts(source, tasks),
            followers=_as_indices(target[by_source]),
        )

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(self.lane)

    @property
    def roles(self) -> int:
        """Number of roles."""
        return (len(self.lane_start) - 1) // LANES

    @property
    def edges(self) -> tuple[Ints, Ints]:
        """(source, target) of all edges between lanes."""
        return np.repeat(np.arange(self.tasks, dtype=np.int32), np.diff(self.follower_start)), self.followers


def _as_indices(values: NDArray[np.integer]) -> Ints:
    return np.ascontiguousarray(values, np.int32)


def _row_starts(row: Ints, rows: int) -> Ints:
    return _as_indices(np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]))


class Timeline(NamedTuple):
    """When each task ran, and how long streams of the role that ends last were active together.

    Attributes:
        overlap_s: compute and communication both active. exposed_communication_s: the latter while the former is not.
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

    Attributes:
        segment: per task of the role, the segment that holds it. first: per segment, its first task.
        phase: per segment, the phase of its first task; of all of its tasks, unless phases were joined.
    """

    graph: TaskGraph
    segment: Ints
    first: Ints
    phase: Ints


def sums_within(segment: NDArray[np.integer], task_seconds: Floats, segments: int) -> Floats:
    """Per segment, the sum of what its tasks have, in their order; of one row of tasks, or of each of several."""
    rows = np.atleast_2d(task_seconds)
    sums = np.empty((len(rows), segments))
    # In the width that numpy counts by, once for all rows.
    segment = segment.astype(np.intp, copy=False)
    for of_row, row in zip(sums, rows, strict=True):
        of_row[:] = np.bincount(segment, weights=row, minlength=segments)
    return sums.reshape(*task_seconds.shape[:-1], segments)


class SegmentSums:
    """Seconds of segments from those of works, under many costs, few of which differ in what segments join.

    Args:
        segment, work: of every task. free: per task, whether nothing but its own work says what it takes.
    """

    def __init__(self, segment: NDArray[np.integer], work: NDArray[np.integer], free: NDArray[np.bool_]) -> None:
        count = np.bincount(segment)
        self._segment, self._work, self._segments = segment, work, len(count)
        # A task alone in its segment takes what its work does: nothing is to be added up.
        alone = np.flatnonzero(free & (count[segment] == 1))
        self._alone, self._alone_work = segment[alone], work[alone]
        joined = np.ones(len(segment), bool)
        joined[alone] = False
        self._joined_works = np.flatnonzero(_marked(int(work.max(initial=-1)) + 1, work[joined]))

    def seconds(self, of_works: Floats, late: Callable[[Floats], Floats] = lambda of_tasks: of_tasks) -> Floats:
        """Per segment, of one row of works or of each of several; ``late`` tells what tasks take of rows of theirs."""
        rows = np.atleast_2d(of_works)
        first, which = _alike_rows(rows.take(self._joined_works, axis=1))
        sums = sums_within(self._segment, late(rows[first].take(self._work, axis=1)), self._segments)[which]
        sums[:, self._alone] = rows.take(self._alone_work, axis=1)
        return sums.reshape(*of_works.shape[:-1], self._segments)


def _alike_rows(values: Floats) -> tuple[list[int], list[int]]:
    """The first of each kind of equal rows, and of each row the number of its kind."""
    # A sum tells rows apart as a rule; whether it did is looked at.
    first, which = numbered(values.sum(axis=1).tolist())
    if not np.array_equal(values, values[first][which]):
        first = which = list(range(len(values)))
    return first, which


def task_graph(role: Role | TaskArrays, *, blocking: NDArray[np.bool_] | None = None) -> TaskGraph:
    """The graph of all tasks of a role; ``blocking`` as :func:`coalesce` takes it."""
    return coalesce(role, merge=False, blocking=blocking).graph


def coalesce(
    role: Role | TaskArrays,
    *,
    merge: bool = True,
    across_phases: bool = False,
    waiting: Sequence[int] = (),
    waited_for: Sequence[int] = (),
    blocking: NDArray[np.bool_] | None = None,
) -> Condensed:
    """Join compute tasks into segments wherever no other stream waits for, or is waited for, in between.

    Args:
        merge: false keeps every task a segment of its own.
        across_phases: join tasks of unlike phases too, where only the whole iteration is asked for.
        waiting: tasks that wait for other roles, and so begin a segment.
        waited_for: tasks that other roles wait for, and so end one.
        blocking: per task, whether it is a call on the lane beside what is in flight; None for none.
    """
    lane = role.stream if blocking is None else np.where(blocking, np.int32(BLOCKING), role.stream)
    source, target = _waits_across_lanes(role, lane)
    begins, computing = np.ones(role.tasks, bool), np.flatnonzero(role.stream == _COMPUTE)
    if merge:
        ends = _marked(role.tasks, source) | _marked(role.tasks, waited_for)
        apart = _marked(role.tasks, target) | _marked(role.tasks, waiting)
        before, after = computing[:-1], computing[1:]
        begins[after] = apart[after] | ends[before]
        if not across_phases:
            begins[after] |= role.phase[after] != role.phase[before]
    first = np.flatnonzero(begins)
    leader = np.where(begins, np.arange(role.tasks), 0)
    leader[computing] = np.maximum.accumulate(leader[computing])
    segment = _as_indices((np.cumsum(begins) - 1)[leader])
    edges = distinct(segment[target].astype(np.int64) * (len(first) + 1) + segment[source])
    return Condensed(
        graph=TaskGraph.of_edges(
            lane[first], 1, _as_indices(edges % (len(first) + 1)), _as_indices(edges // (len(first) + 1))
        ),
        segment=segment,
        first=_as_indices(first),
        phase=role.phase[first],
    )


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Values that differ, ascending. (``np.unique`` loads masked arrays, which nothing else here needs.)"""
    ordered = np.sort(values)
    return np.asarray(ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]])


def _marked(tasks: int, chosen: Sequence[int] | NDArray[np.integer]) -> NDArray[np.bool_]:
    marked = np.zeros(tasks, bool)
    marked[np.asarray(chosen, np.int64)] = True
    return marked


def _waits_across_lanes(role: Role | TaskArrays, lane: Ints) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(waited for, waiting), per task the last of each other lane: earlier ones are done by then."""
    target = np.repeat(np.arange(role.tasks), np.diff(role.dependency_start))
    # Narrower indices numpy widens one by one.
    source = role.dependencies.astype(np.int64)
    other = lane[source] != lane[target]
    source, target = source[other], target[other]
    by_lane = np.lexsort((source, lane[source], target))
    source, target = source[by_lane], target[by_lane]
    row = target * LANES + lane[source]
    last = np.append(row[1:] != row[:-1], True)[: len(row)]
    return source[last], target[last]


Edges = tuple[int, NDArray[np.integer], int, NDArray[np.integer]]
"""(Graph, tasks) that are waited for, and (graph, tasks) that wait, one for one."""


def merge_graphs(graphs: Sequence[TaskGraph], edges: Sequence[Edges] = ()) -> TaskGraph:
    """One graph of the roles of several; ``edges`` count graphs, and tasks of each."""
    start, roles = (np.cumsum([0, *counts]) for counts in zip(*((of.tasks, of.roles) for of in graphs), strict=True))
    lanes = [graph.lane + first * LANES for graph, first in zip(graphs, roles, strict=False)]
    sources, targets = ([graph.edges[end] + start[role] for role, graph in enumerate(graphs)] for end in (0, 1))
    for source_role, source, role, target in edges:
        sources.append(source + start[source_role])
        targets.append(target + start[role])
    return TaskGraph.of_edges(
        _as_indices(np.concatenate(lanes)),
        int(roles[-1]),
        _as_indices(np.concatenate(sources)),
        _as_indices(np.concatenate(targets)),
    )


def _event_loop() -> Callable[..., int]:
    try:
        from predict.simulation.engine import engine_compiled
    except ImportError:
        return engine_python.run_events
    # One that was built before it told its interface has none.
    same = getattr(engine_compiled, "INTERFACE", None) == engine_python.INTERFACE
    return engine_compiled.run_events if same else engine_python.run_events


run_events = _event_loop()


def simulate(graph: TaskGraph, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timeline:
    """Run the tasks.

    Args:
        seconds: per task, alone on the device.
        compute_slowdown, communication_slowdown: per task, at least 1; read where the task is a collective that runs
            beside compute, the latter also of a call on the lane of its own, beside a collective in flight.

    Raises:
        ValueError: tasks wait for each other in a circle, or a number is not finite or too small.
    """
    start_s, end_s, *beside_s = (of_row[0] for of_row in _run(graph, seconds, compute_slowdown, communication_slowdown))
    last = int(graph.lane[_last_task(graph, end_s)]) // LANES if graph.tasks else 0
    overlap, exposed = (float(sums[last]) if graph.roles else 0.0 for sums in beside_s)
    return Timeline(start_s, end_s, overlap, exposed)


def iteration_seconds(
    graph: TaskGraph, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats
) -> Floats:
    """When the last task ends, as :func:`simulate` runs them, under each row of costs; raises as it does.

    Costs are (tasks,) or (rows, tasks); slow-downs of one row are those of every row of seconds.
    """
    ends_s = end_seconds(graph, seconds, compute_slowdown, communication_slowdown)
    return np.asarray(ends_s.max(axis=-1, initial=0.0))


def end_seconds(graph: TaskGraph, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Floats:
    """When each task ends, in the shape of ``seconds``; else as :func:`iteration_seconds`."""
    _, end_s, *_ = _run(graph, seconds, compute_slowdown, communication_slowdown)
    return end_s.reshape(seconds.shape)


def _run(
    graph: TaskGraph, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """Start and end (rows, tasks), overlapped and exposed communication (rows, roles)."""
    _check("seconds", seconds, 0)
    _check("compute_slowdown", compute_slowdown, 1)
    _check("communication_slowdown", communication_slowdown, 1)
    rows = math.prod(seconds.shape[:-1])
    start_s, end_s = np.zeros((rows, graph.tasks)), np.zeros((rows, graph.tasks))
    overlap_s, exposed_s = np.zeros((rows, graph.roles)), np.zeros((rows, graph.roles))
    finished = run_events(
        graph.lane_start,
        graph.queue,
        graph.waits_for,
        graph.follower_start,
        graph.followers,
        np.ascontiguousarray(seconds, float),
        np.ascontiguousarray(compute_slowdown, float),
        np.ascontiguousarray(communication_slowdown, float),
        start_s,
        end_s,
        overlap_s,
        exposed_s,
        rows,
        LANES,
        _COMPUTE,
        _COMMUNICATION,
        BLOCKING,
    )
    if finished < rows * graph.tasks:
        raise ValueError(
            "the tasks wait for each other in a circle: the order of the plan's streams contradicts its dependencies"
        )
    return start_s, end_s, overlap_s, exposed_s


def _last_task(graph: TaskGraph, end_s: Floats) -> int:
    """The one that ends last; among those of the role's own work, since input is fetched for another iteration."""
    if graph.of_input is not None:
        end_s = np.where(graph.of_input, -np.inf, end_s)
    return int(np.argmax(end_s))


def _check(name: str, values: Floats, least: float) -> None:
    # Of values that hold a NaN both ends are NaN, and no comparison with it holds.
    if values.size and not (values.min() >= least and values.max() < np.inf):
        raise ValueError(f"{name} have to be finite and at least {least:g}")
