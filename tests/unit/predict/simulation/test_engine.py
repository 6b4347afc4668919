"""The event loop: compiled and in Python alike, and as a simulation in steps of time has it."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.plan.tasks import Ints
from predict.costs.sourced import Floats
from predict.simulation import engine as engines
from predict.simulation import simulator
from predict.simulation.engine import engine_python
from predict.simulation.simulator import LANES, TaskGraph, Timeline, iteration_seconds, simulate

BLOCKING = LANES - 1


class Case(NamedTuple):
    """A graph of several roles and the costs of its tasks."""

    graph: TaskGraph
    seconds: Floats
    compute: Floats
    communication: Floats


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count, roles = draw(st.integers(0, 30)), draw(st.integers(1, 4))
    # No circles: a task waits for those before it alone, and lanes run in the order of numbers.
    lane = [
        LANES * draw(st.integers(0, roles - 1)) + draw(st.sampled_from([0, 0, 1, 1, 2, BLOCKING])) for _ in range(count)
    ]
    pairs = [(source, target) for target in range(count) for source in range(target) if lane[source] != lane[target]]
    edges = draw(st.sets(st.sampled_from(pairs), max_size=40)) if pairs else set()
    times = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 10.0))
    slow = st.one_of(st.just(1.0), st.floats(1.0, 3.0))
    seconds, compute, communication = (
        np.array(draw(st.lists(values, min_size=count, max_size=count)), float) for values in (times, slow, slow)
    )
    source, target = (np.array([edge[end] for edge in sorted(edges)], np.int32) for end in (0, 1))
    return Case(TaskGraph.of_edges(np.array(lane, np.int32), roles, source, target), seconds, compute, communication)


def in_steps(case: Case) -> Timeline:
    """All lanes advance together, from each moment at which a task ends to the next; slow, and plain."""
    graph, lanes = case.graph, case.graph.roles * LANES
    queues = [graph.queue[graph.lane_start[i] : graph.lane_start[i + 1]].tolist() for i in range(lanes)]
    left, waits_for = case.seconds.copy(), graph.waits_for.copy()
    start, end = np.zeros(graph.tasks), np.zeros(graph.tasks)
    beside = np.zeros((graph.roles, 2))
    active: dict[int, int] = {}
    now = 0.0
    while True:
        for lane, queue in enumerate(queues):
            if lane not in active and queue and not waits_for[queue[0]]:
                active[lane] = queue.pop(0)
                start[active[lane]] = now
        if not active:
            break
        slow = dict.fromkeys(active, 1.0)
        for role in range(graph.roles):
            compute, exchange, call = role * LANES, role * LANES + 1, role * LANES + BLOCKING
            if compute in active and exchange in active:
                slow[compute] = case.compute[active[exchange]]
                slow[exchange] = case.communication[active[exchange]]
            if call in active and exchange in active:
                slow[call] = case.communication[active[call]]
        passed = min(left[task] * slow[lane] for lane, task in active.items())
        now += passed
        for role in range(graph.roles):
            if role * LANES + 1 in active or role * LANES + BLOCKING in active:
                beside[role, int(role * LANES in active)] += passed
        for lane, task in list(active.items()):
            if left[task] * slow[lane] > passed:
                left[task] -= passed / slow[lane]
                continue
            end[task] = now
            del active[lane]
            waits_for[graph.followers[graph.follower_start[task] : graph.follower_start[task + 1]]] -= 1
    last = max(range(graph.roles), key=lambda role: end[graph.lane // LANES == role].max(initial=0.0))
    return Timeline(start, end, beside[last, 1], beside[last, 0])


def run(case: Case) -> Timeline:
    return simulate(case.graph, case.seconds, case.compute, case.communication)


def with_engine(monkeypatch: pytest.MonkeyPatch, engine: Callable[..., int]) -> None:
    monkeypatch.setattr(simulator, "run_events", engine)


def assert_same(found: Timeline, wanted: Timeline, tolerance: float) -> None:
    assert found.start_s == pytest.approx(wanted.start_s, rel=tolerance, abs=tolerance)
    assert found.end_s == pytest.approx(wanted.end_s, rel=tolerance, abs=tolerance)


@given(cases())
def test_python_does_what_steps_of_time_do(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        with_engine(patch, engine_python.run_events)
        found, wanted = run(case), in_steps(case)
    assert_same(found, wanted, 1e-12)
    ends = [found.end_s[case.graph.lane // LANES == role].max(initial=0.0) for role in range(case.graph.roles)]
    # Where two roles end together, rounding says which of them is the last.
    if sorted(ends)[-2:-1] != [max(ends)] and all(b - a > 1e-9 for a, b in itertools.pairwise(sorted(ends))):
        assert found.overlap_s == pytest.approx(wanted.overlap_s, rel=1e-12, abs=1e-11)
        assert found.exposed_communication_s == pytest.approx(wanted.exposed_communication_s, rel=1e-12, abs=1e-11)


@given(cases())
def test_the_compiled_loop_does_what_python_does(case: Case) -> None:
    compiled = pytest.importorskip("predict.simulation.engine.engine_compiled")
    lines = []
    for engine in (compiled, engine_python):
        with pytest.MonkeyPatch.context() as patch:
            with_engine(patch, engine.run_events)
            lines.append(run(case))
    assert_same(*lines, 1e-12)
    assert lines[0][2:] == pytest.approx(lines[1][2:], rel=1e-12, abs=1e-12)


def test_many_roles_at_once_do_what_python_does() -> None:
    compiled = pytest.importorskip("predict.simulation.engine.engine_compiled")
    draw = np.random.default_rng(7)
    tasks, roles = 4000, 40
    lane = (draw.integers(roles, size=tasks) * LANES + draw.integers(2, size=tasks)).astype(np.int32)
    ends = np.sort(draw.integers(tasks, size=(2 * tasks, 2)), axis=1)
    source, target = ends[lane[ends[:, 0]] != lane[ends[:, 1]]].T.astype(np.int32)
    graph = TaskGraph.of_edges(lane, roles, source, target)
    case = Case(graph, draw.random(tasks), 1 + draw.random(tasks), 1 + draw.random(tasks))
    lines = []
    for engine in (compiled, engine_python):
        with pytest.MonkeyPatch.context() as patch:
            with_engine(patch, engine.run_events)
            lines.append(run(case))
    assert_same(*lines, 1e-12)


@pytest.mark.parametrize("compiled", [True, False])
@given(cases(), st.integers(1, 4), st.data())
def test_rows_of_costs_take_what_each_takes_alone(compiled: bool, case: Case, rows: int, data: st.DataObject) -> None:
    engine = engine_python
    if compiled:
        engine = pytest.importorskip("predict.simulation.engine.engine_compiled")
    factors = np.array(data.draw(st.lists(st.floats(0.0, 3.0), min_size=rows, max_size=rows)))
    seconds = factors[:, None] * case.seconds
    compute = case.compute + factors[:, None] if data.draw(st.booleans()) else case.compute
    with pytest.MonkeyPatch.context() as patch:
        with_engine(patch, engine.run_events)
        found = iteration_seconds(case.graph, seconds, compute, case.communication)
        of_rows = zip(seconds, np.broadcast_to(compute, seconds.shape), strict=True)
        alone = [simulate(case.graph, *of_row, case.communication).iteration_s for of_row in of_rows]
    assert found.tolist() == alone


def arrays(**changes: Ints) -> list[object]:
    """What the loop takes, for two tasks on one lane each."""
    indices = {
        "lane_start": [0, 1] + [2] * (LANES - 1),
        "queue": [0, 1],
        "waits_for": [0, 1],
        "follower_start": [0, 1, 1],
        "followers": [1],
    }
    graph = {name: np.array(values, np.int32) for name, values in indices.items()} | changes
    ones, results = [np.ones(2) for _ in range(3)], [np.zeros(2), np.zeros(2), np.zeros(1), np.zeros(1)]
    return [*graph.values(), *ones, *results, 1, LANES, 0, 1, BLOCKING]


def test_the_compiled_loop_refuses_arrays_that_point_nowhere() -> None:
    compiled = pytest.importorskip("predict.simulation.engine.engine_compiled")
    assert compiled.run_events(*arrays()) == 2
    wrong = [
        {"followers": np.array([2], np.int32)},
        {"queue": np.array([0, -1], np.int32)},
        {"lane_start": np.array([0, 1, 3] + [2] * (LANES - 2), np.int32)},
        {"follower_start": np.array([0, 1, 2], np.int32)},
        {"waits_for": np.array([0], np.int32)},
        {"lane_start": np.array([0, 1, 2], np.int32)},
    ]
    for rows, message in ((0, "no row"), (2, "do not fit together"), (-1, "no row")):
        given = arrays()
        given[12] = rows
        with pytest.raises(ValueError, match=message):
            compiled.run_events(*given)
    for change in wrong:
        with pytest.raises(ValueError, match="do not fit together"):
            compiled.run_events(*arrays(**change))
    with pytest.raises(TypeError, match="bytes"):
        compiled.run_events(*arrays(queue=np.array([0, 1], np.int64)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "values"),
    [
        (1, np.array([0, 1], np.float32)),
        (1, np.array([0, 1], np.uint32)),
        (1, np.array([0, 1], ">i4")),
        (5, np.array([1, 1], np.int64)),
        (8, np.zeros(2, np.int64)),
    ],
)
def test_the_compiled_loop_refuses_items_of_another_type(place: int, values: object) -> None:
    compiled = pytest.importorskip("predict.simulation.engine.engine_compiled")
    given = arrays()
    given[place] = values
    with pytest.raises(TypeError, match="of another type"):
        compiled.run_events(*given)


@pytest.mark.parametrize("interface", [None, engine_python.INTERFACE + 1])
def test_a_loop_compiled_for_another_interface_is_not_used(
    monkeypatch: pytest.MonkeyPatch, interface: int | None
) -> None:
    stale = ModuleType("predict.simulation.engine.engine_compiled")
    stale.run_events = None  # type: ignore[attr-defined]
    if interface is not None:
        stale.INTERFACE = interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "predict.simulation.engine.engine_compiled", stale)
    monkeypatch.setattr(engines, "engine_compiled", stale, raising=False)
    assert simulator._event_loop() is engine_python.run_events


def test_a_loop_that_was_built_of_this_interface_is_used() -> None:
    compiled = pytest.importorskip("predict.simulation.engine.engine_compiled")
    assert simulator._event_loop() is compiled.run_events


@pytest.mark.parametrize(
    ("place", "value"), [(0, -1e-9), (0, math.nan), (0, math.inf), (1, 0.5), (1, math.nan), (2, 0.0), (2, math.inf)]
)
def test_costs_that_no_task_can_have_are_refused(place: int, value: float) -> None:
    graph = TaskGraph.of_edges(np.array([0, 1], np.int32), 1, np.array([0], np.int32), np.array([1], np.int32))
    costs = [np.ones(2) for _ in range(3)]
    assert simulate(graph, *costs).iteration_s == 2.0
    costs[place][1] = value
    with pytest.raises(ValueError, match="have to be finite and at least"):
        simulate(graph, *costs)
