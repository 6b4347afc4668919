"""Where filter parallelism may scatter the gradient of a layer's input, and which part of it each rank then needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_factory import NetworkFactory

from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.kind import TensorArgument
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Phase, Plan
from paradl_bench.strategies.filter.plan import FILTERS
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.splitting.channel_shards import SplitLayers

ELEMENT = 4


def split(network: ModelGraph, ranks: int, **options: object) -> SplitLayers:
    settings = plan_settings(**{"batch": 2, "filter_backward": "reduce-scatter", **options})
    return FILTERS.layers(network, ranks, settings)


def plan(network: ModelGraph, strategy: str, **options: object) -> Plan:
    parsed = parse_strategy(strategy)
    settings = plan_settings(**{"batch": 2, "filter_backward": "reduce-scatter", **options})
    return planner_for(parsed).plan(network, parsed, settings)


def backward(found: Plan, role: int = 0) -> list[tuple[str, int]]:
    works = found.communication(role, phases=(Phase.BW,))
    return [(work.operation, work.message_bytes) for work in works if isinstance(work, Collective)]


def chain_of_all() -> ModelGraph:
    """4x8x8 -> conv 6 -> relu -> pool -> conv 5 -> dropout, mean to 2x2 -> flatten -> fc 7 -> relu -> fc 3."""
    factory = NetworkFactory(4, 8, 8)
    factory.conv("conv1", 6)
    factory.relu("relu1")
    factory.pool("pool", 2)
    factory.conv("conv2", 5)
    shape = TensorArgument((2, 5, 4, 4))
    factory.call("dropout", "dropout", (shape, 0.5, True), (5, 4, 4), ("conv2",))
    factory.call("mean", "adaptive_avg_pool2d", (shape, (2, 2)), (5, 2, 2), ("dropout",))
    factory.flatten("flatten")
    factory.linear("fc1", 7)
    factory.relu("relu2")
    factory.linear("fc2", 3)
    factory.loss()
    return factory.network("all")


def test_gradient_parts_are_the_filters_of_the_producing_layer() -> None:
    network = chain_of_all()
    found = split(network, 2)
    names = {network.layers[index].name: parts for index, parts in found.gradients.parts.items()}
    # Uneven filters: 5 are 3 and 2, of 4 positions each behind the flatten; 7 are 4 and 3.
    assert names == {"conv2": ((0, 3), (3, 6)), "fc1": ((0, 12), (12, 20)), "fc2": ((0, 4), (4, 7))}
    assert found.gradients.whole == {}


def test_each_rank_keeps_as_much_as_the_longest_part() -> None:
    found = plan(chain_of_all(), "f2")
    sizes = [2 * ELEMENT * elements for elements in (4, 12, 3 * 16)]
    assert backward(found) == [("reduce_scatter", size) for size in sizes]
    assert backward(found, 1) == backward(found, 0)
    assert "filter parallelism reduce-scatters 3 of 3 input gradients" in found.notes
    halves = plan(chain_of_all(), "f2", filter_backward="all-reduce")
    assert [size for _, size in backward(halves)] == [2 * ELEMENT * elements for elements in (7, 20, 6 * 16)]


def test_a_whole_layer_between_two_split_ones_ends_no_chain() -> None:
    found = split(chain_of_all(), 2, split=("conv1", "fc*"))
    network = chain_of_all()
    assert {network.layers[index].name for index in found.gradients.parts} == {"fc2"}
    assert found.gradients.whole == {"fc1": "conv2 has parameters"}


def transposed(factory: NetworkFactory) -> None:
    factory.call("turn", "transpose", (TensorArgument((2, 6, 8, 8)), 1, 2), (8, 6, 8), ("conv1",))


def softened(factory: NetworkFactory) -> None:
    factory.call("soft", "softmax", (TensorArgument((2, 6, 8, 8)), 1), (6, 8, 8), ("conv1",))


def cut_across(factory: NetworkFactory) -> None:
    """Six channels of 64 positions become four rows of 96."""
    factory.call("rows", "view", (TensorArgument((2, 6, 8, 8)), 4, 8, 12), (4, 8, 12), ("conv1",))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda factory: factory.batch_norm("bn"), "bn has parameters"),
        (transposed, "turn moves channels"),
        (softened, "soft mixes channels"),
        (cut_across, "rows moves channels"),
    ],
)
def test_every_rank_needs_all_gradients_if_channels_mix(
    between: Callable[[NetworkFactory], object], reason: str
) -> None:
    factory = NetworkFactory(4, 8, 8)
    factory.conv("conv1", 6)
    between(factory)
    factory.conv("conv2", 8)
    factory.flatten("flatten")
    factory.loss()
    network = factory.network("broken")
    ranks = 3
    assert split(network, ranks).gradients.whole == {"conv2": reason}
    found = plan(network, f"f{ranks}")
    assert [operation for operation, _ in backward(found)] == ["all_reduce"]
    note = f"filter parallelism reduce-scatters 0 of 1 input gradients; it all-reduces those of conv2 ({reason})"
    assert note in found.notes


def branches(left: int, right: int) -> ModelGraph:
    """conv 6 -> (conv, conv) -> their sum (or else the first) and what both read -> conv."""
    factory = NetworkFactory(4, 8, 8)
    factory.conv("conv1", 6)
    factory.conv("left", left, read="conv1")
    factory.conv("right", right, read="conv1", groups=right // 3)
    factory.add("sum", "left", "right")
    factory.relu("relu")
    factory.add("skip", "relu", "conv1")
    factory.conv("conv2", 6)
    factory.flatten("flatten")
    factory.loss()
    return factory.network("branches")


def test_branches_may_join_where_filters_are_cut_alike() -> None:
    network = branches(6, 6)
    # Six filters in one group over four ranks: 2, 2, 1, 1; in two groups: 2, 1, 2, 1.
    for ranks, whole in ((2, {}), (4, {"conv2": "it reads unlike filters"})):
        found = split(network, ranks)
        assert found.gradients.whole == whole
        named = {network.layers[index].name for index in found.gradients.parts}
        assert named == {"left", "right", "conv2"} - set(whole)


def test_what_is_broadcast_is_not_followed() -> None:
    factory = NetworkFactory(4, 8, 8)
    factory.conv("conv1", 6)
    shapes = TensorArgument((2, 6, 8, 8)), TensorArgument((2, 6, 1, 1))
    factory.call("mean", "adaptive_avg_pool2d", (shapes[0], (1, 1)), (6, 1, 1), ("conv1",))
    factory.call("gate", "mul", shapes, (6, 8, 8), ("conv1", "mean"))
    factory.conv("conv2", 6)
    factory.flatten("flatten")
    factory.loss()
    assert split(factory.network("gated"), 2).gradients.whole == {"conv2": "gate mixes channels"}


def test_many_layers_are_counted_and_three_named() -> None:
    factory = NetworkFactory(4, 8, 8)
    factory.conv("conv0", 4)
    for number in range(1, 6):
        factory.batch_norm(f"bn{number}")
        factory.conv(f"conv{number}", 4)
    factory.flatten("flatten")
    factory.loss()
    (note,) = plan(factory.network("normed"), "f2").notes
    assert note.endswith("0 of 5 input gradients; it all-reduces those of conv1 (bn1 has parameters), conv2 (bn2 has "
                         "parameters), conv3 (bn3 has parameters), 2 more")  # fmt: skip


@given(st.lists(st.integers(1, 6).map(lambda n: 4 * n), min_size=2, max_size=5), st.sampled_from([2, 4]))
def test_a_chain_scatters_what_footnote_2_of_paradl_says(filters: list[int], ranks: int) -> None:
    factory = NetworkFactory(8, 4, 4)
    for number, width in enumerate(filters):
        factory.conv(f"conv{number}", width)
        factory.relu(f"relu{number}")
    factory.flatten("flatten")
    factory.loss()
    found = backward(plan(factory.network("chain"), f"f{ranks}"))
    assert {operation for operation, _ in found} == {"reduce_scatter"}
    assert sum(size for _, size in found) == sum(2 * ELEMENT * width * 16 for width in filters[:-1]) // ranks


def test_channel_parallelism_gathers_all_the_same() -> None:
    assert backward(plan(chain_of_all(), "c2")) == backward(plan(chain_of_all(), "c2", filter_backward="all-reduce"))
