"""No candidate of ``predict search`` holds less than the bound by which it is ruled out."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from network_factory import NetworkFactory
from profile_factory import make_network
from search_cases import profile_of, profile_on

from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import as_held
from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from predict.costs.cost_model import CostModel
from predict.search.candidates.space import Space, find_space, held_choices
from predict.search.pricing.memory_bound import MemoryBounds, bounds_of
from predict.search.pricing.shared_work import SharedWorks

CHAIN = make_network((64, 512, 256, 512, 32))


def blocks(*, residual: bool) -> ModelGraph:
    """4x16x16 -> conv 8 -> 4 blocks of two convolutions, each added to what it reads or not -> fc 12 -> loss."""
    factory = NetworkFactory(4, 16, 16)
    read = factory.conv("stem", 8, 3, padding=1)
    for number in range(4):
        factory.conv(f"body.{number}.one", 8, 3, padding=1)
        factory.relu(f"body.{number}.act")
        made = factory.conv(f"body.{number}.two", 8, 3, padding=1)
        read = factory.add(f"body.{number}.add", made, read) if residual else made
    factory.flatten("flatten")
    factory.linear("fc", 12)
    factory.loss()
    return factory.network("chain")


def bounds_and_peaks(costs: CostModel, space: Space) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of every candidate: at least, and exactly."""
    bounds = MemoryBounds(costs, space, SharedWorks(as_held(costs.network, costs.dtype), space.settings)).of(space)
    strategies = [space.strategies[index] for index in space.strategy]
    points = [(strategy, space.settings_of(candidate)) for candidate, strategy in enumerate(strategies)]
    return bounds, np.array([peak_bytes(costs, *point) for point in points])


def peak_bytes(costs: CostModel, strategy: Strategy, settings: PlanSettings) -> float:
    """Infinite of what a framework does not train by, which is refused when it is predicted."""
    if settings.preset and zero_stage(strategy) > 1:
        return math.inf
    return costs.memory(strategy, settings).peak_bytes


@pytest.mark.parametrize(
    ("network", "ranks", "batch"),
    [
        (CHAIN, 8, 16),
        (blocks(residual=False), 1, 4),
        (blocks(residual=True), 4, 8),
        (blocks(residual=False), 4, 64),
        (make_network((64, 2, 512, 2, 32)), 8, 8),
    ],
    ids=["chain", "one rank", "residual blocks", "many micro-batches", "few rows"],
)
@pytest.mark.parametrize(
    ("dtype", "device", "preset"),
    [("fp32", "cpu", ""), ("bf16", "cuda", ""), ("bf16-weights", "cuda", "megatron"), ("fp32", "cuda", "megatron")],
)
def test_no_candidate_holds_less_than_its_bound(
    network: ModelGraph, ranks: int, batch: int, dtype: str, device: str, preset: str
) -> None:
    costs = CostModel(profile=profile_on(network, device), network=network, dtype=dtype)
    settings = PlanSettings(batch=batch, blocking=True, dtype=dtype, device=device, preset=preset)
    space = find_space(network, settings, ranks, (), computed_in=(dtype, ""))
    bounds, peaks = bounds_and_peaks(costs, space)
    assert (bounds > 0).all()
    # A test that fails says of which.
    assert [space.settings_of(c) for c in np.flatnonzero(bounds > peaks)] == []


def test_buffers_of_micro_batches_and_gathered_parameters_rule_out() -> None:
    network = blocks(residual=True)
    costs = CostModel(profile=profile_of(network), network=network)
    space = find_space(network, PlanSettings(batch=256, blocking=True), 4, ())
    bounds = MemoryBounds(costs, space, SharedWorks(network, space.settings)).of(space)
    schedules = np.array([space.schedules[index] for index in space.schedule])
    whole = np.array([str(space.strategies[index]) for index in space.strategy])
    many = np.flatnonzero((whole == "p4") & (schedules == "interleaved") & (space.micro_batches == 256)).tolist()
    assert len(many) > 1
    for candidate in many:
        held = costs.memory(space.strategies[space.strategy[candidate]], space.settings_of(candidate)).peak_bytes
        assert 0.6 * held < bounds[candidate] <= held
    assert (bounds[whole == "z2d4"] > network.parameter_bytes).all()


def test_a_limit_rules_out_what_tight_bounds_rule_out() -> None:
    costs = CostModel(profile=profile_of(CHAIN), network=CHAIN)
    space = find_space(CHAIN, PlanSettings(batch=64, blocking=True), 8, ())
    memory_bounds = MemoryBounds(costs, space, SharedWorks(CHAIN, space.settings))
    tight = memory_bounds.of(space)
    within = float(np.median(tight))
    bounds = memory_bounds.of(space, within)
    fits = tight <= within
    assert (bounds[fits] == tight[fits]).all()
    assert (bounds[~fits] > within).all()
    assert (bounds[~fits] < tight[~fits]).any()


def test_what_stage_two_gathers_stands_beside_all_activations() -> None:
    costs = CostModel(profile=profile_of(CHAIN), network=CHAIN)

    def bound(batch: int) -> float:
        space = find_space(CHAIN, PlanSettings(batch=batch, blocking=True), 4, ())
        bounds = MemoryBounds(costs, space, SharedWorks(CHAIN, space.settings)).of(space)
        whole = np.array([str(space.strategies[index]) for index in space.strategy])
        return float(bounds[(space.micro_batches == 1) & (space.again == 0) & (whole == "z2d4")].item())

    # Activations of 64 more samples; what is gathered stays as it is.
    one, two = bound(256), bound(512)
    assert two - one == 64 * 4 * (64 + 512 + 256 + 512 + 32)
    assert 2 * one - two > CHAIN.parameter_bytes


@pytest.mark.parametrize(("network", "batch"), [(CHAIN, 16), (blocks(residual=True), 8)], ids=["chain", "blocks"])
def test_axes_in_another_order_hold_the_same(network: ModelGraph, batch: int) -> None:
    """A plan's memory is walked through once for all orders of its axes."""
    space = find_space(network, PlanSettings(batch=batch, blocking=True), 4, (), held_choices()[:1])
    costs = CostModel(profile=profile_of(network), network=network)
    nested = [index for index, each in enumerate(space.strategies) if len(each.axes) > 1]
    assert len(nested) > 4
    for candidate in np.flatnonzero(np.isin(space.strategy, nested)).tolist():
        point = space.strategies[space.strategy[candidate]], space.settings_of(candidate)
        assert costs.plans.memory(*point) == memory_of_plan(network, *point, device=costs.device_kind)


def test_a_space_within_a_limit_has_what_may_fit() -> None:
    costs = CostModel(profile=profile_of(CHAIN), network=CHAIN)
    asked = CHAIN, PlanSettings(batch=64, blocking=True), 8, (1.0,), held_choices(limited=True)
    every = find_space(*asked)
    bounds = bounds_of(costs, every).of(every)
    within = float(np.median(bounds))
    fits = bounds <= within
    some = find_space(*asked, bounding=partial(bounds_of, costs), within=within)
    assert candidates(some) == [told for told, may_fit in zip(candidates(every), fits.tolist(), strict=True) if may_fit]
    unneeded = every.unneeded(fits)
    assert unneeded.any()
    assert some.unneeded(np.ones(len(some), bool)).tolist() == unneeded[fits].tolist()
    assert some.too_large == (~fits & ~unneeded).sum() > 0
    assert (some.placements, some.not_searched) == (len(every.strategies), every.not_searched)
    assert some.impossible.counts == every.impossible.counts
    kept = some.found.once(("bounds", within), lambda: np.zeros(0))
    assert kept.tolist() == bounds[fits].tolist() == bounds_of(costs, some).of(some, within).tolist()
    assert all(mesh.order_count == len(mesh.orders) for mesh in every.meshes)


def test_a_space_within_nothing_has_the_leanest() -> None:
    costs = CostModel(profile=profile_of(CHAIN), network=CHAIN)
    asked = CHAIN, PlanSettings(batch=64, blocking=True), 8, ()
    every = find_space(*asked)
    bounds = bounds_of(costs, every).of(every)
    some = find_space(*asked, bounding=partial(bounds_of, costs), within=1.0)
    assert 0 < len(some) < len(every)
    assert candidates(every)[int(bounds.argmin())] in candidates(some)


def candidates(space: Space) -> list[tuple[str, PlanSettings]]:
    """Strategies with their settings."""
    return [(str(space.strategies[which]), space.settings_of(at)) for at, which in enumerate(space.strategy.tolist())]
