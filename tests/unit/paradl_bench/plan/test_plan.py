"""Plans: tasks as arrays that validate themselves, with equal work stored once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.plan.settings import Limit, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import (
    BucketCopy,
    Collective,
    Compute,
    FrameworkOverhead,
    Phase,
    Plan,
    Role,
    RoleBuilder,
    Stream,
    WeightUpdate,
    Work,
)

ALL_REDUCE = Collective(operation="all_reduce", message_bytes=4096, ranks=2)


def role(multiplicity: int = 2, **change: Any) -> Role:
    builder = RoleBuilder()
    forward = builder.add(Compute(layer="conv1", operation="conv()", phase="FW"), Phase.FW, Stream.COMPUTE)
    backward = builder.add(Compute(layer="conv1", operation="conv()", phase="BW"), Phase.BW, Stream.COMPUTE, (forward,))
    exchange = builder.add(ALL_REDUCE, Phase.GE, Stream.COMMUNICATION, (backward,))
    update = WeightUpdate(optimizer="sgd", elements=1024, tensors=1)
    builder.add(update, Phase.WU, Stream.COMPUTE, (backward, exchange))
    return Role(name="replica", multiplicity=multiplicity, arrays=dataclasses.replace(builder.arrays(), **change))


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_tasks_become_arrays_in_insertion_order() -> None:
    replica = role()
    assert replica.tasks == 4
    assert replica.phase.tolist() == [Phase.FW, Phase.BW, Phase.GE, Phase.WU]
    assert replica.stream.tolist() == [Stream.COMPUTE, Stream.COMPUTE, Stream.COMMUNICATION, Stream.COMPUTE]
    assert replica.dependency_start.tolist() == [0, 0, 1, 2, 4]
    assert replica.dependencies.tolist() == [0, 1, 1, 2]


works: st.SearchStrategy[Work] = st.one_of(
    st.builds(FrameworkOverhead, phase=st.sampled_from(["FW", "BW"])),
    st.builds(Collective, operation=st.just("all_reduce"), message_bytes=st.integers(1, 3), ranks=st.integers(2, 3)),
    st.builds(BucketCopy, direction=st.sampled_from(["into", "out"]), bytes=st.integers(1, 2), tensors=st.just(1)),
)


@st.composite
def task_lists(draw: st.DrawFn) -> list[tuple[Work, tuple[int, ...]]]:
    tasks: list[tuple[Work, tuple[int, ...]]] = []
    for index in range(draw(st.integers(0, 12))):
        earlier = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        tasks.append((draw(works), tuple(sorted(earlier))))
    return tasks


@given(task_lists())
def test_equal_work_is_stored_once_and_found_by_every_task(tasks: list[tuple[Work, tuple[int, ...]]]) -> None:
    builder = RoleBuilder()
    for work, after in tasks:
        builder.add(work, Phase.FW, Stream.COMPUTE, after)
    built = builder.build("any", 1)
    stored = list(builder.works)
    assert len(stored) == len({work for work, _ in tasks})
    for index, (work, after) in enumerate(tasks):
        assert stored[built.work[index]] == work
        row = built.dependencies[built.dependency_start[index] : built.dependency_start[index + 1]]
        assert tuple(row) == after


@given(task_lists(), task_lists(), st.integers(-1, 3))
def test_repeated_tasks_wait_as_if_appended_again(
    before: list[tuple[Work, tuple[int, ...]]], own: list[tuple[Work, tuple[int, ...]]], times: int
) -> None:
    repeated, appended = RoleBuilder(), RoleBuilder()
    start = len(before)
    for builder, count in ((repeated, 1), (appended, 1 + max(times, 0))):
        for work, after in before:
            builder.add(work, Phase.FW, Stream.COMPUTE, after)
        for turn in range(count):
            for index, (work, after) in enumerate(own):
                # Every turn waits for the last task in front of all turns as well.
                inside = tuple(start + turn * len(own) + task for task in after)
                builder.add(work, Phase.BW, Stream(index % 2), (*inside, *range(start)[-1:]))
    assert repeated.repeat(start, times, start) == len(own) * max(times, 0)
    assert repeated == appended


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stream": ints(0, 0)}, "differ in length"),
        ({"dependency_start": ints(0, 0, 1, 2)}, "differ in length"),
        ({"dependencies": ints(0, 1, 1)}, "does not part the dependencies"),
        ({"dependency_start": ints(1, 1, 1, 2, 4)}, "does not part the dependencies"),
        ({"dependency_start": ints(0, 2, 1, 2, 4)}, "does not part the dependencies"),
        ({"dependencies": ints(0, 1, 1, 3)}, "waits for a later one"),
        ({"dependencies": ints(1, 1, 1, 2)}, "waits for a later one"),
        ({"dependencies": ints(-1, 1, 1, 2)}, "waits for a later one"),
    ],
)
def test_tasks_validate_themselves(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        role(**change)


def test_a_role_is_played_by_a_rank_at_least() -> None:
    with pytest.raises(ValueError, match="role 'replica' stands for 0 ranks"):
        role(0)


def plan(**change: Any) -> Plan:
    builder = RoleBuilder()
    exchanges = [
        builder.add(Collective(operation="all_reduce", message_bytes=size, ranks=4), Phase.GE, Stream.COMMUNICATION)
        for size in (4096, 1024, 4096)
    ]
    builder.add(FrameworkOverhead(phase="FW"), Phase.FW, Stream.COMPUTE, tuple(exchanges))
    settings: dict[str, Any] = {
        "strategy": parse_strategy("d4"),
        "network": "tiny",
        "local_batch": 8,
        "works": tuple(builder.works),
        "roles": (builder.build("replica", 4),),
    }
    return Plan(**(settings | change))


def test_a_plan_counts_the_collectives_of_an_iteration() -> None:
    assert plan().collectives() == {("all_reduce", 4096, 4): 2, ("all_reduce", 1024, 4): 1}


def test_roles_add_up_to_the_ranks_of_the_strategy() -> None:
    with pytest.raises(ValueError, match="roles of d8 do not add up to 8 ranks"):
        plan(strategy=parse_strategy("d8"))


def test_a_task_that_points_at_no_work_is_refused() -> None:
    with pytest.raises(ValueError, match="'replica': a task points at no work of the plan"):
        plan(works=(ALL_REDUCE,))


def test_a_plan_without_tasks_is_an_idle_rank() -> None:
    idle = RoleBuilder().build("idle", 4)
    assert plan(roles=(idle,), works=()).collectives() == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [({"batch": 0}, "batch has to be at least 1"), ({"bucket_cap_bytes": -1}, "limits of buckets")],
)
def test_settings_validate_themselves(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plan_settings(**({"batch": 8} | change))


def test_a_limit_reads_as_a_report_prints_it() -> None:
    assert str(Limit(axis="filter", ranks=64, reason="fewest filters, layer conv1")) == (
        "p <= 64: fewest filters, layer conv1"
    )
