"""Tasks of an action repeated for every micro-batch, and cuts that balance, held against what they stand for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.network.models.traced_networks import traced_network
from paradl_bench.plan.schedules.ordered import Order
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import FrameworkOverhead, Phase, Plan, RoleBuilder, Stream
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline import plan as pipeline_plan
from paradl_bench.strategies.pipeline.even_cuts import EvenCuts
from paradl_bench.strategies.pipeline.repetition import BEFORE, ActionTasks, moved, repeat

FORWARD, BACKWARD = FrameworkOverhead(phase="FW"), FrameworkOverhead(phase="BW")


def builder_of_an_action(before: tuple[int, ...]) -> RoleBuilder:
    """A forward of two tasks and a send, and a backward of two that waits for the forward of its micro-batch."""
    builder = RoleBuilder({FORWARD: 0, BACKWARD: 1})
    builder.add(FORWARD, Phase.FW, Stream.COMPUTE, before)
    builder.add(FORWARD, Phase.FW, Stream.COMPUTE, (0,))
    builder.add(FORWARD, Phase.FW, Stream.COMMUNICATION, (1,))
    builder.add(BACKWARD, Phase.BW, Stream.COMPUTE, (1,))
    builder.add(BACKWARD, Phase.BW, Stream.COMPUTE, (0, 3))
    return builder


def test_a_repeated_action_depends_on_its_forward_and_its_predecessor() -> None:
    first, later = builder_of_an_action(()), builder_of_an_action((BEFORE,))
    for builder in (first, later):
        del builder.phase[3:], builder.stream[3:], builder.work[3:], builder.dependency_start[4:]
        del builder.dependencies[builder.dependency_start[3] :]
    backward = ActionTasks.of_builder(builder_of_an_action((BEFORE,)), 3, 4, (4,))
    distinct = [ActionTasks.of_builder(first, 0, 1), ActionTasks.of_builder(later, 0, 1), backward]
    update = RoleBuilder({FORWARD: 0, BACKWARD: 1})
    update.add(BACKWARD, Phase.WU, Stream.COMPUTE)
    update.add(BACKWARD, Phase.WU, Stream.COMPUTE, (0,))
    # Forward 0, forward 1, backward 1, backward 0.
    order = Order(np.array([0, 1, 2, 2]), np.array([0, 1, 1, 0]), np.zeros(4, int))
    found = repeat(distinct, order, update.arrays())
    rows = np.split(found.dependencies, found.dependency_start[1:-1])
    of_actions = [[], [0], [1], [1], [3], [4], [4], [3, 6], [1], [0, 8]]
    assert [row.tolist() for row in rows] == [*of_actions, [7, 9], [10]]
    assert found.work.tolist() == [0] * 6 + [1] * 6
    assert found.stream.tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert found.phase.tolist() == [0] * 6 + [1] * 4 + [Phase.WU] * 2
    assert found.action is not None
    assert found.action.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, -1, -1]


ARRAYS = ("phase", "stream", "work", "dependency_start", "dependencies", "action")


@pytest.mark.parametrize(
    ("text", "blocks", "options"),
    [
        ("p4", (3, 6, 9), {}),
        ("d2p4t2", (3, 6, 9), {"sequence_parallel": "on", "recompute": ("all",)}),
        ("z1d2p4", (3, 6, 9), {"schedule": "zb", "dtype": "bf16"}),
        ("z1d2p4", (3, 6, 9), {"preset": "megatron", "dtype": "bf16-weights", "clip_norm": 1.0}),
        ("p4", (2, 3, 4, 6, 8, 9, 10), {"schedule": "interleaved"}),
        ("p4", (2, 3, 4, 6, 8, 9, 10), {"schedule": "zbv"}),
        ("p4", (2, 3, 4, 6, 8, 9, 10), {"schedule": "dualpipev", "micro_batches": 8}),
    ],
)
def test_alike_stages_are_planned_as_if_each_was_alone(
    monkeypatch: pytest.MonkeyPatch, text: str, blocks: tuple[int, ...], options: dict[str, object]
) -> None:
    network, strategy = traced_network("gpt2"), parse_strategy(text)
    assert network is not None
    cuts = tuple(f"transformer.h.{block}" for block in blocks)
    settings = plan_settings(**{"batch": 16, "micro_batches": 4, "stages": cuts} | options)
    calls: list[dict[int, int]] = []

    def counted(*arguments: Any) -> ActionTasks:
        calls.append(arguments[-1])
        return moved(*arguments)

    def planned() -> Plan:
        return planner_for(strategy).plan(network, strategy, settings)

    monkeypatch.setattr(pipeline_plan, "moved", counted)
    shared = planned()
    assert {abs(there - here) for cuts in calls for here, there in cuts.items()} == {1}
    numbers = itertools.count()
    monkeypatch.setattr(pipeline_plan, "likeness", lambda shard: next(numbers))
    calls.clear()
    alone = planned()
    assert not calls
    assert shared.works == alone.works
    for one, other in zip(shared.roles, alone.roles, strict=True):
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS)
        assert (one.setup, one.handshake, one.multiplicity) == (other.setup, other.handshake, other.multiplicity)


@st.composite
def cut_cases(draw: st.DrawFn) -> tuple[list[int], list[bool], list[int], int]:
    count = draw(st.integers(1, 7))
    weights = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    trained = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    sent = draw(st.lists(st.integers(0, 3), min_size=count + 1, max_size=count + 1))
    return weights, trained, sent, draw(st.integers(1, count))


def cut_plainly(
    weights: list[int], trained: list[bool], sent: list[int], stages: int
) -> tuple[int, tuple[int, ...]] | None:
    """Largest stage and cuts, from each place back to each before it: what the cut promises, one number at a time."""
    # Up to each place: the largest stage, elements sent at the cuts before it, and the cuts.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(stages):
        further: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in range(1, len(weights) + 1):
            choices = [
                (max(largest, sum(weights[start:end])), elements + (sent[start] if start else 0), (*cuts, start))
                for start, (largest, elements, cuts) in best.items()
                if start < end and any(trained[start:end])
            ]
            if choices:
                further[end] = min(choices)
        best = further
    if len(weights) not in best:
        return None
    largest, _, cuts = best[len(weights)]
    return largest, cuts[1:]


@given(cut_cases())
def test_the_cut_is_that_of_a_plain_recursion(case: tuple[list[int], list[bool], list[int], int]) -> None:
    weights, trained, sent, stages = case
    places = list(range(len(weights) + 1))
    above = np.concatenate([[0.0], np.cumsum(weights)])
    found = EvenCuts(places, above, np.concatenate([[0], np.cumsum(trained)]), sent).into(stages)
    wanted = cut_plainly(*case)
    assert found == (wanted[1] if wanted else None)


@given(cut_cases(), st.permutations(range(1, 8)))
def test_other_cuts_before_it_do_not_change_a_cut(
    case: tuple[list[int], list[bool], list[int], int], orders: list[int]
) -> None:
    weights, trained, sent, _ = case
    above = np.concatenate([[0.0], np.cumsum(weights)])
    cuts = EvenCuts(range(len(weights) + 1), above, np.concatenate([[0], np.cumsum(trained)]), sent)
    for stages in orders:
        wanted = cut_plainly(weights, trained, sent, stages)
        assert cuts.into(stages) == (wanted[1] if wanted else None)


@given(cut_cases())
def test_no_cut_has_a_smaller_largest_stage(case: tuple[list[int], list[bool], list[int], int]) -> None:
    weights, trained, _, stages = case

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))

    def each_trains(cuts: tuple[int, ...]) -> bool:
        return all(any(trained[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))

    allowed = [cuts for cuts in itertools.combinations(range(1, len(weights)), stages - 1) if each_trains(cuts)]
    wanted = cut_plainly(*case)
    assert (wanted[0] if wanted else None) == min(map(largest, allowed), default=None)


def test_among_equal_cuts_the_least_sent_then_the_earliest_wins() -> None:
    above, trained = np.array([0.0, 1.0, 1.0, 2.0]), np.array([0, 1, 2, 3])
    assert EvenCuts([0, 1, 2, 3], above, trained, [9, 5, 4, 9]).into(2) == (2,)
    assert EvenCuts([0, 1, 2, 3], above, trained, [9, 4, 5, 9]).into(2) == (1,)
    assert EvenCuts([0, 1, 2, 3], above, trained, [9, 4, 4, 9]).into(2) == (1,)
