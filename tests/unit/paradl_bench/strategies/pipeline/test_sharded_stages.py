"""ZeRO's stages in a pipeline: when units are gathered and reduced, what is updated, and what a rank holds."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from profile_factory import make_network

from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Phase, Plan, Role, Transfer, WeightUpdate, Work
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.memory import pipelined_memory
from predict.search.candidates.space import find_space

E = 4
# Layers of 8x9, 9x10, 10x11 and 11x12 weights and as many biases as rows; relu behind each.
NETWORK = make_network((8, 9, 10, 11, 12))
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")


def settings(schedule: str = "gpipe", **options: object) -> PlanSettings:
    return plan_settings(batch=16, micro_batches=4, schedule=schedule, **options)


def plan(text: str, schedule: str = "gpipe", **options: object) -> Plan:
    strategy = parse_strategy(text)
    return planner_for(strategy).plan(NETWORK, strategy, settings(schedule, **options))


def issued(found: Plan, role: Role, kind: type[Work]) -> list[tuple[int, Work]]:
    return [(task, found.works[work]) for task, work in enumerate(role.work) if isinstance(found.works[work], kind)]


def sizes(found: Plan, role: Role, operation: str) -> list[int]:
    works = (work for _, work in issued(found, role, Collective))
    return [work.message_bytes for work in works if isinstance(work, Collective) and work.operation == operation]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("text", ["z2d2p2", "p2z3d2"])
def test_units_are_gathered_first_and_reduced_last(text: str, schedule: str) -> None:
    found = plan(text, schedule)
    for role in found.roles:
        gathers = [task for task, work in issued(found, role, Collective) if work.operation == "all_gather"]
        reduces = [task for task, work in issued(found, role, Collective) if work.operation == "reduce_scatter"]
        messages = [task for task, work in issued(found, role, Transfer) if work.direction == "send"]
        assert max(gathers) < min(messages)
        assert {int(role.action[task]) for task in gathers} == {0}
        backward = [task for task, phase in enumerate(role.phase) if phase == Phase.BW]
        assert len(reduces) == len(gathers)
        assert min(reduces) > max(backward)
        # Nothing hides them: each waits for all that came before.
        assert all(one < other for one, other in pairwise(reduces))
        assert not sizes(found, role, "all_reduce")


def test_rows_are_padded_once_a_replica() -> None:
    found = plan("z3d2p2")
    sent = Counter(size for role in found.roles for size in sizes(found, role, "all_gather"))
    # Weights have 9, 10, 11 and 12 rows, of 8 to 11 columns, of which two ranks send half, and as many biases.
    assert sum(size * count for size, count in sent.items()) == E * (5 * 9 + 5 * 10 + 6 * 11 + 6 * 12)
    updated = [work for role in found.roles for _, work in issued(found, role, WeightUpdate)]
    assert sum(work.elements for work in updated if isinstance(work, WeightUpdate)) == 5 * 9 + 5 * 10 + 6 * 11 + 6 * 12


def test_each_stage_broadcasts_what_its_replicas_update() -> None:
    found, without = plan("z1d2p2"), plan("d2p2")
    for role, plain in zip(found.roles, without.roles, strict=True):
        (held,) = (work.elements for _, work in issued(without, plain, WeightUpdate) if isinstance(work, WeightUpdate))
        assert sum(sizes(found, role, "broadcast")) == E * held
        (own,) = (work.elements for _, work in issued(found, role, WeightUpdate) if isinstance(work, WeightUpdate))
        assert held / 2 <= own < held
        assert sizes(found, role, "all_reduce") == sizes(without, plain, "all_reduce")


def test_replicas_of_a_stage_hold_their_part() -> None:
    def parts(text: str) -> dict[str, int]:
        return pipelined_memory(NETWORK, parse_strategy(text), settings(optimizer="adam")).parts_bytes

    whole, first, third = parts("d2p2"), parts("z1d2p2"), parts("z3d2p2")
    assert whole["optimizer"] / 2 <= first["optimizer"] < whole["optimizer"]
    assert {**first, "optimizer": 0} == {**whole, "optimizer": 0}
    # Padded rows: a fifth more than half at most.
    for name in ("parameters", "optimizer"):
        assert whole[name] / 2 <= third[name] <= 0.6 * whole[name]
    # What is gathered counts with gradients, which are whole; nothing is exchanged in buckets.
    assert third["gradients"] > whole["gradients"] + whole["parameters"] / 2
    assert third["buckets"] == 0 < whole["buckets"]
    assert parts("z2d2p2") == third


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("z2d2p2", {"recompute": ("all",)}, "beside data parallelism alone; z1d2p2 allows it"),
        ("z1d1p2", {}, "one rank has nothing to shard"),
    ],
)
def test_what_does_not_nest_is_refused(text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(text, **options)


def test_a_search_tries_each_stage_in_pipelines() -> None:
    space = find_space(NETWORK, PlanSettings(batch=16), 4, caps_mb=())
    tried = {str(space.strategies[index]) for index in space.strategy.tolist()}
    assert {"z1d2p2", "p2z1d2", "z2d2p2", "p2z3d2", "z1d4", "z3d4"} <= tried
