"""What a framework adds up, sends and updates in the place of torch, task by task."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from network_factory import NetworkFactory

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Collective, GradientClipping, Plan, WeightUpdate, Work
from paradl_bench.strategies.nesting.catalog import planner_for

WIDTH, INNER, CLASSES = 16, 40, 24
FP32, BF16 = 4, 2
BIASES = INNER + CLASSES
ALL = WIDTH * INNER + INNER * CLASSES + BIASES
"""Elements."""


@pytest.fixture
def network() -> ModelGraph:
    factory = NetworkFactory(WIDTH)
    factory.linear("up", INNER)
    factory.linear("down", CLASSES)
    factory.loss()
    return factory.network("pair")


def works(network: ModelGraph, text: str, preset: str, **chosen: object) -> Iterator[Work]:
    """Of all roles, as often as they run."""
    strategy = parse_strategy(text)
    given = {"batch": 16, "dtype": "bf16-weights", "device": "cuda", "preset": preset, **chosen}
    plan: Plan = planner_for(strategy).plan(network, strategy, plan_settings(**given))
    for role in plan.roles:
        yield from (plan.works[number] for number in role.work)


@pytest.mark.parametrize(
    ("text", "options"),
    [("serial", {"accumulate": 4}), ("p2", {"micro_batches": 4, "schedule": "1f1b", "stages": ("down",)})],
)
def test_kernels_add_gradients_of_weights_and_autograd_others(
    network: ModelGraph, text: str, options: dict[str, object]
) -> None:
    added = {
        preset: sum(work.bytes for work in works(network, text, preset, **options) if isinstance(work, BucketCopy))
        for preset in ("", "megatron")
    }
    # The first micro-batch is added to the framework's buffer too.
    assert added == {"": 3 * ALL * BF16, "megatron": 4 * BIASES * FP32}


def sent(network: ModelGraph, text: str, preset: str) -> list[tuple[str, int]]:
    calls = works(network, text, preset, clip_norm=1.0)
    return [(work.operation, work.message_bytes) for work in calls if isinstance(work, Collective)]


def test_equal_parts_are_scattered_and_gathered(network: ModelGraph) -> None:
    assert sent(network, "z1d4", "megatron") == [("reduce_scatter", ALL * FP32 // 4), ("all_gather", ALL * BF16 // 4)]
    assert sent(network, "d4", "megatron") == [("all_reduce", ALL * FP32)]
    assert [name for name, _ in sent(network, "z1d4", "")] == ["all_reduce", *["broadcast"] * 4]


def test_a_stage_scatters_its_gradients(network: ModelGraph) -> None:
    calls = works(network, "z1d2p2", "megatron", micro_batches=4, schedule="1f1b", stages=("down",))
    found = [work for work in calls if isinstance(work, Collective)]
    scattered = [work.message_bytes for work in found if work.operation == "reduce_scatter"]
    assert sum(scattered) == ALL * FP32 // 2
    assert {work.operation for work in found} == {"reduce_scatter", "all_gather"}


def test_a_rank_clips_and_updates_its_part_alone(network: ModelGraph) -> None:
    parts = list(works(network, "z1d4", "megatron", clip_norm=1.0))
    assert {work.elements for work in parts if isinstance(work, GradientClipping | WeightUpdate)} == {ALL // 4}


def test_a_buffer_is_divided_where_it_lies(network: ModelGraph) -> None:
    copies = [work for work in works(network, "d4", "megatron") if isinstance(work, BucketCopy)]
    into = [work for work in copies if work.direction == "into"]
    assert sum(work.bytes for work in into) == ALL * FP32
    assert not any(work.direction == "out" for work in copies)


def test_ranks_that_hold_other_experts_share_out_no_equal_parts() -> None:
    from paradl_bench.strategies.frameworks.presets import scatters_gradients

    settings = plan_settings(batch=16, preset="megatron")
    found = {text: scatters_gradients(parse_strategy(text), settings) for text in ("z1d4", "z1d2t2", "z1d2e2", "d4")}
    assert found == {"z1d4": True, "z1d2t2": True, "z1d2e2": False, "d4": False}
