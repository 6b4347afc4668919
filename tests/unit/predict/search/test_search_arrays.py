"""What ``predict search`` computes for many candidates at once, against one after the other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from network_factory import NetworkFactory
from profile_factory import make_network, make_profile, ring_fit
from search_cases import OPERATIONS, group_along, profile_of

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.mesh import axes_apart, group_axes, group_of, sharing_axes
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.exchange.options import bucket_limits
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.pipeline.even_cuts import EvenCuts
from paradl_bench.strategies.tensor.plan import TensorPlanner
from predict.costs.cost_model import CostModel
from predict.search.candidates.mesh import alike
from predict.search.candidates.space import Space, find_space
from predict.search.pricing import estimate
from predict.search.pricing.estimate import Estimates
from predict.search.pricing.exchange import Buckets
from predict.search.pricing.groups import Group, GroupCosts
from predict.search.pricing.held_parts import PartsOfLayers
from predict.search.pricing.links import Placements
from predict.search.pricing.shared_work import SharedWorks, shared_work
from predict.search.pricing.waits import Waits

NETWORK = make_network((64, 512, 256, 512, 32))


@pytest.fixture(scope="module")
def costs() -> CostModel:
    return CostModel(profile=profile_of(NETWORK), network=NETWORK)


def test_entries_are_alike_where_all_columns_are() -> None:
    generator = np.random.default_rng(5)
    # Products of the columns' ranges are too large for a number.
    columns = [generator.integers(0, 3, 400) * scale for scale in (1, 2**40, 7, 2**30)]
    entries = list(zip(*(column.tolist() for column in columns), strict=True))
    first, kind = alike(*columns)
    distinct = sorted(set(entries))
    assert [entries[index] for index in first] == distinct
    assert [entries.index(each) for each in distinct] == first.tolist()
    assert [distinct[number] for number in kind] == entries


def _exchanged(sizes: list[int], backward: list[float], first: int, cap: int, seconds: object) -> float:
    """From the start of backward, last layer first, to the end of the last bucket, which is filled as others are."""
    done = filled = 0.0
    for size, each in zip(reversed(sizes), reversed(backward), strict=True):
        done += each
        filled += size
        if filled >= first:
            break
    total = sum(sizes)
    further = -(-max(total - first, 0) // cap)
    last = total - first - (further - 1) * cap if further else total
    every = (1 + further) * seconds(total / (1 + further)) if total else 0.0  # type: ignore[operator]
    return max(sum(backward) + (seconds(last) if total else 0.0), done + every)  # type: ignore[operator]


def test_buckets_of_many_stages_and_sizes_are_those_of_each(costs: CostModel) -> None:
    groups = GroupCosts(costs.communication)
    group_ = Group(8, 16, 2, 2)
    link = groups.link("all_reduce", group_)
    gradient_bytes = np.array([[0, 4096, 0, 65536, 1024, 0], [8, 8, 8, 8, 8, 8], [0, 0, 0, 0, 9000, 400]])
    caps = (None, 0.001, 0.01, 1.0)
    bounds = np.array([0, 2, 5, 6])
    exchanges = Buckets(groups, gradient_bytes, caps).exchanges(bounds, np.arange(3), np.full(3, link))
    of_rows = np.random.default_rng(3).random((4, 6)) * 1e-4
    # Candidates that compute alike are one row.
    row = np.array([3, 0, 1, 1, 2])
    backward, which = of_rows[row], np.array([2, 0, 1, 1, 0])
    found = exchanges.seconds(of_rows, row, which)
    assert found.shape == (5, 4, 3)

    def seconds(size: float) -> float:
        return float(groups.seconds("all_reduce", group_, np.rint(np.array([max(size, 4.0)])))[0])

    for row, (index, cap), stage in product(range(5), enumerate(caps), range(3)):
        own = slice(bounds[stage], bounds[stage + 1])
        sizes, times = gradient_bytes[which[row], own].tolist(), backward[row, own].tolist()
        assert found[row, index, stage] == pytest.approx(_exchanged(sizes, times, *bucket_limits(cap), seconds))


def test_messages_priced_together_equal_each_over_its_own_link(costs: CostModel) -> None:
    groups = GroupCosts(costs.communication)
    asked = [
        (operation, group_along(parse_strategy(text), 0))
        for text in ("d1", "d2", "d8", "d4f2", "f2d4", "d2p2f2", "d32")
        for operation in ("all_reduce", "send_recv", "all_gather")
    ]
    links = np.array([groups.link(*each) for each in asked])
    sizes = np.linspace(0, 1 << 22, 9).round()
    together = groups.seconds_over(links[:, None], sizes)
    for own, each in zip(together, asked, strict=True):
        assert own == pytest.approx(GroupCosts(costs.communication).seconds(*each, sizes))
    assert links[0] == 0
    assert together[0].tolist() == [0.0] * 9


def test_groups_of_placements_are_those_of_each(costs: CostModel) -> None:
    space = find_space(NETWORK, PlanSettings(batch=48), 48, ())
    placed = Placements(space.strategies, space.mesh_of, space.meshes)
    for axes in (sharing_axes, axes_apart, lambda own: group_axes(own, Trait.STAGES, Trait.REPLICATES)):
        together = placed.along(axes).T.tolist()
        alone = [group_along(strategy, *axes(strategy)) for strategy in space.strategies]
        assert list(map(tuple, together)) == alone
        for strategy, group in zip(space.strategies, alone, strict=True):
            ranks = group_of(strategy, axes(strategy), 0)
            assert group.ranks == len(ranks)
            assert group.ranks == 1 or (group.stride == ranks[1] and group.span > ranks[-1])
    shared = np.array(placed.along_shared()).reshape(-1, 4, len(space.strategies))
    for index, strategy in enumerate(space.strategies):
        axes = [strategy.axes.index(axis) for axis in space.meshes[space.mesh_of[index]].shared]
        own = [tuple(group[:, index].tolist()) for group in shared]
        assert own == [*(group_along(strategy, axis) for axis in axes), *[(1, 1, 1, 1)] * (len(shared) - len(axes))]


def test_layer_waits_equal_messages_of_their_part_and_samples(costs: CostModel) -> None:
    groups, shared = GroupCosts(costs.communication), SharedWorks(NETWORK, PlanSettings(batch=8))
    waits = Waits(groups)
    texts = ("f2d4", "d4f2", "c4", "d8", "t2")
    cases = [(strategy, count) for strategy in map(parse_strategy, texts) for count in (1, 4)]
    numbers, expected = [], []
    for strategy, count in cases:
        axis = next((each for each in strategy.axes if each.kind != "data"), None)
        work = shared.of(((axis,) if axis else (), ()))
        own = group_along(strategy, strategy.axes.index(axis)) if axis else Group(1, 1, 1, 1)
        numbers.append(waits.number(work, [own]))
        times = np.zeros((2, len(NETWORK.layers)))
        for each in work.messages:
            size = np.rint(np.array([each.bytes_per_sample * count]))
            times[int(each.phase == "BW"), each.layer] += groups.seconds(each.operation, own, size)[0]
        expected.append(times)
    samples = np.array([count for _, count in cases])
    found = waits.seconds(np.array(numbers), samples, int(shared.places.max()) + 1)
    assert np.stack(found[:2], axis=1)[..., shared.places] == pytest.approx(np.array(expected))
    assert not np.any(found[2:])
    assert np.array(expected).max() > 0


def test_a_strategy_is_estimated_among_others_as_by_itself(costs: CostModel) -> None:
    def alone(space: Space, index: int) -> Space:
        own = np.flatnonzero(space.strategy == index)
        columns = {name: getattr(space, name)[own] for name in ("micro_batches", "schedule", "cap", "again")}
        return Space(
            settings=space.settings,
            strategies=(space.strategies[index],),
            meshes=(space.meshes[space.mesh_of[index]],),
            mesh_of=np.zeros(1, np.int64),
            schedules=space.schedules,
            caps_mb=space.caps_mb,
            held=space.held,
            strategy=np.zeros(len(own), np.int64),
            impossible=space.impossible,
            not_searched=(),
            placements=1,
            **columns,
        )

    space = find_space(NETWORK, PlanSettings(batch=48, blocking=True), 16, (0.25, 4))
    together = Estimates(costs, space, SharedWorks(NETWORK, space.settings)).seconds()
    assert np.isfinite(together).all()
    assert len(space.strategies) > 40
    for index in range(len(space.strategies)):
        one = alone(space, index)
        found = Estimates(costs, one, SharedWorks(NETWORK, space.settings)).seconds()
        assert found == pytest.approx(together[space.strategy == index], rel=1e-12), str(space.strategies[index])


def test_only_wanted_candidates_are_estimated(costs: CostModel, monkeypatch: pytest.MonkeyPatch) -> None:
    space = find_space(NETWORK, PlanSettings(batch=16, blocking=True), 8, ())
    shared = SharedWorks(NETWORK, space.settings)
    every = Estimates(costs, space, shared).seconds()
    # Rows of stages of ZeRO are computed some at a time.
    monkeypatch.setattr(estimate, "_AT_ONCE", 3 * len(NETWORK.layers))
    wanted = np.arange(len(space)) % 3 == 1
    some = Estimates(costs, space, shared).seconds(wanted)
    assert some[wanted] == pytest.approx(every[wanted], rel=1e-12)
    assert not some[~wanted].any()


def test_bucket_sizes_and_axis_order_do_not_change_memory(costs: CostModel) -> None:
    network, dtype = costs.network, costs.dtype
    for text, changes in (("d4", {}), ("z1d4", {"accumulate": 2}), ("d2p2", {"micro_batches": 2, "schedule": "1f1b"})):
        strategy = parse_strategy(text)
        peaks = set()
        for cap in (None, 0.001, 256):
            first, rest = bucket_limits(cap)
            settings = plan_settings(batch=16, first_bucket_bytes=first, bucket_cap_bytes=rest, **changes)
            use = memory_of_plan(network, strategy, settings, dtype=dtype, device=costs.device_kind)
            peaks.add(use.peak_bytes)
            assert costs.memory(strategy, settings).peak_bytes == use.peak_bytes
        assert len(peaks) == 1
    assert costs.memory(parse_strategy("p2d2"), settings).peak_bytes == use.peak_bytes


def attention(heads: int) -> NetworkFactory:
    factory = NetworkFactory(12)
    factory.linear("up", heads)
    factory.relu("act")
    factory.linear("down", 12)
    factory.linear("head", 5)
    factory.loss()
    return factory


@pytest.mark.parametrize("features", [8, 10])
def test_only_ranks_with_equal_features_share_their_shards(features: int) -> None:
    network, strategy = attention(features).network("pair"), parse_strategy("t4")
    settings = PlanSettings(batch=8)
    planner = TensorPlanner()
    places = [AxisPlace(strategy.axes[0], 0, position, 8) for position in (0, 1, 2, 3)]
    kept = [planner.shard(network, place, settings) for place in places]
    anew = [TensorPlanner().shard(network, place, settings) for place in places]
    assert kept == anew
    widths = [shared.shards[0].layer.output_shape[-1] for shared in kept]
    assert widths == ([2, 2, 2, 2] if features == 8 else [3, 3, 2, 2])


def test_a_place_that_no_cut_can_part_bounds_the_stages() -> None:
    above = np.array([0.0, 1.0, 2.0, 50.0, 51.0, 52.0, 53.0])
    trained = np.arange(7)
    assert EvenCuts(range(7), above, trained, [0] * 7).into(3) == (2, 3)
    assert EvenCuts(range(7), above, trained, [0] * 7).into(6) == (1, 2, 3, 4, 5)


def test_what_a_strategy_lacks_leaves_the_others_their_estimates() -> None:
    # Of a cluster whose levels state nothing, so that fits are asked for.
    fits = (ring_fit(), *(ring_fit(operation) for operation in OPERATIONS))
    lacking = tuple(fit for fit in fits if fit.operation != "send_recv")
    without, whole = (
        CostModel(profile=make_profile(NETWORK, communication=known), network=NETWORK) for known in (lacking, fits)
    )
    estimates = []
    for each in (without, whole):
        space = find_space(NETWORK, PlanSettings(batch=16, blocking=True), 4, ())
        estimates.append(Estimates(each, space, SharedWorks(NETWORK, space.settings)).seconds())
        if each is without:
            (reason,) = (text for text in space.impossible.counts if "measure it" in text)
            assert "send_recv" in reason
            assert space.impossible.counts[reason] == sum(mesh.stages > 1 for mesh in _meshes(space))
    piped = np.array([space.is_pipelined(candidate) for candidate in range(len(space))])
    assert np.isinf(estimates[0][piped]).all()
    assert estimates[0][~piped] == pytest.approx(estimates[1][~piped])
    with pytest.raises(UserError, match="send_recv"):
        GroupCosts(without.communication).link("send_recv", Group(2, 2, 1, 1))


def _meshes(space: Space) -> list[object]:
    return [space.meshes[index] for index in space.mesh_of]


@pytest.mark.parametrize("text", ["f2", "c4", "s2", "t2", "d2"])
def test_what_ranks_share_of_equal_blocks_follows_from_few(text: str) -> None:
    factory = NetworkFactory(8, 16, 16)
    for number in range(8):
        factory.conv(f"body.{number}.one", 8, 3, padding=1)
        factory.relu(f"body.{number}.act")
    factory.flatten("flatten")
    for number in range(7):
        factory.linear(f"tail.{number}.one", 64)
        factory.relu(f"tail.{number}.act")
        factory.linear(f"tail.{number}.two", 16)
    factory.loss()
    network, settings = factory.network("blocks"), PlanSettings(batch=8)
    shared = SharedWorks(network, settings)
    places = shared.places
    assert len(shared.few.network.layers) < len(network.layers)
    axes = tuple(axis for axis in parse_strategy(text).axes if axis.kind != "data")
    whole, work = shared_work(network, axes, settings, PartsOfLayers(network)), shared.of((axes, ()))
    for name in ("share", "held", "gradient_bytes", "bytes_alike"):
        assert getattr(work, name).tolist() == getattr(whole, name).tolist()
    assert work.kept[:, places].tolist() == whole.kept.tolist()
    for layer, place in enumerate(places.tolist()):
        own = [each._replace(layer=layer) for each in work.messages if each.layer == place]
        assert own == [each for each in whole.messages if each.layer == layer]
    held = {parameter.name: parameter.shape for parameter in whole.parameters}
    assert {each.name: each.shape for each in shared.network_of((axes, ())).parameters} == held
