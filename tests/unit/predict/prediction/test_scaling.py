"""Efficiency bands, knees of sweeps, and what iterations make of their ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from network_factory import NetworkFactory
from profile_factory import layer_times, make_network, make_profile, model_times, ring_fit

from calibrate.profile.profile import Profile
from calibrate.profile.roofline_rates import DeviceRate
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from predict.costs.cost_model import CostModel
from predict.costs.hardware.what_if_hardware import Hardware
from predict.prediction.interval import Interval, Timed
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.scaling import Sweep, with_knees
from predict.prediction.utilisation import check_price, model_flops
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()


def predict(
    profile: Profile,
    *strategies: str,
    batch: int = 4,
    network: ModelGraph = CHAIN,
    hardware: Hardware | None = None,
    evaluator: str = "csf",
    **options: object,
) -> list[Prediction]:
    """Predictions with so many samples a rank."""
    costs = CostModel(profile=profile, network=network, hardware=hardware or Hardware())
    predictor = Predictor(costs, evaluator_named(evaluator), **options)  # type: ignore[arg-type]
    return [
        predictor.predict(Configuration(strategy=strategy, settings=PlanSettings(batch=batch * strategy.ranks)))
        for strategy in map(parse_strategy, strategies)
    ]


def test_what_slows_both_alike_takes_nothing_from_efficiency() -> None:
    slow_spells = make_profile(
        model_times=model_times(CHAIN, common_sd=0.2), communication=(ring_fit(alpha_s=1e-15, beta_s_per_byte=0.0),)
    )
    serial, data = predict(slow_spells, "serial", "d2")
    assert serial.use.efficiency_interval == (1, 1)
    assert data.time.interval_s[0] < 0.8 * data.iteration_s
    assert data.use.efficiency_interval == pytest.approx((1, 1))


def test_the_efficiency_band_of_an_uncertain_exchange_matches_draws() -> None:
    beta_s, sd = 1e-8, 1e-9
    profile = make_profile(
        communication=(ring_fit(alpha_s=0.0, beta_s_per_byte=beta_s, covariance=((0.0, 0.0), (0.0, sd**2))),)
    )
    (found,) = predict(profile, "d2")
    (alone,) = predict(profile, "serial")
    drawn = np.random.default_rng(0).normal(beta_s, sd, 200_000)
    efficiencies = alone.iteration_s / (alone.iteration_s + CHAIN.parameter_bytes * drawn)
    assert found.use.efficiency_interval == pytest.approx(np.quantile(efficiencies, [0.05, 0.95]), rel=2e-3)


def test_layers_own_errors_count_on_both_sides() -> None:
    profile = make_profile(layer_times=layer_times(CHAIN, block_sd=0.1), communication=(ring_fit(alpha_s=0.0),))
    (found,) = predict(profile, "d2")
    (alone,) = predict(profile, "serial")
    sizes = [each.provenance.spread_s["each layer"] / each.iteration_s for each in (found, alone)]
    low, high = found.use.efficiency_interval
    assert high - found.use.efficiency == pytest.approx(found.use.efficiency * math.hypot(*sizes))
    assert found.use.efficiency - low == pytest.approx(high - found.use.efficiency)


def at(ranks: int, efficiency: float, *, strategy: str = "", per_rank: int = 4) -> Prediction:
    (found,) = predict(make_profile(), "d2")
    use = msgspec.structs.replace(found.use, efficiency=efficiency)
    return msgspec.structs.replace(
        found, strategy=strategy or f"d{ranks}", ranks=ranks, batch=per_rank * ranks, use=use
    )


def certain(points: Sequence[Prediction]) -> list[Timed]:
    """Iterations that the efficiencies stand for, without any error."""
    seconds = [1 / point.use.efficiency for point in points]
    return [Timed(value, Interval(value, value, {}, {}, 0.0, ())) for value in seconds]


def knees(
    points: Sequence[Prediction], *, strong: bool = False, fraction: float = 0.8
) -> tuple[tuple[Prediction, ...], tuple[Sweep, ...]]:
    return with_knees(points, certain(points), strong=strong, fraction=fraction)


def test_the_knee_is_the_last_point_with_sufficient_efficiency() -> None:
    points = [at(ranks, value) for ranks, value in ((2, 0.9), (4, 0.85), (8, 0.73), (16, 0.7), (32, 0.9))]
    found, (sweep,) = knees(points)
    # 0.8 of 0.9 is 0.72. That 32 ranks are efficient again makes no knee of them.
    assert [point.use.knee_ranks for point in found] == [8] * 5
    assert "8 ranks. Up to there efficiency is at least 0.8 of that at 2 ranks." in str(sweep)
    assert sweep.knee_range == (8, 8)
    assert knees(points, fraction=0.95)[1][0].knee_ranks == 2
    assert "the most of the sweep" in str(knees(points, fraction=0.1)[1][0])


def test_the_knees_range_comes_from_independent_errors_of_points() -> None:
    points = [at(ranks, value) for ranks, value in ((2, 0.9), (4, 0.8), (8, 0.65), (16, 0.5))]
    # Ratios to the first are 1, 0.89, 0.72, 0.56; an error of 15% of each other point takes and gives 15%.
    timed = certain(points)
    loose = [
        each if index == 0 else each._replace(bounds=each.bounds._replace(own_s=0.15 * each.iteration_s))
        for index, each in enumerate(timed)
    ]
    (sweep,) = with_knees(points, loose, strong=False, fraction=0.8)[1]
    assert (sweep.knee_ranks, sweep.knee_range) == (4, (2, 8))
    assert "4 ranks (90%: 2 to 8). " in str(sweep)


def test_errors_shared_by_all_points_leave_the_knee_unmoved() -> None:
    points = [at(ranks, value) for ranks, value in ((2, 0.9), (4, 0.8), (8, 0.65), (16, 0.5))]
    shared = [
        each._replace(
            bounds=each.bounds._replace(moved_s={"compute": (1.4 * each.iteration_s, 0.6 * each.iteration_s)})
        )
        for each in certain(points)
    ]
    (sweep,) = with_knees(points, shared, strong=False, fraction=0.8)[1]
    assert sweep.knee_range == (sweep.knee_ranks,) * 2 == (4, 4)


def test_a_sweep_needs_two_points_of_one_strategy_and_samples() -> None:
    points = [at(2, 0.9), at(4, 0.5), at(2, 0.9, per_rank=8), at(4, 0.8, per_rank=8), at(4, 0.9, strategy="f4")]
    found, sweeps = knees(points)
    assert [point.use.knee_ranks for point in found] == [2, 2, 4, 4, None]
    assert [str(sweep).partition(":")[0] for sweep in sweeps] == ["data, 4 samples a rank", "data, 8 samples a rank"]
    strong = [msgspec.structs.replace(point, batch=64) for point in points[:2]]
    found, (sweep,) = knees(strong, strong=True)
    assert [point.use.knee_ranks for point in found] == [2, 2]
    assert str(sweep).startswith("data, batch 64: 2 ranks")


def test_sweeps_differ_by_axes_inside_the_growing_axis() -> None:
    strategies = {"d2f2": 0.9, "d4f2": 0.5, "d2f4": 0.9, "d4f4": 0.8, "z3d4f4": 0.1}
    points = [at(parse_strategy(text).ranks, value, strategy=text) for text, value in strategies.items()]
    found, sweeps = knees(points)
    assert [point.use.knee_ranks for point in found] == [4, 4, 16, 16, None]
    assert [sweep.strategy for sweep in sweeps] == ["data+f2", "data+f4"]


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, math.nan])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(UserError, match="--knee"):
        with_knees([], [], strong=False, fraction=fraction)


def with_rates(*rates: tuple[str, int, float]) -> Profile:
    profile = make_profile()
    known = tuple(
        DeviceRate(
            resource="compute",
            dtype=dtype,
            ranks_on_host=ranks,
            per_s=per_s,
            relative_sd=0.0,
            kernel="gemm",
            working_set_bytes=1,
            spread_over_kernels=(per_s, per_s),
        )
        for dtype, ranks, per_s in rates
    )
    return msgspec.structs.replace(profile, devices=(msgspec.structs.replace(profile.devices[0], rates=known),))


def test_utilisation_is_model_flops_over_peak_flops_of_all_ranks() -> None:
    serial, data = predict(with_rates(("fp32", 1, 1e11), ("fp32", 2, 6e10), ("bf16", 1, 9e11)), "serial", "d2")
    widths = (64, 128, 256, 32)
    per_sample = sum(6 * rows * columns + 2 * columns for rows, columns in itertools.pairwise(widths))
    per_sample -= 2 * widths[0] * widths[1]  # the gradient of the input, which nobody computes
    assert serial.use.model_flops == 4 * per_sample
    assert serial.use.model_flops_utilisation == pytest.approx(4 * per_sample / serial.iteration_s / 1e11)
    assert data.use.model_flops == 8 * per_sample
    assert data.use.model_flops_utilisation == pytest.approx(8 * per_sample / (data.iteration_s * 2 * 6e10))
    assert data.use.peak_flops_basis == "measured by doctor in fp32"


def test_what_no_parameter_has_a_part_in_has_no_gradient() -> None:
    factory = NetworkFactory(4, 8, 8)
    factory.pool("pool", 2)
    factory.conv("first", 8)
    factory.conv("second", 8)
    network = factory.network("x")
    layers = {layer.name: layer for layer in network.layers}
    forward = sum(layer.fw_flops for layer in network.layers)
    weights = sum(layer.bw_weight_flops for layer in network.layers)
    assert min(layer.bw_input_flops for layer in layers.values()) > 0
    assert model_flops(network, 3) == 3 * (forward + weights + layers["second"].bw_input_flops)


def test_utilisation_is_of_the_device_that_is_asked_for() -> None:
    rates = with_rates(("fp32", 1, 1e11))
    device = msgspec.structs.replace(rates.devices[0], memory_bandwidth_bytes_per_s=1e10)
    (found,) = predict(msgspec.structs.replace(rates, devices=(device,)), "serial", hardware=Hardware(peak_flops=3.0))
    assert found.use.peak_flops_per_rank == pytest.approx(3e11)


def test_what_layers_reached_is_no_peak() -> None:
    (found,) = predict(make_profile(), "serial")
    assert found.use.model_flops_utilisation is None
    assert found.use.peak_flops_per_rank is None
    assert "doctor --measure" in found.use.peak_flops_basis


def test_hours_and_cost_count_all_ranks() -> None:
    (found,) = predict(make_profile(), "d2", dataset_samples=100, price_per_rank_hour=2.5)
    assert found.time.epoch_s is not None
    # 100 samples in mini-batches of 8 are 13 iterations.
    hours = 13 * found.iteration_s * 2 / 3600
    assert found.use.rank_hours_per_epoch == pytest.approx(hours)
    assert found.use.cost_per_epoch == pytest.approx(2.5 * hours)
    assert found.use.rank_hours_per_million_samples == pytest.approx(1e6 / found.time.samples_per_s * 2 / 3600)
    assert found.use.cost_per_million_samples == pytest.approx(2.5 * found.use.rank_hours_per_million_samples)
    assert found.use.samples_per_s_per_rank == pytest.approx(found.time.samples_per_s / 2)
    assert found.use.tokens_per_s_per_rank is None


def test_without_epoch_or_price_there_is_neither() -> None:
    (found,) = predict(make_profile(), "d2")
    assert (found.use.rank_hours_per_epoch, found.use.cost_per_epoch, found.use.cost_per_million_samples) == (
        None,
        None,
        None,
    )
    assert found.use.rank_hours_per_million_samples > 0


def test_tokens_are_those_of_all_sequences_of_a_sample() -> None:
    texts = msgspec.structs.replace(CHAIN, input_dtype="int64", input_shape=(2, 32))
    (found,) = predict(make_profile(texts), "d2", network=texts)
    assert found.use.tokens_per_s_per_rank == pytest.approx(64 * found.use.samples_per_s_per_rank)


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(UserError, match="--price"):
        check_price(price)
