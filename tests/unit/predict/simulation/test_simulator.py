"""The event simulation: order, dependencies, interference, and segments in the place of tasks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.plan.tasks import Collective, FrameworkOverhead, Phase, Role, RoleBuilder, Stream
from predict.costs.sourced import Floats
from predict.simulation.simulator import TaskGraph, Timeline, coalesce, simulate, sums_within, task_graph

COMPUTE, EXCHANGE = Stream.COMPUTE, Stream.COMMUNICATION


def build(tasks: list[tuple[Stream, tuple[int, ...]]], phases: list[Phase] | None = None) -> Role:
    """Tasks of (stream, dependencies); what they do is of no matter here."""
    builder = RoleBuilder()
    for index, (stream, after) in enumerate(tasks):
        work = (
            FrameworkOverhead(phase="BW") if stream == COMPUTE else Collective(operation="x", message_bytes=1, ranks=2)
        )
        builder.add(work, phases[index] if phases else Phase.BW, stream, after)
    return builder.build("role", 2)


def run(role: Role, seconds: list[float], compute: float = 1.0, communication: float = 1.0) -> Timeline:
    ones = np.ones(role.tasks)
    return simulate(task_graph(role), np.array(seconds), compute * ones, communication * ones)


def test_a_stream_runs_its_tasks_one_after_the_other() -> None:
    line = run(build([(COMPUTE, ())] * 3), [1.0, 0.0, 2.0])
    assert line.start_s.tolist() == [0.0, 1.0, 1.0]
    assert line.end_s.tolist() == [1.0, 1.0, 3.0]


def test_a_task_waits_for_another_stream() -> None:
    line = run(build([(COMPUTE, ()), (EXCHANGE, (0,)), (COMPUTE, (1,))]), [1.0, 2.0, 4.0])
    assert line.start_s.tolist() == [0.0, 1.0, 3.0]
    assert line.iteration_s == 7.0
    assert line.exposed_communication_s == 2.0
    assert line.overlap_s == 0.0


def test_overlap_without_interference_hides_the_exchange() -> None:
    line = run(build([(COMPUTE, ()), (EXCHANGE, (0,)), (COMPUTE, (0,))]), [1.0, 2.0, 5.0])
    assert line.iteration_s == 6.0
    assert line.overlap_s == 2.0
    assert line.exposed_communication_s == 0.0


def test_both_slow_down_while_side_by_side() -> None:
    # The exchange needs 2 at half speed: 4 beside compute, which does 4 / 1.6 = 2.5 of its 5 meanwhile.
    line = run(build([(COMPUTE, ()), (EXCHANGE, ())]), [5.0, 2.0], compute=1.6, communication=2.0)
    assert line.end_s.tolist() == pytest.approx([4.0 + 2.5, 4.0])
    assert line.overlap_s == pytest.approx(4.0)


def test_a_task_that_waits_hinders_nobody() -> None:
    role = build([(COMPUTE, ()), (EXCHANGE, (0,)), (EXCHANGE, ())])
    line = run(role, [3.0, 1.0, 1.0], compute=2.0, communication=2.0)
    # The second exchange stands behind the first in its stream, so nothing runs beside compute.
    assert line.end_s.tolist() == [3.0, 4.0, 5.0]


def test_each_exchange_slows_by_its_own_factors() -> None:
    role = build([(COMPUTE, ()), (EXCHANGE, ()), (EXCHANGE, ())])
    slow = np.array([1.0, 1.0, 4.0])
    line = simulate(task_graph(role), np.array([3.0, 1.0, 1.0]), slow, np.array([1.0, 1.0, 1.0]))
    # Beside the first 1 of compute is done, beside the second 1/4, and the rest alone.
    assert line.end_s[0] == pytest.approx(2.0 + 1.75)


def test_an_empty_role_takes_no_time() -> None:
    assert run(build([]), []).iteration_s == 0.0


def test_a_circle_is_refused() -> None:
    graph = TaskGraph.of_edges(np.array([COMPUTE, EXCHANGE]), 1, np.array([0, 1]), np.array([1, 0]))
    with pytest.raises(ValueError, match="circle"):
        simulate(graph, np.ones(2), np.ones(2), np.ones(2))


def test_compute_runs_merge_into_segments_up_to_each_wait() -> None:
    role = build([(COMPUTE, ()), (COMPUTE, (0,)), (COMPUTE, (1,)), (EXCHANGE, (1,)), (COMPUTE, (2,)), (COMPUTE, (3,))])
    coalesced = coalesce(role)
    assert coalesced.segment.tolist() == [0, 0, 1, 2, 1, 3]
    assert sums_within(coalesced.segment, np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), len(coalesced.first)).tolist() == [
        3.0,
        8.0,
        4.0,
        6.0,
    ]


def test_segments_keep_phases_apart() -> None:
    role = build([(COMPUTE, ()), (COMPUTE, ())], [Phase.FW, Phase.BW])
    assert coalesce(role).phase.tolist() == [Phase.FW, Phase.BW]


@st.composite
def roles(draw: st.DrawFn) -> tuple[Role, Floats, Floats, Floats]:
    count = draw(st.integers(1, 14))
    tasks = []
    for index in range(count):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        tasks.append((draw(st.sampled_from([COMPUTE, COMPUTE, EXCHANGE])), tuple(sorted(after))))
    phases = sorted(draw(st.sampled_from([Phase.FW, Phase.BW])) for _ in range(count))
    seconds = draw(st.lists(st.floats(0.0, 10.0), min_size=count, max_size=count))
    slow = [draw(st.lists(st.floats(1.0, 3.0), min_size=count, max_size=count)) for _ in range(2)]
    return build(tasks, phases), np.array(seconds), np.array(slow[0]), np.array(slow[1])


@given(roles())
def test_segments_take_what_their_tasks_take(case: tuple[Role, Floats, Floats, Floats]) -> None:
    role, seconds, compute, communication = case
    whole = simulate(task_graph(role), seconds, compute, communication)
    coalesced = coalesce(role)
    first = np.unique(coalesced.segment, return_index=True)[1]
    parts = simulate(
        coalesced.graph,
        sums_within(coalesced.segment, seconds, len(coalesced.first)),
        compute[first],
        communication[first],
    )
    assert parts.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9, abs=1e-9)
    assert parts.overlap_s == pytest.approx(whole.overlap_s, rel=1e-9, abs=1e-9)
    for segment in range(len(first)):
        members = np.flatnonzero(coalesced.segment == segment)
        assert parts.start_s[segment] == pytest.approx(whole.start_s[members[0]], rel=1e-9, abs=1e-9)
        assert parts.end_s[segment] == pytest.approx(whole.end_s[members[-1]], rel=1e-9, abs=1e-9)


@given(roles())
def test_segments_across_phases_take_the_same_iteration(case: tuple[Role, Floats, Floats, Floats]) -> None:
    role, seconds, compute, communication = case
    whole = simulate(task_graph(role), seconds, compute, communication)
    coalesced = coalesce(role, across_phases=True)
    first = np.unique(coalesced.segment, return_index=True)[1]
    parts = simulate(
        coalesced.graph,
        sums_within(coalesced.segment, seconds, len(coalesced.first)),
        compute[first],
        communication[first],
    )
    assert len(first) <= len(coalesce(role).phase)
    assert parts.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9, abs=1e-9)


@given(roles())
def test_order_and_dependencies_hold_and_work_is_conserved(case: tuple[Role, Floats, Floats, Floats]) -> None:
    role, seconds, compute, communication = case
    line = simulate(task_graph(role), seconds, compute, communication)
    tiny = 1e-9 * (1 + line.iteration_s)
    for task in range(role.tasks):
        for before in role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]]:
            assert line.end_s[before] <= line.start_s[task] + tiny
    for stream in (COMPUTE, EXCHANGE):
        own = np.flatnonzero(role.stream == stream)
        assert np.all(line.end_s[own][:-1] <= line.start_s[own][1:] + tiny)
    ran = line.end_s - line.start_s
    assert np.all(ran >= seconds - tiny)
    assert np.all(ran <= seconds * 3.0 + tiny)
    is_compute = role.stream == COMPUTE
    assert line.iteration_s >= max(seconds[is_compute].sum(), seconds[~is_compute].sum()) - tiny
    assert line.iteration_s <= seconds.sum() * 3.0 + tiny
    # Without compute, exchange is exposed; with both active, it overlaps; it does nothing else.
    assert line.overlap_s + line.exposed_communication_s == pytest.approx(float(ran[~is_compute].sum()), abs=tiny)


@given(roles(), st.floats(0.0, 5.0))
def test_without_interference_more_work_never_ends_sooner(
    case: tuple[Role, Floats, Floats, Floats], more: float
) -> None:
    role, seconds, _, _ = case
    ones = np.ones(role.tasks)
    longer = seconds.copy()
    longer[0] += more
    before = simulate(task_graph(role), seconds, ones, ones).iteration_s
    after = simulate(task_graph(role), longer, ones, ones).iteration_s
    assert before - 1e-9 <= after <= before + more + 1e-9
