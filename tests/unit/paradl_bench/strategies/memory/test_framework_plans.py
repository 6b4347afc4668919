"""What a framework adds up, sends and updates in the place of torch, task by task."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from network_factory import NetworkFactory

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Collective, GradientPass, Plan, RoleBuilder, WeightUpdate, Work
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.gradient_buffer import add_checks

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
    of_part = [work for work in parts if isinstance(work, WeightUpdate) or clips(work)]
    assert len(of_part) == 3
    assert {work.elements for work in of_part} == {ALL // 4}


def clips(work: Work) -> bool:
    return isinstance(work, GradientPass) and work.part in ("norm", "scale")


def test_a_buffer_is_divided_where_it_lies(network: ModelGraph) -> None:
    copies = [work for work in works(network, "d4", "megatron") if isinstance(work, BucketCopy)]
    into = [work for work in copies if work.direction == "into"]
    assert sum(work.bytes for work in into) == ALL * FP32
    assert not any(work.direction == "out" for work in copies)


PIPELINED: dict[str, object] = {"micro_batches": 4, "schedule": "1f1b", "stages": ("down",)}


def of_roles(network: ModelGraph, text: str, preset: str, **chosen: object) -> list[list[str]]:
    """Per role, the labels of its works in the order of the plan."""
    strategy = parse_strategy(text)
    given = {"batch": 16, "dtype": "bf16-weights", "device": "cuda", "preset": preset, **chosen}
    plan: Plan = planner_for(strategy).plan(network, strategy, plan_settings(**given))
    return [[plan.works[number].label for number in role.work] for role in plan.roles]


@pytest.mark.parametrize("cap_bytes", [1, 1 << 30])
def test_a_stage_sends_before_it_divides_and_exchanges(network: ModelGraph, cap_bytes: int) -> None:
    limits = {"first_bucket_bytes": cap_bytes, "bucket_cap_bytes": cap_bytes}
    for preset, before in (("megatron", True), ("", False)):
        _, labels = of_roles(network, "d2p2", preset, **limits, **PIPELINED)
        last_send = max(index for index, label in enumerate(labels) if label == "send gradients")
        exchange = [index for index, label in enumerate(labels) if label in ("copy into bucket", "all_reduce")]
        assert (last_send < min(exchange), last_send > max(exchange)) == (before, not before)


@pytest.mark.parametrize(
    ("text", "options"), [("serial", {}), ("d4", {}), ("z1d4", {"accumulate": 4}), ("p2", PIPELINED)]
)
def test_the_buffer_is_zeroed_first_and_checked_once(
    network: ModelGraph, text: str, options: dict[str, object]
) -> None:
    for labels in of_roles(network, text, "megatron", **options):
        assert labels[0] == "set gradients to zero"
        assert labels.count(labels[0]) == labels.count("check that gradients are finite") == 1
    passes = [work for work in works(network, text, "megatron", **options) if isinstance(work, GradientPass)]
    elements = {part: sum(work.elements for work in passes if work.part == part) for part in ("zero", "check")}
    assert elements == {"zero": ALL, "check": ALL}
    assert not any(isinstance(work, GradientPass) for work in works(network, text, "", **options))


@pytest.mark.parametrize(("text", "passed"), [("e4", 2), ("d2e2", 0), ("t4", 1), ("serial", 1)])
def test_gradients_that_are_not_exchanged_are_checked_too(network: ModelGraph, text: str, passed: int) -> None:
    elements = ALL if text in ("t4", "serial") else WIDTH * INNER
    settings = plan_settings(batch=16, dtype="bf16-weights", device="cuda", preset="megatron")
    builder = RoleBuilder({})
    add_checks(builder, network, parse_strategy(text), settings, frozenset({"up.weight"}), ())
    check = GradientPass(part="check", elements=elements, tensors=1)
    # Replicas of other samples divide them as well.
    divided = BucketCopy(direction="into", bytes=elements * FP32, tensors=1)
    assert list(builder.works) == [check, divided][:passed]


def test_ranks_that_hold_other_experts_share_out_no_equal_parts() -> None:
    from paradl_bench.strategies.frameworks.presets import scatters_gradients

    settings = plan_settings(batch=16, preset="megatron")
    found = {text: scatters_gradients(parse_strategy(text), settings) for text in ("z1d4", "z1d2t2", "z1d2e2", "d4")}
    assert found == {"z1d4": True, "z1d2t2": True, "z1d2e2": False, "d4": False}
