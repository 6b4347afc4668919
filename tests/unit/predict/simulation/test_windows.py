"""Windows: iterations end when those of the whole graph do, and what repeats is few tasks."""

from __future__ import annotations

import numpy as np
import pytest

from paradl_bench.plan.tasks import Stream
from predict.simulation.exposure import overlapped_and_exposed
from predict.simulation.pipelines.alike_segments import AlikeSegments
from predict.simulation.pipelines.windows import LineNodes, Nodes, Windows, last_stage
from predict.simulation.simulator import BLOCKING, LANES, Edges, TaskGraph, iteration_seconds, simulate

COMPUTE, CALL, FETCH = int(Stream.COMPUTE), int(Stream.COMMUNICATION), int(Stream.INPUT)
OF_LANES = [COMPUTE, CALL, BLOCKING, FETCH]
KINDS = 12


def graph_of(lanes: list[int], edges: list[tuple[int, int]], roles: int = 1) -> TaskGraph:
    """The graph of tasks on lanes, in which the second of each pair waits for the first."""
    source, target = np.array(edges, np.int32).reshape(-1, 2).T
    return TaskGraph.of_edges(np.array(lanes, np.int32), roles, source, target)


def stages_of(graph: TaskGraph, kind: np.ndarray) -> tuple[list[Windows], list[Edges]]:
    """The windows of each role of a graph, and the edges between roles."""
    role, kinds = graph.lane // LANES, np.arange(kind.max(initial=-1) + 1)
    start = np.searchsorted(role, np.arange(graph.roles))
    source, target = graph.edges
    across = role[source] != role[target]
    edges = [
        (int(role[one]), np.array([one - start[role[one]]]), int(role[other]), np.array([other - start[role[other]]]))
        for one, other in zip(source[across], target[across], strict=True)
    ]
    windows = []
    for number in range(graph.roles):
        own = np.flatnonzero(role == number)
        inside = (role[source] == number) & (role[target] == number)
        of_role = graph_of(
            (graph.lane[own] % LANES).tolist(),
            list(zip(source[inside] - start[number], target[inside] - start[number], strict=True)),
        )
        waits = [waiting for *_, other, (waiting,) in edges if other == number]
        waited_for = [ends for one, (ends,), *_ in edges if one == number]
        alike = AlikeSegments(kinds, kinds, kind[own])
        windows.append(Windows(of_role, alike, kind[own], np.array(waits, int), np.array(waited_for, int)))
    return windows, edges


def line_of(graph: TaskGraph, kind: np.ndarray) -> LineNodes:
    """A graph's roles as stages of a line."""
    windows, edges = stages_of(graph, kind)
    of_nodes = [(one, windows[one].node[ends], other, windows[other].node[waits]) for one, ends, other, waits in edges]
    return LineNodes([Nodes(one.outer, one) for one in windows], range(len(windows)), of_nodes)


def nodes(graph: TaskGraph) -> list[int]:
    found: list[int] = []
    for windows in stages_of(graph, np.arange(graph.tasks))[0]:
        found += (windows.node + max(found, default=-1) + 1).tolist()
    return found


def drawn(seed: int) -> tuple[TaskGraph, np.ndarray]:
    """Two roles that repeat a few drawn parts, fetch now and then, and meet; and the kind of each task."""
    generator = np.random.default_rng(seed)
    chained = generator.uniform(0.6, 1.0)
    shares = [0.55, 0.45, 0.0, 0.0] if seed % 2 else [0.5, 0.35, 0.13, 0.02]
    parts = []
    for _ in range(3):
        length = int(generator.integers(2, 9))
        of_part = generator.choice(4, length, p=shares).tolist()
        waits = [(task - 1, task) for task in range(1, length) if generator.random() < chained]
        waits += [tuple(sorted(generator.choice(length, 2, replace=False).tolist())) for _ in range(length // 4)]
        parts.append((of_part, generator.integers(0, KINDS // 4, length).tolist(), waits))
    lanes: list[int] = []
    kinds: list[int] = []
    edges: list[tuple[int, int]] = []
    for role in range(2):
        begin = len(lanes)
        for number in generator.integers(0, 3, 15):
            start, (of_part, of_kind, waits) = len(lanes), parts[number]
            lanes += [role * LANES + OF_LANES[lane] for lane in of_part]
            # What a kind takes, it takes on one lane.
            kinds += [4 * kind + lane for kind, lane in zip(of_kind, of_part, strict=True)]
            edges += [(start + source, start + target) for source, target in waits]
            if start > begin and generator.random() < chained:
                edges.append((start - 1, start))
    half = lanes.index(LANES + lanes[-1] % LANES)
    # The second role waits for the first one, which is enough to meet and makes no circle.
    edges += [(int(generator.integers(0, half)), int(generator.integers(half, len(lanes)))) for _ in range(4)]
    apart = [(source, target) for source, target in dict.fromkeys(edges) if lanes[source] != lanes[target]]
    return graph_of(lanes, apart, roles=2), np.array(kinds)


@pytest.mark.parametrize("seed", range(80))
def test_iterations_end_as_those_of_the_whole_graph(seed: int) -> None:
    graph, kind = drawn(seed)
    generator, line = np.random.default_rng(seed), line_of(graph, kind)
    for _ in range(5):
        of_kinds, slowdowns = generator.exponential(size=(3, KINDS)), 1 + 2 * generator.random((2, KINDS))
        of_tasks = [of_kind[kind] for of_kind in slowdowns]
        expected = iteration_seconds(graph, of_kinds[:, kind], *of_tasks)
        assert line.iteration_s(of_kinds, *slowdowns) == pytest.approx(expected, rel=1e-12)
        one = line.iteration_s(of_kinds[0], *slowdowns)
        assert one == pytest.approx(expected[0], rel=1e-12)


@pytest.mark.parametrize("seed", range(80))
def test_the_last_stage_runs_as_in_the_whole_graph(seed: int) -> None:
    graph, kind = drawn(seed)
    generator = np.random.default_rng(seed)
    of_kinds, slowdowns = generator.exponential(size=KINDS), 1 + 2 * generator.random((2, KINDS))
    last, start_s, end_s, iteration_s = line_of(graph, kind).last(of_kinds, *slowdowns)
    of_last = stages_of(graph, kind)[0][last].timeline(start_s, end_s, of_kinds, *slowdowns)
    whole = simulate(graph, of_kinds[kind], *(of_kind[kind] for of_kind in slowdowns))
    own = graph.lane // LANES == last
    assert last == last_stage([whole.end_s[graph.lane // LANES == role] for role in range(2)])
    assert iteration_s == pytest.approx(whole.iteration_s, rel=1e-12)
    assert of_last.start_s == pytest.approx(whole.start_s[own], rel=1e-12, abs=1e-12)
    assert of_last.end_s == pytest.approx(whole.end_s[own], rel=1e-12)
    assert of_last.overlap_s == pytest.approx(whole.overlap_s, abs=1e-12)
    assert of_last.exposed_communication_s == pytest.approx(whole.exposed_communication_s, abs=1e-12)
    lane = graph.lane[own] % LANES
    assert overlapped_and_exposed(whole.start_s[own], whole.end_s[own], lane) == pytest.approx(
        (whole.overlap_s, whole.exposed_communication_s), abs=1e-12
    )


def test_of_stages_that_end_at_once_the_first_counts() -> None:
    ends = [np.array([1.0, 2.0]), np.array([3.0 - 1e-15]), np.array([3.0])]
    assert last_stage(ends) == 1
    assert last_stage([np.zeros(0), np.array([0.5])]) == 1


def test_drawn_graphs_have_windows() -> None:
    graphs = [drawn(seed)[0] for seed in range(80)]
    assert sum(len(set(nodes(graph))) for graph in graphs) < 0.8 * sum(graph.tasks for graph in graphs)


def test_compute_and_its_calls_in_turn_are_one_task() -> None:
    graph = graph_of([COMPUTE, CALL] * 20, [(task, task + 1) for task in range(39)])
    assert set(nodes(graph)) == {0}


def test_a_window_holds_what_goes_on_beside_its_calls() -> None:
    # compute, then a call beside more compute, then compute that waits for both
    graph = graph_of([COMPUTE, COMPUTE, CALL, COMPUTE, CALL, COMPUTE], [(0, 2), (2, 3), (3, 4), (4, 5)])
    assert nodes(graph) == [0, 0, 0, 0, 0, 0]
    kind = np.arange(6)
    seconds, slow = np.array([1.0, 3.0, 2.0, 1.0, 1.0, 1.0]), np.full(6, 2.0)
    # Beside each other 4 s of the call pass, and 2 s of compute's 3; then 1 s is left.
    assert line_of(graph, kind).iteration_s(seconds, slow, slow) == pytest.approx(1 + 4 + 1 + 1 + 1 + 1)


def test_what_runs_beside_a_send_stays_apart() -> None:
    # compute, send | compute beside the send | a call behind both, compute, a call; another role receives
    lanes = [COMPUTE, CALL, COMPUTE, CALL, COMPUTE, CALL, LANES + COMPUTE]
    graph = graph_of(lanes, [(0, 1), (2, 3), (3, 4), (4, 5), (1, 6)], 2)
    assert nodes(graph) == [0, 1, 2, 3, 3, 3, 4]


def test_what_another_role_waits_for_ends_a_window() -> None:
    lanes = [COMPUTE, CALL, COMPUTE, CALL, LANES + COMPUTE]
    chain = [(0, 1), (1, 2), (2, 3)]
    assert nodes(graph_of(lanes, chain, 2)) == [0, 0, 0, 0, 1]
    assert nodes(graph_of(lanes, [*chain, (1, 4)], 2)) == [0, 0, 1, 1, 2]


def test_calls_on_a_later_lane_hide_no_window() -> None:
    # compute and its calls in turn; then calls beside an exchange, on the third lane
    lanes = [COMPUTE, CALL, COMPUTE, CALL, COMPUTE, CALL, BLOCKING, COMPUTE, LANES + COMPUTE]
    chain = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (4, 6), (6, 7)]
    assert nodes(graph_of(lanes, [*chain, (5, 8)], 2)) == [0, 0, 0, 0, 0, 1, 2, 3, 4]


def test_what_is_fetched_between_makes_no_windows_alike() -> None:
    # Both roles have tasks of the same kinds. The third of one runs beside its call, that of the other waits for it.
    # A fetch in the second role makes both edges as long, counted in tasks of the graph.
    second = LANES + COMPUTE
    lanes = [COMPUTE, CALL, COMPUTE, COMPUTE, second, LANES + CALL, LANES + FETCH, second, second]
    graph = graph_of(lanes, [(0, 1), (1, 3), (4, 5), (5, 7)], 2)
    kind, seconds, none = np.array([0, 1, 2, 2, 0, 1, 3, 2, 2]), np.array([1.0, 2.0, 2.0, 0.0]), np.ones(4)
    assert nodes(graph) == [0, 0, 0, 0, 1, 1, 2, 1, 1]
    assert line_of(graph, kind).iteration_s(seconds, none, none) == 1 + 2 + 2 + 2


def test_an_empty_graph_takes_no_time() -> None:
    nothing = np.zeros(0)
    line = line_of(graph_of([], []), np.zeros(0, np.intp))
    assert line.iteration_s(np.zeros((2, 0)), nothing, nothing).tolist() == [0.0, 0.0]
