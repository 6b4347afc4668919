"""Windows: parts of a stage's work that begin when all before them is done, and that all behind them waits for.

Layers that are shared compute, call, compute, call, and nothing else goes on meanwhile. Such a part takes what it takes
by itself, whatever surrounds it. Micro-batches repeat a few of them, each of which is simulated once. So stages are
joined by graphs in which each window is one task: a line of 64 has millions of segments, and some 100,000 of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.tasks import Ints, Stream
from predict.costs.sourced import Floats
from predict.simulation.exposure import overlapped_and_exposed
from predict.simulation.pipelines.alike_segments import AlikeSegments, Places, alike_segments, joined
from predict.simulation.simulator import (
    BLOCKING,
    LANES,
    Edges,
    TaskGraph,
    Timeline,
    distinct,
    end_seconds,
    iteration_seconds,
    merge_graphs,
    simulate,
)

_LANES = (int(Stream.COMPUTE), int(Stream.COMMUNICATION), BLOCKING)
"""Of a role, those whose tasks slow each other."""
_NONE = -1


class Windows:
    """Those of one stage.

    Args:
        graph: its segments.
        alike: which of these do the same; such take the same, and are slowed alike.
        work: per segment, the one whose slow-downs it has.
        waits, waited_for: segments that wait for other stages, and that these wait for.
    """

    def __init__(self, graph: TaskGraph, alike: AlikeSegments, work: Places, waits: Ints, waited_for: Ints) -> None:
        self._graph, self.alike, self.work = graph, alike, work
        self.node = _nodes(graph, waits, waited_for)
        """Per segment, the number of the window that holds it, or its own; in the order of their first segments."""
        self.distinct = _distinct_windows(graph, alike.of_segments, self.node)
        self.first = self.distinct.first
        """Per node, its first segment."""
        self.lane, self.on_lanes = graph.lane[self.first], _on_lanes(graph, self.node)
        """Per node, the lane of its first task; and per lane, the nodes with tasks on it."""
        source, target = (self.node[ends] for ends in graph.edges)
        self.waits: tuple[Places, Places] = source[source != target], target[source != target]
        """Nodes, and those that wait for them."""

    @property
    def is_window(self) -> NDArray[np.bool_]:
        """Per node, whether it is a window; else a segment by itself."""
        return np.bincount(self.node) > 1

    @cached_property
    def outer(self) -> TaskGraph:
        """The graph of the nodes."""
        return graph_of_nodes(self.lane, self.on_lanes, self.waits)

    @cached_property
    def _place(self) -> Places:
        """Per segment, which task of the distinct windows it is like; -1 for one by itself."""
        found, order = self.distinct, np.argsort(self.node, kind="stable")
        count = np.bincount(self.node)
        within = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
        number = found.number[self.node[order]]
        in_window = count[self.node[order]] > 1
        place = np.full(len(order), _NONE)
        place[order[in_window]] = found.start[number[in_window]] + within[in_window]
        return place

    def timeline(self, start_s: Floats, end_s: Floats, seconds: Floats, *slowdowns: Floats) -> Timeline:
        """That of all segments, from when nodes start and end under costs per work."""
        found = self.distinct
        kinds, works = self.alike.of_segments[found.tasks], self.work[found.tasks]
        of_works = (slowdown[works] for slowdown in slowdowns)
        inside = simulate(found.graph, self.alike.of_kinds(seconds)[kinds], *of_works)
        starts, ends = start_s[self.node], end_s[self.node]
        in_window = np.flatnonzero(self._place >= 0)
        places = self._place[in_window]
        ends[in_window] = starts[in_window] + inside.end_s[places]
        starts[in_window] += inside.start_s[places]
        return Timeline(starts, ends, *overlapped_and_exposed(starts, ends, self._graph.lane % LANES))


class Nodes(NamedTuple):
    """What a stage's windows are to other stages: a task each, as is every segment in none.

    Attributes:
        graph: of them all. windows: of as few micro-batches as stand for all.
        like: per node, the node of these windows that it is like; None where they are of all micro-batches.
    """

    graph: TaskGraph
    windows: Windows
    like: Places | None = None


class NodeCosts:
    """What the nodes of several stages take.

    Args:
        nodes: of the stages that differ. of_stages: per stage, which of these it has.
    """

    def __init__(self, nodes: Sequence[Nodes], of_stages: Sequence[int]) -> None:
        windows = [of_stage.windows for of_stage in nodes]
        parts = [of_stage.distinct for of_stage in windows]
        # All windows are numbered first, and then all kinds of what stands by itself.
        counts = [len(part.start) for part in parts]
        alike = [of_stage.alike for of_stage in windows]
        self._alike = joined(alike)
        of_segments = np.split(self._alike.of_segments, np.cumsum([len(own.of_segments) for own in alike])[:-1])
        self._kinds = np.concatenate([own[part.tasks] for own, part in zip(of_segments, parts, strict=True)])
        self._works = np.concatenate([own.work[part.tasks] for own, part in zip(windows, parts, strict=True)])
        tasks = np.cumsum([0, *(len(part.tasks) for part in parts)])
        self._start = np.concatenate([part.start + before for part, before in zip(parts, tasks, strict=False)])
        self._graph = merge_graphs([part.graph for part in parts])
        first = np.cumsum([0, *counts])
        number, work = [], []
        for part, own, kinds, before in zip(parts, windows, of_segments, first, strict=False):
            by_itself = first[-1] + kinds[part.first]
            number.append(np.where(own.is_window, part.number + before, by_itself))
            work.append(own.work[part.first])
        like = [slice(None) if of_stage.like is None else of_stage.like for of_stage in nodes]
        self._number, self._work = (
            np.concatenate([of_nodes[which][like[which]] for which in of_stages]) for of_nodes in (number, work)
        )

    def of(self, seconds: Floats, *slowdowns: Floats) -> tuple[Floats, ...]:
        """Seconds and slow-downs of each, stage after stage, of one row of each per work or of several."""
        of_kinds = self._alike.of_kinds(seconds)
        of_tasks = of_kinds.take(self._kinds, axis=-1)
        slowed = (of_works.take(self._works, axis=-1) for of_works in slowdowns)
        of_windows = of_tasks
        if len(self._start):
            of_windows = np.maximum.reduceat(end_seconds(self._graph, of_tasks, *slowed), self._start, axis=-1)
        every = np.concatenate([of_windows, of_kinds], axis=-1)
        return every.take(self._number, axis=-1), *(of_works.take(self._work, axis=-1) for of_works in slowdowns)


class LineNodes:
    """Those of stages that wait for each other.

    Args:
        nodes: of the stages that differ. of_stages: per stage, which of these it has. edges: between nodes.
    """

    def __init__(self, nodes: Sequence[Nodes], of_stages: Sequence[int], edges: Sequence[Edges]) -> None:
        self._costs = NodeCosts(nodes, of_stages)
        graphs = [nodes[number].graph for number in of_stages]
        self._graph = merge_graphs(graphs, edges)
        self._borders = np.cumsum([graph.tasks for graph in graphs])[:-1]

    def iteration_s(self, *costs: Floats) -> Floats:
        """When the last stage ends, under each row of costs per work: seconds, slow-downs."""
        return iteration_seconds(self._graph, *self._costs.of(*costs))

    def last(self, *costs: Floats) -> tuple[int, Floats, Floats, float]:
        """The stage that ends last, when its nodes start and end, and when the last of all ends."""
        line = simulate(self._graph, *self._costs.of(*costs))
        starts, ends = np.split(line.start_s, self._borders), np.split(line.end_s, self._borders)
        last = last_stage(ends)
        return last, starts[last], ends[last], line.iteration_s


def last_stage(ends_s: Sequence[Floats]) -> int:
    """The one that ends last; the first of those that do so at once, but for rounding."""
    of_stages = np.array([ends.max(initial=0.0) for ends in ends_s])
    return int(np.argmax(of_stages >= of_stages.max() * (1 - 1e-12)))


class Distinct(NamedTuple):
    """The windows that differ.

    Attributes:
        first: per node (a window or a task by itself), its first task.
        tasks, start, graph: the tasks of these windows, one behind the other, where each begins among these, and each
            as a role of its own.
        number: per node, the number of a window of these; of a task by itself its kind, behind all windows.
    """

    first: Places
    tasks: Places
    start: Places
    graph: TaskGraph
    number: Places


class _Members(NamedTuple):
    """Segments on the lanes that slow each other, and the edges among them.

    Attributes:
        lane: per member, which lane it is on. source, target: of edges, by members.
        entered, left: per member, whether it waits for a segment elsewhere, or one elsewhere for it.
    """

    lane: Ints
    source: Places
    target: Places
    entered: NDArray[np.bool_]
    left: NDArray[np.bool_]


def _nodes(graph: TaskGraph, waits: Ints, waited_for: Ints) -> Places:
    member = np.flatnonzero(np.isin(graph.lane, _LANES))
    begins = np.ones(graph.tasks, bool)
    begins[member] = _begins(_members(graph, member, waits, waited_for))
    leader = np.where(begins, np.arange(graph.tasks), 0)
    leader[member] = np.maximum.accumulate(leader[member])
    return np.asarray((np.cumsum(begins) - 1)[leader])


def _members(graph: TaskGraph, member: Places, waits: Ints, waited_for: Ints) -> _Members:
    number = np.full(graph.tasks, _NONE)
    number[member] = np.arange(len(member))
    source, target = (number[end] for end in graph.edges)
    inside = (source >= 0) & (target >= 0)
    entered, left = np.zeros(graph.tasks, bool), np.zeros(graph.tasks, bool)
    entered[waits], left[waited_for] = True, True
    entered, left = entered[member], left[member]
    entered[target[~inside & (target >= 0)]] = True
    left[source[~inside & (source >= 0)]] = True
    return _Members(graph.lane[member], source[inside], target[inside], entered, left)


def _begins(members: _Members) -> NDArray[np.bool_]:
    """Per member, whether a node begins with it: a window, or a task by itself."""
    count, alone = len(members.lane), _alone(members)
    # Of a cell, all is between two moments at which all before is done and nothing behind has begun.
    opens = alone | np.append(True, alone[:-1])
    cell = np.cumsum(opens) - 1
    first = np.flatnonzero(opens)
    last = np.append(first[1:], count) - 1
    # Of several tasks, one of which waits for another role, or is waited for, nothing is joined.
    touched = np.bincount(cell, weights=members.entered | members.left, minlength=len(first)) > 0
    joins = (first == last) | ~touched
    goes_on = joins & (first > 0) & ~members.entered[first]
    goes_on[1:] &= joins[:-1] & ~members.left[last[:-1]]
    return np.asarray(np.where(opens, ~goes_on[cell], ~joins[cell]))


def _alone(members: _Members) -> NDArray[np.bool_]:
    """Per member, whether all before it is done when it begins, and all behind it waits for its end."""
    count, own = len(members.lane), members.lane
    place = np.arange(count)
    before, behind, done, waiting = {}, {}, {}, {}
    for lane in _LANES:
        before[lane] = np.maximum.accumulate(np.where(own == lane, place, _NONE))
        behind[lane] = np.minimum.accumulate(np.where(own == lane, place, count)[::-1])[::-1]
        done[lane], waiting[lane] = before[lane] == _NONE, behind[lane] == count
    first_target, last_source = _first_targets(members), _last_sources(members)
    # The last one on a lane is done where this one waits for it, or one before this one that is known to be done; in
    # turn the next one on a lane waits for this one, or for one behind this one that is known to wait.
    for lane in _LANES:
        done[lane] |= first_target[own, before[lane]] <= place
        waiting[lane] |= last_source[own, behind[lane]] >= place
    for lane in _LANES:
        for other in _LANES:
            elsewhere = own != other
            done[lane] |= elsewhere & done[other] & (first_target[other, before[lane]] < place)
            waiting[lane] |= elsewhere & waiting[other] & (last_source[other, behind[lane]] > place)
    known = [(own == lane) | (done[lane] & waiting[lane]) for lane in _LANES]
    return np.asarray(np.logical_and.reduce(known))


def _first_targets(members: _Members) -> NDArray[np.integer]:
    """By lane and member, the first member on the lane that waits for it; beyond all where there is none.

    The last column stands for no member.
    """
    count = len(members.lane)
    found = np.full((LANES, count + 1), count)
    np.minimum.at(found, (members.lane[members.target], members.source), members.target)
    return found


def _last_sources(members: _Members) -> NDArray[np.integer]:
    """By lane and member, the last member on the lane that it waits for; :data:`_NONE` where there is none."""
    found = np.full((LANES, len(members.lane) + 1), _NONE)
    np.maximum.at(found, (members.lane[members.source], members.target), members.source)
    return found


def _distinct_windows(graph: TaskGraph, kind: Places, node: Places) -> Distinct:
    nodes = int(node.max(initial=_NONE)) + 1
    first = np.empty(nodes, np.intp)
    # Of equal places the last assignment stays: that of the first task, where tasks come in reverse.
    first[node[::-1]] = np.arange(len(node) - 1, -1, -1)
    is_window = np.bincount(node, minlength=nodes) > 1
    window = np.where(is_window, np.cumsum(is_window) - 1, _NONE)
    tasks = np.flatnonzero(is_window[node])
    source, target = graph.edges
    inside = node[source] == node[target]
    source, target = source[inside], target[inside]
    # Windows are alike where their tasks are, on the same lanes, and the edges between these.
    of_tasks = kind[tasks] * LANES + graph.lane[tasks]
    # Tasks of other lanes may stand between those of a window: they are not counted.
    place_of = np.cumsum(is_window[node])
    places = place_of[np.stack([source, target])] - place_of[first[node[source]]]
    reach = int(places.max(initial=0)) + 1
    _, of_edges = np.unique(places[0].astype(np.int64) * reach + places[1], return_inverse=True)
    parts = np.concatenate([of_tasks, of_edges + int(of_tasks.max(initial=0)) + 1])
    which = alike_segments(np.concatenate([window[node[tasks]], window[node[source]]]), parts).of_segments
    chosen = np.zeros(nodes, bool)
    _, representative = np.unique(which, return_index=True)
    chosen[np.flatnonzero(is_window)[representative]] = True
    number = len(representative) + kind[first].astype(np.intp)
    # Windows are numbered as they are simulated: by the first of each.
    place = np.empty(len(representative), np.intp)
    place[np.argsort(representative)] = np.arange(len(representative))
    number[is_window] = place[which]
    return Distinct(first, *_by_themselves(graph, node, chosen, (source, target)), number)


def _by_themselves(
    graph: TaskGraph, node: Places, chosen: NDArray[np.bool_], inside: tuple[Ints, Ints]
) -> tuple[Places, Places, TaskGraph]:
    """The tasks of the windows that are chosen, where each begins among these, and their graph: each is a role."""
    tasks = np.flatnonzero(chosen[node])
    tasks = tasks[np.argsort(node[tasks], kind="stable")]
    windows = node[tasks]
    begins = np.append(True, windows[1:] != windows[:-1])[: len(windows)]
    place = np.full(graph.tasks, _NONE, np.int32)
    place[tasks] = np.arange(len(tasks))
    role = np.cumsum(begins) - 1
    source, target = (place[end] for end in inside)
    known = source >= 0
    of_windows = TaskGraph.of_edges(graph.lane[tasks] + role * LANES, int(begins.sum()), source[known], target[known])
    return tasks, np.flatnonzero(begins), of_windows


def _on_lanes(graph: TaskGraph, node: Places) -> tuple[Places, ...]:
    """Per lane, the nodes that have tasks on it, in their order."""
    rows = np.split(node[graph.queue], graph.lane_start[1:-1])
    return tuple(row[np.append(True, row[1:] != row[:-1])[: len(row)]] for row in rows)


def graph_of_nodes(lane: Ints, on_lanes: Sequence[Places], waits: tuple[Places, Places]) -> TaskGraph:
    """The graph of nodes.

    Args:
        lane: of each. on_lanes: per lane, those with tasks on it, in order.
        waits: nodes, and others that wait for these.
    """
    nodes = len(lane)
    # The order on a lane is told by edges where windows were taken to another lane.
    source, target = (
        np.concatenate([ends, *(row[chosen] for row in on_lanes)]).astype(np.int64)
        for ends, chosen in zip(waits, (slice(None, -1), slice(1, None)), strict=True)
    )
    apart = lane[source] != lane[target]
    edges = distinct(target[apart] * (nodes + 1) + source[apart])
    ends = ((edges % (nodes + 1)).astype(np.int32), (edges // (nodes + 1)).astype(np.int32))
    return TaskGraph.of_edges(lane, 1, *ends)
