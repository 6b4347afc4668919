"""Predictions of strategies that share layers: where their seconds come from, what they consist of, what they hold."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from network_factory import NetworkFactory, pooled_convolutions
from profile_factory import layer_times, linear_seconds, make_profile, model_times, ring_fit, summary

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, HaloExchange, WeightUpdate
from paradl_bench.strategies.memory.peak import per_phase_memory, planned_memory
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

BATCH = 8
ALPHA_S, BETA_S_PER_BYTE = 50e-6, 1e-9
SHARD_S = 7e-3
NETWORK = pooled_convolutions()


def fits(*operations: str) -> tuple[CommunicationFit, ...]:
    return tuple(ring_fit(operation) for operation in operations)


ALL_FITS = fits("all_reduce", "all_gather", "reduce_scatter", "send_recv")


def profile_of(network: ModelGraph = NETWORK, **changes: object) -> Profile:
    changes.setdefault("communication", ALL_FITS)
    return make_profile(network, **changes)


def point(strategy: str, batch: int = BATCH) -> Configuration:
    return Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=batch))


def predicted(strategy: str, profile: Profile | None = None, network: ModelGraph = NETWORK) -> Prediction:
    costs = CostModel(profile=profile or profile_of(network), network=network)
    return Predictor(costs, evaluator_named("simulate")).predict(point(strategy))


def shards_of(strategy: str, network: ModelGraph = NETWORK) -> list[Layer]:
    parsed = parse_strategy(strategy)
    return [layer for layer, _ in planner_for(parsed).plan(network, parsed, PlanSettings(batch=BATCH)).sharded]


def communication_of_layers(strategy: str) -> list[Collective | HaloExchange]:
    parsed = parse_strategy(strategy)
    return list(planner_for(parsed).plan(NETWORK, parsed, PlanSettings(batch=BATCH)).of_layers())


@pytest.mark.parametrize("strategy", ["f2", "c2", "s2", "s2x2", "d2f2", "d2s2"])
def test_unmeasured_shards_are_scaled_from_their_neighbour_with_notice(strategy: str) -> None:
    found = predicted(strategy)
    assert found.iteration_s > 0
    assert found.provenance.sources["scaled"] > 0.1
    lines = [
        line for line in found.provenance.extrapolated if "not measured, scaled from the nearest operation" in line
    ]
    assert len(lines) == 1
    assert "paradl-bench layers --shards measures it: conv1" in lines[0]


@pytest.mark.parametrize("strategy", ["f2", "c2", "s2"])
def test_a_shard_is_scaled_from_its_whole_layer(strategy: str) -> None:
    """Half the work of a layer whose time is proportional to it takes half its time; another's settings differ."""
    profile = profile_of(layer_times=layer_times(NETWORK, seconds=by_work))
    costs = CostModel(profile=profile, network=NETWORK)
    plan = planner_for(parse_strategy(strategy)).plan(NETWORK, parse_strategy(strategy), PlanSettings(batch=BATCH))
    priced = costs.price(plan)
    whole = next(layer for layer in NETWORK.layers if layer.name == "conv2")
    (forward,) = [
        seconds
        for work, seconds in zip(plan.works, priced.costs.seconds, strict=True)
        if getattr(work, "layer", "") == "conv2" and getattr(work, "phase", "") == "FW"
    ]
    assert forward == pytest.approx(by_work(whole, "FW", BATCH) / 2, rel=0.1)


def by_work(layer: Layer, phase: str, batch: int) -> float:
    return 1e-9 * batch * max(layer.fw_flops, 1000) * (1 if phase == "FW" else 2)


@pytest.mark.parametrize("strategy", ["f2", "c2", "s2"])
def test_measured_shards_are_taken_as_they_were_measured(strategy: str) -> None:
    """A measured shard's time is that of its own shapes, whatever its whole layer takes."""
    shards = shards_of(strategy)
    measured = tuple(
        msgspec.structs.replace(time, shard=strategy)
        for time in layer_times(network_of(shards), seconds=lambda layer, phase, batch: 7e-3)
    )
    found = predicted(strategy, profile_of(layer_times=(*layer_times(NETWORK), *measured)))
    assert not [line for line in found.provenance.extrapolated if "nearest operation" in line]
    split = {layer.name for layer in shards}
    whole = [layer for layer in NETWORK.layers if layer.name not in split]
    rest_s = sum(linear_seconds(layer, phase, BATCH) for layer in whole for phase in ("FW", "BW"))
    # Convolutions and fully connected layers, pooling and activations: forward and backward of each shard.
    assert found.time.compute_s == pytest.approx(2 * 7e-3 * len(shards) + rest_s + updating_s(strategy), rel=1e-6)


def network_of(layers: Sequence[Layer]) -> ModelGraph:
    """Layers as a network that reads nothing but its input."""
    alone = [msgspec.structs.replace(layer, inputs=("input",)) for layer in layers]
    return msgspec.structs.replace(NETWORK, layers=tuple(alone))


def updating_s(strategy: str) -> float:
    parsed = parse_strategy(strategy)
    plan = planner_for(parsed).plan(NETWORK, parsed, PlanSettings(batch=BATCH))
    updates = [work for work in plan.works if hasattr(work, "optimizer")]
    return 1e-4 * max(work.elements for work in updates) / NETWORK.parameter_elements


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("f2", {"all_gather", "all_reduce"}),
        ("c2", {"all_gather", "all_reduce"}),
        ("s2", {"all_gather", "halo"}),
        ("serial", set()),
        ("d2", set()),
        ("d2s2", {"all_gather", "halo"}),
    ],
)
def test_the_breakdown_parts_communication_for_layers_from_compute(strategy: str, names: set[str]) -> None:
    found = predicted(strategy)
    phases = {"FW", "BW", "GE", "WU"}
    assert set(found.time.breakdown_s) == phases | names | {"exposed_communication"}
    assert sum(found.time.breakdown_s[name] for name in phases | names) == pytest.approx(found.iteration_s)
    assert sum(found.time.phases_s.values()) == pytest.approx(found.iteration_s)
    of_layers = sum(found.time.breakdown_s[name] for name in names)
    assert found.time.breakdown_s["FW"] + found.time.breakdown_s["BW"] + of_layers == pytest.approx(
        found.time.phases_s["FW"] + found.time.phases_s["BW"]
    )
    assert of_layers <= found.time.breakdown_s["exposed_communication"] * (1 + 1e-9)


def seconds_of(work: Collective | HaloExchange) -> tuple[str, float]:
    """By hand, on two ranks: alpha + m beta a message; all-reduce twice that of half the buffer."""
    if isinstance(work, HaloExchange):
        return "halo", sum(ALPHA_S + size * BETA_S_PER_BYTE for size in work.sends_bytes)
    if work.operation == "all_reduce":
        return work.operation, 2 * (ALPHA_S + work.message_bytes / 2 * BETA_S_PER_BYTE)
    return work.operation, ALPHA_S + work.message_bytes * BETA_S_PER_BYTE


@pytest.mark.parametrize("strategy", ["f2", "c2", "s2"])
def test_communication_for_layers_takes_what_the_fits_say(strategy: str) -> None:
    expected: dict[str, float] = {}
    for work in communication_of_layers(strategy):
        name, seconds = seconds_of(work)
        expected[name] = expected.get(name, 0.0) + seconds
    found = predicted(strategy).time.breakdown_s
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_sums_are_those_of_one_rank_where_ranks_differ() -> None:
    """Three uneven blocks are three roles; what one rank computes is less than the whole, not the sum of all."""
    alone, cut = predicted("serial"), predicted("s3")
    assert cut.time.compute_s < alone.time.compute_s
    assert cut.time.compute_s + cut.time.communication_s == pytest.approx(cut.iteration_s, rel=0.05)


def test_a_halo_exchange_without_a_fit_names_its_measuring_command() -> None:
    with pytest.raises(UserError, match=r"no fit of send_recv through gloo.*--backend gloo --ops send_recv"):
        predicted("s2", profile_of(communication=fits("all_reduce", "all_gather")))


# Memory


def parameters_of(strategy: str) -> int:
    return planned_memory(NETWORK, parse_strategy(strategy), PlanSettings(batch=BATCH)).parts_bytes["parameters"]


def test_shards_hold_their_share_of_parameters_and_their_state() -> None:
    convolutions = 4 * (8 * 4 * 9 + 8 + 8 * 8 * 9 + 8)
    linear = 4 * (6 * 8 * 64 + 6)
    assert parameters_of("serial") == parameters_of("s2") == parameters_of("d2") == convolutions + linear
    assert parameters_of("f2") == parameters_of("d2f2") == (convolutions + linear) // 2
    biases = 4 * (8 + 8 + 6)
    assert parameters_of("c2") == (convolutions + linear - biases) // 2 + biases
    use = planned_memory(NETWORK, parse_strategy("f2"), PlanSettings(batch=BATCH)).parts_bytes
    assert use["optimizer"] == use["parameters"]
    assert use["buckets"] == 0
    assert planned_memory(NETWORK, parse_strategy("d2f2"), PlanSettings(batch=BATCH)).parts_bytes["buckets"] > 0
    assert planned_memory(NETWORK, parse_strategy("s2"), PlanSettings(batch=BATCH)).parts_bytes["buckets"] > 0


def activations_of(strategy: str, batch: int = 1000) -> int:
    return planned_memory(NETWORK, parse_strategy(strategy), PlanSettings(batch=batch)).parts_bytes["activations"]


def test_filter_holds_whole_activations_and_channel_adds_input_slices() -> None:
    assert activations_of("f2") == activations_of("serial")
    # At the peak, backward of conv2, the slices of conv1's and conv2's inputs.
    slices = (4 * 16 * 16 + 8 * 16 * 16) // 2
    assert activations_of("c2") == activations_of("serial") + 4 * 1000 * slices


def test_blocks_hold_their_positions_and_their_halos() -> None:
    half, halo1, halo2, block, pooled = 8 * 16 * 8, 4 * 18 * 10, 8 * 18 * 10, 4 * 16 * 8, 8 * 8 * 4
    # Forward, when the pooled blocks are gathered: what the convolutions' windows read, padding included, and what relu
    # and pool keep, with indices twice as wide as numbers; the rank's block of the input, the buffer and the whole.
    kept = halo1 + half + halo2 + half + 2 * pooled
    assert activations_of("s2") == 4 * 1000 * (kept + block + pooled + 2 * pooled + 2 * pooled)


def test_one_rank_and_no_sharing_hold_what_serial_holds() -> None:
    alone = per_phase_memory(NETWORK, BATCH, PlanSettings(batch=1), exchanged=False)
    for strategy in ("serial", "f1", "c1", "s1", "d1"):
        assert planned_memory(NETWORK, parse_strategy(strategy), PlanSettings(batch=BATCH)) == alone


def test_synchronised_batch_norm_costs_its_all_reduces() -> None:
    factory = NetworkFactory(4, 16, 16)
    factory.conv("conv", 8)
    factory.batch_norm("bn")
    factory.flatten("flatten")
    factory.loss()
    network = factory.network("normalised")
    profile = profile_of(network, communication=fits("all_reduce", "broadcast"))
    costs = CostModel(profile=profile, network=network)
    local, sync = (
        Predictor(costs, evaluator_named("simulate")).predict(
            Configuration(strategy=parse_strategy("d2"), settings=PlanSettings(batch=BATCH, batch_norm=of))
        )
        for of in ("local", "sync")
    )
    assert (local.options, sync.options) == ({}, {"batch_norm": "sync"})
    assert sync.time.breakdown_s["all_reduce"] > local.time.breakdown_s.get("all_reduce", 0.0)


def test_shards_measured_for_all_layers_serve_chosen_ones() -> None:
    """A layer that runs as a shard takes as long whatever other layers are split."""
    measured = tuple(
        msgspec.structs.replace(time, shard="f2")
        for time in layer_times(network_of(shards_of("f2")), seconds=lambda layer, phase, batch: 7e-3)
    )
    costs = CostModel(profile=profile_of(layer_times=(*layer_times(NETWORK), *measured)), network=NETWORK)
    settings = plan_settings(batch=BATCH, split=("fc",))
    found = Predictor(costs, evaluator_named("simulate")).predict(
        Configuration(strategy=parse_strategy("f2"), settings=settings)
    )
    assert not [line for line in found.provenance.extrapolated if "nearest operation" in line]


@pytest.mark.parametrize(
    ("strategy", "measured"), [("z3d2", True), ("d2z3d2", True), ("z3d4", False), ("z2d2", False), ("d2", False)]
)
def test_whole_layers_behind_gathers_are_taken_where_ranks_gather(strategy: str, measured: bool) -> None:
    whole = profile_of(model_times=model_times(NETWORK, wu_s=1e-4))
    behind = [
        msgspec.structs.replace(time, shard="z3d2") for time in layer_times(NETWORK, seconds=lambda *_: 2 * SHARD_S)
    ]
    of_shard = [msgspec.structs.replace(time, shard="z3d2") for time in model_times(NETWORK, wu_s=9e-5)]
    profile = profile_of(
        layer_times=(*whole.layer_times, *behind), model_times=whole.model_times, shard_times=tuple(of_shard)
    )
    found, base = (predicted(strategy, each).time.breakdown_s for each in (profile, whole))
    if not measured:
        assert found == base
        return
    assert found["FW"] == pytest.approx(2 * SHARD_S * len(NETWORK.layers))
    assert found["WU"] == pytest.approx(9e-5)
    assert base["WU"] < 9e-5


def shard_profile() -> Profile:
    """Time between operations and weight update of the model as a rank of f2 runs it are unlike half of the whole's."""
    of_shard = model_times(NETWORK, between_s=5e-4, wu_s=9e-5)
    return profile_of(
        model_times=model_times(NETWORK, between_s=1e-4, wu_s=1e-4),
        shard_times=tuple(msgspec.structs.replace(time, shard="f2") for time in of_shard),
    )


@pytest.mark.parametrize(
    ("strategy", "between_s", "wu_s"), [("f2", 5e-4, 9e-5), ("d2f2", 5e-4, 9e-5), ("c2", 1e-4, None)]
)
def test_a_measured_shard_gives_weight_update_and_time_between_operations(
    strategy: str, between_s: float, wu_s: float | None
) -> None:
    costs = CostModel(profile=shard_profile(), network=NETWORK)
    plan = planner_for(parse_strategy(strategy)).plan(NETWORK, parse_strategy(strategy), PlanSettings(batch=BATCH))
    priced = costs.price(plan)
    counts = np.bincount(plan.roles[0].work, minlength=len(plan.works))
    totals = {
        (type(work).__name__, getattr(work, "phase", "")): seconds * count
        for work, seconds, count in zip(plan.works, priced.costs.seconds, counts, strict=True)
    }
    assert totals["FrameworkOverhead", "FW"] == pytest.approx(between_s)
    assert totals["FrameworkOverhead", "BW"] == pytest.approx(2 * between_s)
    (updated,) = [work.elements for work in plan.works if isinstance(work, WeightUpdate)]
    share_s = 1e-4 * updated / NETWORK.parameter_elements
    assert totals["WeightUpdate", ""] == pytest.approx(share_s if wu_s is None else wu_s)
    assert share_s < 9e-5


def interval_of(strategy: str, *, common_sd: float = 0.0, remainder: float = 0.0, slower: float = 1.0) -> Prediction:
    """Where f2's shards spread between blocks, leave a remainder, or are in iterations longer than their parts."""
    measured = tuple(
        msgspec.structs.replace(time, shard="f2")
        for time in layer_times(network_of(shards_of("f2")), seconds=lambda layer, phase, batch: SHARD_S)
    )
    of_shard = tuple(
        msgspec.structs.replace(
            time,
            shard="f2",
            common_relative_sd=common_sd,
            remainder_relative=remainder,
            iteration=summary(slower * iteration_of_shard_s()),
        )
        for time in model_times(NETWORK, wu_s=1e-4)
    )
    profile = profile_of(
        layer_times=(*layer_times(NETWORK), *measured),
        model_times=model_times(NETWORK, wu_s=1e-4),
        shard_times=of_shard,
    )
    return predicted(strategy, profile)


def iteration_of_shard_s() -> float:
    """A rank's layers, those that run whole included, and the weight update."""
    shards = shards_of("f2")
    whole = [layer for layer in NETWORK.layers if layer.name not in {shard.name for shard in shards}]
    return (
        1e-4 + 2 * SHARD_S * len(shards) + sum(linear_seconds(layer, p, BATCH) for layer in whole for p in ("FW", "BW"))
    )


def widened_s(found: Prediction, base: Prediction) -> tuple[float, float]:
    """By how much an interval begins earlier and ends later than another."""
    (low, high), (base_low, base_high) = found.time.interval_s, base.time.interval_s
    return base_low - low, high - base_high


@pytest.mark.parametrize("strategy", ["f2", "c2"])
def test_a_measured_shards_own_spread_makes_its_interval(strategy: str) -> None:
    base, found = interval_of(strategy), interval_of(strategy, common_sd=0.03)
    expected = {"compute, all layers": Z90 * 0.03 * iteration_of_shard_s()} if strategy == "f2" else {}
    assert found.provenance.spread_s == pytest.approx({**base.provenance.spread_s, **expected})
    assert found.iteration_s == base.iteration_s


@pytest.mark.parametrize("of", [{"remainder": 0.2}, {"slower": 1.25}])
def test_what_a_shards_parts_leave_widens_its_interval(of: dict[str, float]) -> None:
    below, above = widened_s(interval_of("f2", **of), interval_of("f2"))
    assert (below, above) == pytest.approx((0.0, 0.25 * iteration_of_shard_s()))
    assert widened_s(interval_of("c2", **of), interval_of("c2")) == (0.0, 0.0)


def test_proportional_takes_a_layers_share_and_ignores_measured_shards() -> None:
    """Shards were measured to take as long as the whole layer: simulate says so, proportional does not look."""
    strategy = parse_strategy("f2")
    plan = planner_for(strategy).plan(NETWORK, strategy, PlanSettings(batch=BATCH))
    whole = {layer.name: layer.operation for layer in NETWORK.layers}
    twins = {layer.operation: whole[layer.name] for layer, _ in plan.sharded}
    times = layer_times(NETWORK)
    shards = [
        msgspec.structs.replace(time, operation=shard, shard="f2")
        for shard, of in twins.items()
        for time in times
        if time.operation == of
    ]
    profile = profile_of(layer_times=(*times, *shards))
    costs = CostModel(profile=profile, network=NETWORK)
    simulated, shared = (
        Predictor(costs, evaluator_named(name)).predict(point("f2")) for name in ("simulate", "proportional")
    )
    of_split = sum(
        linear_seconds(layer, phase, BATCH)
        for layer in NETWORK.layers
        if layer.operation in twins.values()
        for phase in ("FW", "BW")
    )
    assert simulated.time.compute_s - shared.time.compute_s == pytest.approx(of_split / 2)
    assert not evaluator_named("proportional").covers(parse_strategy("d2"))
