"""Seconds, sources and spread of layers, whole models and plans: batches, hosts, and what each says of itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_factory import (
    affine_seconds,
    free_copies,
    layer_times,
    linear_seconds,
    make_network,
    make_profile,
    model_times,
    ring_fit,
)

from calibrate.profile.profile import LayerTime, Profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.models.traced_networks import traced_network
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.plan.tasks import Compute, WeightUpdate
from paradl_bench.records.measurement import PhaseName
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.compute.batch_scaling import Knot, at_batch
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.model_costs import ModelCosts
from predict.costs.cost_model import CostModel, PricedPlan
from predict.costs.kinds.work_costs import counts_between, operations_between, updated_elements
from predict.costs.sourced import Cost, Costs, Source
from predict.costs.spread.assembly import Priced, assemble

CHAIN = make_network()
FC0 = CHAIN.layers[0]
SERIAL = Strategy()


def cost(
    profile: Profile,
    *,
    batch: int = 4,
    phase: PhaseName = "FW",
    ranks_on_host: int = 1,
    network: ModelGraph = CHAIN,
    layer: int = 0,
) -> Cost:
    return LayerCosts(profile, network, "fp32").cost(network.layers[layer].operation, phase, "", batch, ranks_on_host)


def price(profile: Profile, strategy: str, batch: int) -> PricedPlan:
    network = next(iter(profile.network.values()))
    costs = CostModel(profile=profile, network=network)
    chosen = parse_strategy(strategy)
    return costs.price(planner_for(chosen).plan(network, chosen, PlanSettings(batch=batch)))


def lines(found: Cost) -> str:
    return " | ".join(remark.text for remark in found.remarks)


@pytest.mark.parametrize("name", ["gpt2", "t5-small", "mixtral-8x7b", "resnet18"])
def test_a_whole_network_counts_as_its_plan_does(name: str) -> None:
    network = traced_network(name)
    assert network is not None
    plan = planner_for(SERIAL).plan(network, SERIAL, PlanSettings(batch=1))
    (role,) = plan.roles
    counts = np.bincount(role.work, minlength=len(plan.works)).tolist()
    assert operations_between(network) == counts_between(plan, counts)
    assert updated_elements(network) == sum(work.elements for work in plan.of_kind(WeightUpdate).values())


# Batches


@pytest.mark.parametrize(("batch", "source"), [(4, Source.MEASURED), (8, Source.MEASURED), (6, Source.INTERPOLATED)])
def test_a_batch_is_measured_or_interpolated(batch: int, source: Source) -> None:
    found = cost(make_profile(layer_times=layer_times(CHAIN, seconds=affine_seconds)), batch=batch)
    assert found.seconds == pytest.approx(affine_seconds(FC0, "FW", batch))
    assert found.source is source
    assert bool(found.remarks) is (source is Source.INTERPOLATED)
    assert not any(remark.extrapolated for remark in found.remarks)


@pytest.mark.parametrize(("batch", "nearest"), [(2, "4, the smallest"), (16, "8, the largest")])
def test_a_larger_batch_follows_the_last_slope_with_notice(batch: int, nearest: str) -> None:
    found = cost(make_profile(layer_times=layer_times(CHAIN, seconds=affine_seconds)), batch=batch)
    assert found.seconds == pytest.approx(affine_seconds(FC0, "FW", batch))
    assert found.source is Source.SCALED
    assert nearest in lines(found)
    assert all(remark.extrapolated for remark in found.remarks)


def test_one_measured_batch_scales_proportionally_with_uncertainty_down_to_constant() -> None:
    found = cost(make_profile(layer_times=layer_times(CHAIN, batches=(4,))), batch=12)
    assert found.seconds == pytest.approx(linear_seconds(FC0, "FW", 12))
    assert found.batch_sd_s == pytest.approx((12 - 4) / 4 * linear_seconds(FC0, "FW", 4) / math.sqrt(12))


@given(
    st.dictionaries(st.integers(1, 256), st.floats(1e-6, 1.0), min_size=1, max_size=4),
    st.integers(1, 512),
    st.booleans(),
)
def test_time_over_batch_passes_through_measurements_and_stays_positive(
    measured: Mapping[int, float], batch: int, proportional: bool
) -> None:
    knots = [Knot(at, measured[at], 0.01 * measured[at]) for at in sorted(measured)]
    found = at_batch(knots, batch, proportional=proportional)
    assert found.seconds > 0
    assert found.batch_sd_s >= 0
    if batch in measured:
        assert found.seconds == measured[batch]
        assert found.batch_sd_s == 0
    elif knots[0].batch < batch < knots[-1].batch:
        assert found.source is Source.INTERPOLATED
        assert min(measured.values()) <= found.seconds <= max(measured.values())
    else:
        nearest = knots[0] if batch < knots[0].batch else knots[-1]
        ends = sorted((nearest.seconds, nearest.seconds * batch / nearest.batch))
        assert ends[0] * (1 - 1e-9) <= found.seconds <= ends[1] * (1 + 1e-9)


# Hosts, neighbours, roofline


def test_times_of_as_many_ranks_on_the_host_are_preferred() -> None:
    profile = make_profile(layer_times=layer_times(CHAIN, ranks_on_host={1: 1.0, 2: 1.5}))
    assert cost(profile, ranks_on_host=2).seconds == pytest.approx(1.5 * linear_seconds(FC0, "FW", 4))
    assert cost(profile, ranks_on_host=2).source is Source.MEASURED


def test_an_operation_unmeasured_on_the_host_uses_the_others_ratio() -> None:
    times = [
        time
        for time in layer_times(CHAIN, ranks_on_host={1: 1.0, 2: 1.5})
        if time.operation != FC0.operation or time.ranks_on_host == 1
    ]
    found = cost(make_profile(layer_times=tuple(times)), ranks_on_host=2)
    assert found.seconds == pytest.approx(1.5 * linear_seconds(FC0, "FW", 4))
    assert found.source is Source.SCALED
    assert found.method_sd_s == pytest.approx(0, abs=1e-12)
    assert "scaled to 2 by 1.500" in lines(found)


def test_an_unmeasured_host_uses_the_nearest_without_covering_its_error() -> None:
    found = cost(make_profile(layer_times=layer_times(CHAIN, ranks_on_host={1: 1.0, 2: 1.5})), ranks_on_host=8)
    assert found.seconds == pytest.approx(1.5 * linear_seconds(FC0, "FW", 4))
    assert found.source is Source.SCALED
    assert "measured with 2 ranks on a host, and is used for 8; the interval does not cover" in lines(found)


def without(operation: str, times: tuple[LayerTime, ...]) -> tuple[LayerTime, ...]:
    return tuple(time for time in times if time.operation != operation)


def test_an_unmeasured_operation_is_scaled_within_its_kind_by_work() -> None:
    def by_work(layer: Layer, phase: str, batch: int) -> float:
        return 1e-9 * layer.fw_flops * batch

    device = msgspec.structs.replace(make_profile().devices[0], peak_flops=None)
    profile = make_profile(layer_times=without(FC0.operation, layer_times(CHAIN, seconds=by_work)), devices=(device,))
    found = cost(profile)
    assert found.seconds == pytest.approx(by_work(FC0, "FW", 4))
    assert found.source is Source.SCALED
    assert found.method_sd_s == pytest.approx(0, abs=1e-12)
    assert found.remarks[-1].name == "fc0"


def test_how_far_neighbours_are_off_widens_the_spread() -> None:
    exact = make_profile(layer_times=without(FC0.operation, layer_times(CHAIN, seconds=affine_seconds)))
    assert cost(exact).method_sd_s > 0


def test_an_unmeasured_kind_falls_back_to_the_roofline() -> None:
    times = tuple(time for time in layer_times(CHAIN) if not time.operation.startswith("linear"))
    found = cost(make_profile(layer_times=times), phase="BW")
    # 4 samples: 2 x 2 x 64 x 128 FLOPs each; twice the forward's bytes, and twice the parameters.
    flops = 4 * 2 * 2 * 64 * 128
    moved = 2 * (4 * 4 * (64 + 128)) + 2 * 4 * (64 * 128 + 128)
    assert found.seconds == pytest.approx(max(flops / 1e11, moved / 1e10))
    assert found.source is Source.ROOFLINE
    assert found.method_sd_s > 0


def test_a_time_without_any_source_names_the_measuring_command() -> None:
    profile = make_profile(layer_times=(), devices=())
    with pytest.raises(UserError, match=r"paradl-bench layers chain --batch 4"):
        cost(profile)


def test_a_backward_absent_from_the_iteration_takes_no_time() -> None:
    times = tuple(t for t in layer_times(CHAIN) if (t.operation, t.phase) != (FC0.operation, "BW"))
    found = cost(make_profile(layer_times=times), phase="BW")
    assert (found.seconds, found.source) == (0.0, Source.MEASURED)


def test_single_sample_times_are_reported_with_unknown_spread() -> None:
    once = [msgspec.structs.replace(t, time=msgspec.structs.replace(t.time, samples=1)) for t in layer_times(CHAIN)]
    assert "their spread is not known" in lines(cost(make_profile(layer_times=tuple(once))))
    assert not lines(cost(make_profile()))


def test_isolated_operation_times_stand_in_and_their_parts_sum() -> None:
    alone = [
        msgspec.structs.replace(time, mode="isolated", phase=phase)
        for time in layer_times(CHAIN)
        for phase in (["FW"] if time.phase == "FW" else ["BW_input", "BW_weight"])
    ]
    profile = make_profile(layer_times=tuple(alone))
    assert cost(profile).seconds == pytest.approx(linear_seconds(FC0, "FW", 4))
    backward = cost(profile, phase="BW")
    assert backward.seconds == pytest.approx(2 * linear_seconds(FC0, "BW", 4))
    assert "not inside an iteration" in lines(backward)


# Whole models


def test_weight_update_by_an_unmeasured_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"'adam', only of sgd.*--optimizer adam"):
        ModelCosts(make_profile(), CHAIN, dtype="fp32", optimizer="adam").weight_update(4, 1)


def test_a_dtype_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UserError, match="bf16"):
        ModelCosts(make_profile(), CHAIN, dtype="bf16", optimizer="sgd")


def test_a_described_model_scales_update_and_gaps_from_others() -> None:
    other = make_network((64, 128, 256), name="other")
    costs = ModelCosts(
        make_profile(model_times=model_times(CHAIN, between_s=6e-4)), other, dtype="fp32", optimizer="sgd"
    )
    update, between = costs.weight_update(4, 1), costs.between("FW", 4, 1)
    assert update.seconds == pytest.approx(1e-4 * other.parameter_elements / CHAIN.parameter_elements)
    assert between.seconds == pytest.approx(6e-4 * len(other.layers) / len(CHAIN.layers))
    assert update.source is between.source is Source.SCALED
    assert update.method_sd_s > 0
    assert "other as it is was not measured" in lines(update)


def test_another_network_under_a_measured_name_is_another_model() -> None:
    impostor = make_network((64, 128), name="chain")
    costs = ModelCosts(make_profile(), impostor, dtype="fp32", optimizer="sgd")
    assert costs.weight_update(4, 1).source is Source.SCALED


# Plans


def test_the_update_of_fp32_shards_has_no_copies() -> None:
    lowered = {
        "layer_times": tuple(msgspec.structs.replace(time, dtype="bf16-weights") for time in layer_times(CHAIN)),
        "model_times": tuple(msgspec.structs.replace(time, dtype="bf16-weights") for time in model_times(CHAIN)),
    }
    operations = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "send_recv")
    profile = make_profile(communication=tuple(map(ring_fit, operations)), **lowered)
    costs = CostModel(profile=profile, network=CHAIN, dtype="bf16-weights")

    def update_s(text: str) -> float:
        strategy, settings = parse_strategy(text), PlanSettings(batch=8, dtype="bf16-weights")
        plan = planner_for(strategy).plan(CHAIN, strategy, settings)
        return sum(float(costs.price(plan).costs.seconds[index]) for index in plan.of_kind(WeightUpdate))

    # SGD with momentum reads three fp32 tensors and writes two; copies are read and written besides, as bf16 and fp32.
    for shared, alike in (("z3d2", "d2"), ("z3d2p2", "d2p2")):
        assert update_s(shared) == pytest.approx(update_s(alike) / 2 / ((5 * 4 + 2 * (2 + 4)) / (5 * 4)))


def test_every_part_of_a_plan_adds_up() -> None:
    profile = make_profile(model_times=model_times(CHAIN, between_s=1e-4), copies=free_copies(beta_s_per_byte=1e-10))
    priced = price(profile, "d2", 8)
    layers = sum(linear_seconds(layer, phase, 4) for layer in CHAIN.layers for phase in ("FW", "BW"))
    copies = 2 * CHAIN.parameter_bytes * 1e-10
    assert priced.costs.compute_s == pytest.approx(layers + 3e-4 + 1e-4 + copies)
    assert priced.costs.communication_s == pytest.approx(2 * (50e-6 + CHAIN.parameter_bytes / 2 * 1e-9))
    shares = priced.costs.source_shares()
    assert sum(shares.values()) == pytest.approx(1)
    total = priced.costs.compute_s + priced.costs.communication_s
    assert shares["regressed"] == pytest.approx((copies + priced.costs.communication_s) / total)


def test_layers_left_whole_cost_what_was_measured_beside_shards() -> None:
    whole = {layer.operation for layer in CHAIN.layers if layer.kind == "activation"}

    def beside(time: LayerTime) -> LayerTime:
        longer = msgspec.structs.replace(time.time, typical_s=3 * time.time.typical_s)
        return msgspec.structs.replace(time, shard="f2", time=longer)

    times = layer_times(CHAIN)
    profile = make_profile(
        layer_times=(*times, *(beside(time) for time in times if time.operation in whole)),
        communication=tuple(map(ring_fit, ("all_reduce", "all_gather", "reduce_scatter", "broadcast"))),
    )

    def whole_s(text: str) -> list[float]:
        priced = price(profile, text, 4)
        chosen = [index for index, work in priced.plan.of_kind(Compute).items() if work.operation in whole]
        return priced.costs.seconds[chosen].tolist()

    assert whole_s("f2") == pytest.approx([3 * seconds for seconds in whole_s("serial")])


def test_layers_that_share_a_measurement_share_its_error() -> None:
    twice = make_network((64, 64, 64))
    assert twice.layers[0].operation == twice.layers[2].operation
    profile = make_profile(twice, layer_times=layer_times(twice, block_sd=0.1))
    priced = price(profile, "serial", 4)
    seconds = {
        (layer.operation, phase): linear_seconds(layer, phase, 4) for layer in twice.layers for phase in ("FW", "BW")
    }
    expected = math.sqrt(sum((2 * 0.1 * value) ** 2 for value in seconds.values()))
    assert priced.costs.independent_total_sd_s == pytest.approx(expected)


def test_ranks_of_a_node_share_a_host_and_no_more() -> None:
    costs = CostModel(profile=make_profile(), network=CHAIN)
    assert [costs.place(parse_strategy(f"d{ranks}"), 4).ranks_on_host for ranks in (1, 2, 64)] == [1, 2, 2]


def test_a_plan_holds_no_work_that_is_not_priced() -> None:
    priced = price(make_profile(), "d2", 8)
    assert len(priced.costs.seconds) == len(priced.plan.works)
    compute = [isinstance(work, Compute) for work in priced.plan.works]
    assert np.all(priced.costs.seconds[compute] > 0)


def test_a_part_that_stands_for_several_counts_as_each() -> None:
    """Some of every mode, in an order that repeats none side by side."""
    compute = Priced(Cost(2.0, Source.MEASURED, 0.1, 0.2, 0.3, method="roofline"), 2, "a")
    other = Priced(Cost(3.0, Source.SCALED, method_sd_s=0.5), 1, "b", slowdown=(1.5, 2.0), slowdown_sd=(0.1, 0.0))
    call = Priced(Cost(0.5, Source.REGRESSED), 4, "c", True, (("fit", 0.05), ("size", 0.02)), slowdown_sd=(0.0, 0.2))
    one = [compute, call, other, compute, call, compute]
    assert _lists(assemble(one, 0.1)) == _lists(assemble([part._replace() for part in one], 0.1))


def _lists(costs: Costs) -> dict[str, object]:
    arrays = {field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)}
    modes = {mode.name: [shift.tolist() for shift in mode[1:]] for mode in arrays.pop("modes")}
    return {name: array.tolist() for name, array in arrays.items()} | {"modes": modes}
