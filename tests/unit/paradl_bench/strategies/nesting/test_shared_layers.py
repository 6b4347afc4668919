"""Which layers ranks share: the limits of each strategy, layers that were chosen, and where blocks are gathered."""

from __future__ import annotations

from typing import Any

import pytest
from network_factory import NetworkFactory, small

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, Phase, Plan
from paradl_bench.strategies.nesting.catalog import planner_for

BATCH = 4
ELEMENT = 4


def plan(network: ModelGraph, strategy: str, batch: int = BATCH, **options: Any) -> Plan:
    parsed = parse_strategy(strategy)
    return planner_for(parsed).plan(network, parsed, plan_settings(batch=batch, **options))


# Limits


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("f5", "strategy f5: 5 ranks along f5, but p <= 4: fewest filters, layer conv2"),
        ("d2f5", "strategy d2f5: 5 ranks along f5, but p <= 4: fewest filters, layer conv2"),
        ("c7", "strategy c7: 7 ranks along c7, but p <= 6: fewest channels, layer conv2"),
        ("s9", "the input of small has 8 positions along dim 0, fewer than 9 parts"),
        ("s2x2x2", "over 3 dims: an input of small has 2 spatial dims"),
        ("d8", "batch 4 is smaller than 8 ranks"),
        ("d8f2", "batch 4 is smaller than 8 ranks of its data axis"),
        ("d3f2", "batch 4 does not split evenly over 3 ranks of its data axis; the nearest that do are 3 and 6"),
    ],
)
def test_a_limit_that_is_exceeded_names_what_sets_it(strategy: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        plan(small(), strategy)
    assert "\n" not in str(refused.value)


def test_a_network_that_has_nothing_to_split_is_refused() -> None:
    factory = NetworkFactory(4, 8, 8)
    factory.relu("relu")
    factory.flatten("flatten")
    factory.loss()
    network = factory.network("parameterless")
    for strategy, message in (
        ("f2", "no layer of parameterless can be split by its filters"),
        ("c2", "no layer of parameterless can be split by its channels"),
        ("s2", "no layer of parameterless can be cut 2"),
    ):
        with pytest.raises(UserError, match=message):
            plan(network, strategy)


def test_the_spatial_limit_is_that_of_the_most_divisible_layer() -> None:
    (limit,) = planner_for(parse_strategy("s2")).limits(small(), PlanSettings(batch=BATCH))
    assert (limit.ranks, limit.reason) == (64, "at most 8x8 parts, layer conv1")
    assert len(plan(small(), "s8x8").positions) == 64
    with pytest.raises(UserError):
        plan(small(), "s8x9")


def test_a_region_ends_where_a_rank_would_own_nothing() -> None:
    assert plan(small(), "s8").notes == (
        "spatial parallelism ends before pool: its output has 4x4 positions, too few to cut 8",
    )


# Which layers are shared


def shared_layers(found: Plan) -> list[str]:
    """By name, in order; ranks of unlike shards run them as unlike works."""
    works = [work for work in found.works if isinstance(work, Compute) and work.shard and work.phase == "FW"]
    return list(dict.fromkeys(work.layer for work in works))


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ((), ["conv1", "conv2", "fc"]),
        (("fc",), ["fc"]),
        (("conv*",), ["conv1", "conv2"]),
        (("conv[!1]", "fc"), ["conv2", "fc"]),
        (("*",), ["conv1", "conv2", "fc"]),
    ],
)
@pytest.mark.parametrize("strategy", ["f2", "c2", "d2f2"])
def test_only_the_layers_that_were_chosen_are_split(strategy: str, split: tuple[str, ...], expected: list[str]) -> None:
    found = plan(small(), strategy, split=split)
    assert sorted(shared_layers(found)) == expected
    axes = (1,) if strategy == "d2f2" else (0,)
    assert sum(work.axes == axes for work in found.communication(phases=(Phase.FW,))) == len(expected)
    kind = "channel" if strategy == "c2" else "filter"
    left = 3 - len(expected)
    note = f"{kind} parallelism splits {len(expected)} layers, as chosen, and leaves {left} whole"
    assert found.notes == ((note,) if left else ())
    labels = {work.shard for work in found.works if isinstance(work, Compute)} - {""}
    assert labels == {f"{strategy[-2:]}[split={','.join(split)}]" if split else strategy[-2:]}


def test_a_limit_counts_the_layers_that_were_chosen() -> None:
    limits = planner_for(parse_strategy("f2")).limits(small(), plan_settings(batch=BATCH, split=("fc", "conv1")))
    assert [str(limit) for limit in limits] == ["p <= 5: fewest filters, layer fc"]
    assert plan(small(), "f5", split=("fc",)).works
    # conv1's 3 channels count only where nothing else was chosen.
    assert shared_layers(plan(small(), "c4", split=("conv*",))) == ["conv2"]
    with pytest.raises(UserError, match="p <= 3: fewest channels, layer conv1"):
        plan(small(), "c4", split=("conv1",))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (
            "f2",
            {"split": ("conv3",)},
            "unknown layer of small to split 'conv3': did you mean conv.*choices are conv1, ",
        ),
        ("f2", {"split": ("conv2", "lin*")}, r"unknown layer of small to split 'lin\*': choices are conv1, conv2, fc"),
        ("c2", {"split": ("pool",)}, "pool of small can't be: it is neither a convolution nor a fully connected layer"),
        (
            "c4",
            {"split": ("conv1", "fc")},
            "conv1 of small can't be: 6 filters, 3 channels and 1 groups do not split in 4",
        ),
        (
            "s2",
            {"spatial_until": "conv"},
            "unknown layer of small to end spatial parallelism before 'conv': did you mean",
        ),
        ("s2", {"spatial_until": "conv1"}, "no layer of small can be cut 2; conv1: so it was asked"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_name(strategy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        plan(small(), strategy, **options)
    assert "\n" not in str(refused.value)


def test_groups_that_divide_nowhere_are_refused() -> None:
    factory = NetworkFactory(6, 8, 8)
    factory.conv("grouped", 9, groups=3)
    factory.flatten("flatten")
    factory.loss()
    with pytest.raises(
        UserError, match="strategy f4: f4 would split no layer; of grouped, 9 filters, 6 channels and 3"
    ):
        plan(factory.network("grouped"), "f4")


@pytest.mark.parametrize(
    ("until", "shared", "end", "gathered"),
    [
        (None, ["conv1", "relu", "pool", "conv2"], "flatten: view changes the number of dims", 4 * 2 * 4),
        ("conv2", ["conv1", "relu", "pool"], "conv2: so it was asked", 6 * 2 * 4),
        ("relu", ["conv1"], "relu: so it was asked", 6 * 4 * 8),
        ("fc", ["conv1", "relu", "pool", "conv2"], "flatten: view changes the number of dims", 4 * 2 * 4),
    ],
)
@pytest.mark.parametrize("strategy", ["s2", "d2s2"])
def test_blocks_are_gathered_before_the_layer_that_was_given(
    strategy: str, until: str | None, shared: list[str], end: str, gathered: int
) -> None:
    found = plan(small(), strategy, spatial_until=until)
    assert shared_layers(found) == shared
    assert found.notes == (f"spatial parallelism ends before {end}",)
    (gather,) = [work for work in found.of_layers() if isinstance(work, Collective) and work.operation == "all_gather"]
    assert gather.message_bytes == found.local_batch * ELEMENT * gathered


def test_batch_norms_behind_the_spatial_end_synchronise_over_replicas_only() -> None:
    factory = NetworkFactory(4, 8, 8)
    factory.conv("conv1", 4)
    factory.batch_norm("bn1")
    factory.conv("conv2", 4)
    factory.batch_norm("bn2")
    factory.flatten("flatten")
    factory.loss()
    for until, axes in ((None, [(0, 1), (0, 1)]), ("conv2", [(0, 1), (0,)])):
        found = plan(factory.network("normalised"), "d2s2", batch_norm="sync", spatial_until=until)
        forward = found.communication(phases=(Phase.FW,))
        sums = [work for work in forward if isinstance(work, Collective) and work.operation == "all_reduce"]
        assert [work.axes for work in sums] == axes
