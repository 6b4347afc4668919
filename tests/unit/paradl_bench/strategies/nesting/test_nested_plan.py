"""Plans of filter, channel and spatial parallelism and their nestings, against cases by hand and the papers' sums."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_factory import NetworkFactory, small

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import all_groups, degree_of, group_axes, group_of, positions, rank_at
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import (
    BucketCopy,
    Collective,
    Communication,
    Compute,
    FrameworkOverhead,
    HaloExchange,
    Phase,
    Plan,
    Stream,
    Transfer,
    WeightUpdate,
    Work,
)
from paradl_bench.strategies.nesting.catalog import planner_for

BATCH = 4
ELEMENT = 4


def plan(network: ModelGraph, strategy: str, batch: int = BATCH, **options: Any) -> Plan:
    parsed = parse_strategy(strategy)
    return planner_for(parsed).plan(network, parsed, plan_settings(batch=batch, **options))


def chain(*filters: int, channels: int = 8, extent: int = 16, kernel: int = 3) -> ModelGraph:
    """Convolutions that keep the extent, one after the other."""
    factory = NetworkFactory(channels, extent, extent)
    for index, width in enumerate(filters, start=1):
        factory.conv(f"conv{index}", width, kernel, padding=kernel // 2)
    factory.flatten("flatten")
    factory.loss()
    return factory.network("chain")


def spelled(found: Plan, role: int = 0) -> list[str]:
    """A role's tasks in order, but for the time between operations."""

    def spell(work: Work) -> str:
        if isinstance(work, Compute):
            return f"{work.phase} {work.layer}{work.shard and ':' + work.shard}"
        if isinstance(work, Collective):
            return f"> {work.operation} {work.message_bytes}/{work.ranks}"
        if isinstance(work, HaloExchange):
            return f"> halo out {work.sends_bytes} in {work.receives_bytes}"
        if isinstance(work, BucketCopy):
            return f"copy {work.direction}"
        assert isinstance(work, WeightUpdate)
        return f"WU {work.elements}"

    works = [found.works[index] for index in found.roles[role].work]
    return [spell(work) for work in works if not isinstance(work, FrameworkOverhead)]


def test_filter_gathers_outputs_and_reduces_input_gradients() -> None:
    found = plan(small(), "f2")
    # Filters 6, 4 and 5 over two ranks are 3, 2 and 3 of the longer shard.
    gather1, gather2, gather3 = (BATCH * ELEMENT * elements for elements in (3 * 64, 2 * 16, 3))
    reduce2, reduce3 = (BATCH * ELEMENT * elements for elements in (6 * 16, 64))
    assert spelled(found) == [
        *["FW conv1:f2", f"> all_gather {gather1}/2", "FW relu", "FW pool"],
        *["FW conv2:f2", f"> all_gather {gather2}/2", "FW flatten", "FW fc:f2", f"> all_gather {gather3}/2", "FW loss"],
        *["BW loss", "BW fc:f2", f"> all_reduce {reduce3}/2", "BW flatten"],
        *["BW conv2:f2", f"> all_reduce {reduce2}/2", "BW pool", "BW relu", "BW conv1:f2"],
        f"WU {3 * 27 + 3 + 2 * 54 + 3 * 64 + 3}",
    ]
    assert spelled(found, 1)[-1] == f"WU {3 * 27 + 3 + 2 * 54 + 2 * 64 + 2}"
    assert found.positions == (0, 1)
    assert (found.exchange_axes, found.roles[0].setup) == ((), ())


def test_channel_reduces_partial_sums_and_gathers_input_gradients() -> None:
    found = plan(small(), "c2")
    # The first layer's 3 channels are 2 and 1; nobody needs its input's gradient.
    reduce1, reduce2, reduce3 = (BATCH * ELEMENT * elements for elements in (6 * 64, 4 * 16, 5))
    gather2, gather3 = (BATCH * ELEMENT * elements for elements in (3 * 16, 32))
    assert spelled(found) == [
        *["FW conv1:c2", f"> all_reduce {reduce1}/2", "FW relu", "FW pool"],
        *["FW conv2:c2", f"> all_reduce {reduce2}/2", "FW flatten", "FW fc:c2", f"> all_reduce {reduce3}/2", "FW loss"],
        *["BW loss", "BW fc:c2", f"> all_gather {gather3}/2", "BW flatten"],
        *["BW conv2:c2", f"> all_gather {gather2}/2", "BW pool", "BW relu", "BW conv1:c2"],
        f"WU {6 * 18 + 6 + 4 * 27 + 5 * 32 + 5}",
    ]


def test_a_first_layer_of_few_channels_runs_whole() -> None:
    found = plan(small(), "c4")
    assert spelled(found)[0] == "FW conv1"
    assert found.notes == (
        "channel parallelism does not split layer conv1: 6 filters, 3 channels and 1 groups do not split in 4",
    )


def test_spatial_exchanges_halos_and_gathers_before_what_needs_all_positions() -> None:
    found = plan(small(), "s2")
    row1, row2, gathered = (BATCH * ELEMENT * elements for elements in (3 * 8, 6 * 4, 4 * 2 * 4))
    whole = 6 * 27 + 6 + 4 * 54 + 5 * 64 + 5
    one = spelled(found)
    # Nobody needs the gradient of the network's input.
    assert [task for task in one if not task.startswith(("copy", "> all_reduce"))] == [
        *[f"> halo out ({row1},) in ({row1},)", "FW conv1:s2", "FW relu:s2", "FW pool:s2"],
        *[f"> halo out ({row2},) in ({row2},)", "FW conv2:s2"],
        *[f"> all_gather {gathered}/2", "FW flatten", "FW fc", "FW loss", "BW loss", "BW fc", "BW flatten"],
        *["BW conv2:s2", f"> halo out ({row2},) in ({row2},)", "BW pool:s2", "BW relu:s2", "BW conv1:s2"],
        f"WU {whole}",
    ]
    assert [task for task in one if task.startswith("> all_reduce")] == [f"> all_reduce {ELEMENT * whole}/2"]
    assert found.exchange_axes == (0,)
    assert found.notes == ("spatial parallelism ends before flatten: view changes the number of dims",)


def test_edge_ranks_share_one_role_and_inner_ranks_another() -> None:
    found = plan(chain(8, extent=12), "d2s3")
    assert [(role.name, role.multiplicity) for role in found.roles] == [("replica 0", 4), ("replica 1", 2)]
    assert [found.role_of(rank) for rank in range(6)] == [0, 1, 0, 0, 1, 0]
    neighbours = [
        {len(work.sends_bytes) for work in found.of_layers(role) if isinstance(work, HaloExchange)} for role in (0, 1)
    ]
    assert neighbours == [{1}, {2}]


def test_uneven_blocks_are_roles_of_their_own() -> None:
    found = plan(chain(8, extent=11), "s3")
    assert [role.multiplicity for role in found.roles] == [1, 1, 1]
    rows = [{layer.output_shape[1] for layer, _ in found.sharded}]
    assert rows == [{4, 3}]


@pytest.mark.parametrize(
    ("strategy", "sharing", "layer_axes", "exchange"),
    [
        ("d2f2", "filter", (1,), ((0,), 2)),
        ("f2d2", "filter", (0,), ((1,), 2)),
        ("d2c2", "channel", (1,), ((0,), 2)),
        ("d2s2", "spatial", (1,), ((0, 1), 4)),
        ("s2d2", "spatial", (0,), ((0, 1), 4)),
    ],
)
def test_one_axis_shares_layers_and_the_others_exchange_gradients(
    strategy: str, sharing: str, layer_axes: tuple[int, ...], exchange: tuple[tuple[int, ...], int]
) -> None:
    found = plan(small(), strategy)
    alone = plan(small(), {"filter": "f2", "channel": "c2", "spatial": "s2"}[sharing], batch=BATCH // 2)
    assert found.local_batch == BATCH // 2
    assert found.exchange_axes == exchange[0]
    for role in range(len(found.roles)):
        shared = found.of_layers(role)
        assert {work.axes for work in shared} == {layer_axes}
        assert sizes(shared) == sizes(alone.of_layers(role))
        exchanged = found.communication(role, phases=(Phase.GE,))
        assert {(work.axes, work.ranks) for work in exchanged if isinstance(work, Collective)} == {exchange}
        updated = next(found.works[index] for index in found.roles[role].work[::-1])
        assert isinstance(updated, WeightUpdate)
        assert (
            sum(work.message_bytes for work in exchanged if isinstance(work, Collective)) == ELEMENT * updated.elements
        )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *((strategy, {}) for strategy in ("s2", "d2s2", "s2x2", "d2f2", "f2d2", "d2c2", "p2s2", "d2p2s2")),
        *(("d2s2", options) for options in ({"bucket_cap_bytes": 1, "first_bucket_bytes": 1}, {"accumulate": 2})),
    ],
)
def test_calls_behind_backward_wait_for_the_gradients_it_hands_on(strategy: str, options: dict[str, int]) -> None:
    found, waited_for = plan(chain(8, 12, 8, 8), strategy, **options), 0
    for role in found.roles:
        handed_on = list[int]()
        for task, work in enumerate(found.works[index] for index in role.work):
            if role.stream[task] == Stream.COMPUTE:
                handed_on = [*handed_on, task] if isinstance(work, BucketCopy) else []
            elif role.phase[task] == Phase.BW and not isinstance(work, Transfer) and handed_on:
                # The last one, behind all others: they run one after the other.
                assert handed_on[-1] in role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]]
                waited_for += 1
    assert waited_for


def sizes(works: list[Communication]) -> list[tuple[object, ...]]:
    """What is sent, apart from along which axis."""
    return [
        (work.operation, work.message_bytes, work.ranks)
        if isinstance(work, Collective)
        else (work.sends_bytes, work.receives_bytes)
        for work in works
    ]


def test_buffers_are_broadcast_among_those_that_exchange_gradients() -> None:
    factory = NetworkFactory(4, 8, 8)
    factory.conv("conv", 4)
    factory.batch_norm("bn")
    factory.flatten("flatten")
    factory.loss()
    network = factory.network("normalised")
    assert not [work for work in plan(network, "f2").communication() if is_broadcast(work)]
    nested = [work for work in plan(network, "d2s2").communication() if is_broadcast(work)]
    assert {work.axes for work in nested} == {(0, 1)}
    assert not [work for work in plan(network, "d2s2").of_layers() if is_broadcast(work)]


def is_broadcast(work: Communication) -> bool:
    return isinstance(work, Collective) and work.operation == "broadcast"


# What the papers sum


def collective_bytes(found: Plan, phase: Phase) -> Counter[str]:
    sums: Counter[str] = Counter()
    for work in found.communication(phases=(phase,)):
        assert isinstance(work, Collective)
        sums[work.operation] += work.message_bytes
    return sums


widths = st.lists(st.integers(1, 6).map(lambda n: 4 * n), min_size=1, max_size=5)


@given(widths, st.sampled_from([2, 4]), st.integers(1, 5))
def test_filter_sends_paradls_sum_and_gathers_the_last_layer_too(filters: list[int], ranks: int, batch: int) -> None:
    """ParaDL, Table 3: sum over l < L of AG(p, B y_l e / p) + AR(p, B y_l e); a run needs the last output as well."""
    found = plan(chain(*filters, extent=4), f"f{ranks}", batch=batch)
    outputs = [batch * width * 16 * ELEMENT for width in filters]
    assert collective_bytes(found, Phase.FW) == {"all_gather": sum(outputs) // ranks}
    assert collective_bytes(found, Phase.BW) == ({"all_reduce": sum(outputs[:-1])} if outputs[:-1] else {})


@given(widths, st.sampled_from([2, 4]), st.integers(1, 5))
def test_channel_sends_paradls_sum_and_reduces_the_last_layer_too(filters: list[int], ranks: int, batch: int) -> None:
    """ParaDL, Table 3: all-reduce forward and all-gather backward, over l < L; a run needs the last sums as well."""
    found = plan(chain(*filters, extent=4), f"c{ranks}", batch=batch)
    outputs = [batch * width * 16 * ELEMENT for width in filters]
    assert collective_bytes(found, Phase.FW) == {"all_reduce": sum(outputs)}
    backward = sum(outputs[:-1]) // ranks
    assert collective_bytes(found, Phase.BW) == ({"all_gather": backward} if backward else {})


def halo_of_paradl(channels: int, kernel: int, unsplit: tuple[int, ...]) -> int:
    """Elements from one neighbour (ParaDL, section 3.2): C floor(K/2) times the extents of the dims that stay whole."""
    return channels * (kernel // 2) * math.prod(unsplit)


@given(
    filters=widths,
    kernel=st.sampled_from([1, 3, 5]),
    ranks=st.integers(2, 4),
    batch=st.integers(1, 3),
)
def test_halos_are_those_of_paradl_where_windows_keep_the_extent(
    filters: list[int], kernel: int, ranks: int, batch: int
) -> None:
    """Stride 1, odd kernel, padded to the same extent, one dim cut: two neighbours but for the ranks at the edges.

    Backward sends what the halo's positions have gathered of the input's gradient, so the input's channels, where the
    paper exchanges the output's gradient; over a chain the sums differ by the first and the last layer's.
    """
    network = chain(*filters, extent=8, kernel=kernel)
    found = plan(network, f"s{ranks}", batch=batch)
    inputs = [8, *filters[:-1]]
    for rank in range(ranks):
        neighbours = 2 - (rank in (0, ranks - 1))
        role = found.role_of(rank)
        for phase, layers in ((Phase.FW, inputs), (Phase.BW, inputs[:0:-1])):
            expected = [
                (batch * ELEMENT * halo_of_paradl(channels, kernel, (8,)),) * neighbours
                for channels in layers
                if kernel > 1
            ]
            halos = [w for w in found.communication(role, phases=(phase,)) if isinstance(w, HaloExchange)]
            assert [work.receives_bytes for work in halos] == expected
            assert [work.sends_bytes for work in halos] == expected


# The mesh


@pytest.mark.parametrize("text", ["d2f3", "f3d2", "d2s2x2", "s4", "d3", "serial"])
def test_groups_part_the_ranks_along_any_axes(text: str) -> None:
    strategy = parse_strategy(text)
    for axes in [(), *((i,) for i in range(len(strategy.axes))), tuple(range(len(strategy.axes)))]:
        groups = all_groups(strategy, axes)
        assert sorted(rank for group in groups for rank in group) == list(range(strategy.ranks))
        for group in groups:
            assert len(group) == math.prod(strategy.axes[i].degree for i in axes)
            assert all(group_of(strategy, axes, rank) == group for rank in group)
    assert all(rank_at(strategy, strategy.coordinates(rank)) == rank for rank in range(strategy.ranks))


def test_neighbours_along_the_innermost_axis_are_neighbouring_ranks() -> None:
    strategy = parse_strategy("d2f3")
    assert all_groups(strategy, (1,)) == ((0, 1, 2), (3, 4, 5))
    assert all_groups(strategy, (0,)) == ((0, 3), (1, 4), (2, 5))
    assert positions(strategy) == ((0, 0), (0, 1), (0, 2))
    assert group_axes(strategy, Trait.SPLITS_OUTPUTS, Trait.CUTS_POSITIONS) == (1,)
    assert (degree_of(strategy, Trait.DIVIDES_BATCH), degree_of(strategy, Trait.CUTS_POSITIONS)) == (2, 1)
