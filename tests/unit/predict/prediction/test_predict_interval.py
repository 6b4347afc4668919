"""The 90% interval, against what can be computed by hand."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from profile_factory import (
    layer_times,
    linear_seconds,
    make_network,
    make_profile,
    model_times,
    ring_fit,
    with_compute,
)

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from paradl_bench.network.graph import Layer
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from predict.costs.cost_model import CostModel
from predict.prediction import interval as interval_module
from predict.prediction.interval import interval
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, PreparedEvaluation, evaluator_named

CHAIN = make_network()
COMPUTE_S = sum(linear_seconds(layer, phase, 4) for layer in CHAIN.layers for phase in ("FW", "BW"))


def predict(profile: Profile, strategy: str = "serial", batch: int = 4, evaluator: str = "simulate") -> Prediction:
    settings = plan_settings(batch=batch, first_bucket_bytes=1 << 40, bucket_cap_bytes=1 << 40)
    costs = CostModel(profile=profile, network=CHAIN)
    return Predictor(costs, evaluator_named(evaluator)).predict(
        Configuration(strategy=parse_strategy(strategy), settings=settings)
    )


def sides(prediction: Prediction) -> tuple[float, float]:
    low, high = prediction.time.interval_s
    return prediction.iteration_s - low, high - prediction.iteration_s


def test_without_any_spread_it_is_a_point() -> None:
    assert sides(predict(make_profile())) == pytest.approx((0.0, 0.0), abs=1e-15)


def test_layers_own_spreads_add_in_quadrature() -> None:
    profile = make_profile(layer_times=layer_times(CHAIN, block_sd=0.1))
    single = [0.1 * linear_seconds(layer, phase, 4) for layer in CHAIN.layers for phase in ("FW", "BW")]
    expected = Z90 * math.sqrt(sum(value**2 for value in single))
    assert sides(predict(profile)) == pytest.approx((expected, expected))


@pytest.mark.parametrize("strategy", ["d2", "p2", "d2p2"])
def test_evaluations_beside_each_other_give_the_same(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"layer_times": layer_times(CHAIN, block_sd=0.1), "model_times": model_times(CHAIN, common_sd=0.03)}
    profile = make_profile(**times, communication=(ring_fit(), ring_fit("send_recv")))
    in_turn = predict(profile, strategy)
    evaluated_by: set[int] = set()

    def noted(*arguments: Any) -> list[float]:
        evaluated_by.add(threading.get_ident())
        return shifted(*arguments)

    shifted = interval_module._shifted
    monkeypatch.setattr(interval_module, "_shifted", noted)
    monkeypatch.setattr(interval_module, "_WORTH_THREADS_S", 0.0)
    assert predict(profile, strategy) == in_turn
    assert len(in_turn.provenance.spread_s) > 2
    assert threading.get_ident() not in evaluated_by


def test_what_all_layers_share_adds_up() -> None:
    found = predict(make_profile(model_times=model_times(CHAIN, common_sd=0.03)))
    expected = Z90 * 0.03 * (COMPUTE_S + 1e-4)
    assert sides(found) == pytest.approx((expected, expected))
    assert found.provenance.spread_s == pytest.approx({"compute, all layers": expected})


def test_sources_of_error_add_in_quadrature() -> None:
    profile = make_profile(layer_times=layer_times(CHAIN, block_sd=0.1), model_times=model_times(CHAIN, common_sd=0.03))
    parts = predict(profile).provenance.spread_s
    assert sides(predict(profile))[0] == pytest.approx(math.hypot(parts["each layer"], parts["compute, all layers"]))


@pytest.mark.parametrize(("remainder", "side"), [(0.05, 1), (-0.05, 0)])
def test_unexplained_closure_moves_one_side_and_never_the_point(remainder: float, side: int) -> None:
    found = predict(make_profile(model_times=model_times(CHAIN, remainder=remainder)))
    whole = (COMPUTE_S + 1e-4) / (1 - remainder)
    assert found.iteration_s == pytest.approx(COMPUTE_S + 1e-4)
    assert sides(found)[side] == pytest.approx(abs(whole - found.iteration_s))
    assert sides(found)[1 - side] == pytest.approx(0.0, abs=1e-15)


def test_medians_that_miss_the_median_iteration_widen_the_interval() -> None:
    def iteration(layer: Layer, phase: str, batch: int) -> float:
        return 1.25 * linear_seconds(layer, phase, batch)

    found = predict(make_profile(model_times=model_times(CHAIN, seconds=iteration)))
    assert found.iteration_s == pytest.approx(COMPUTE_S + 1e-4)
    assert sides(found) == pytest.approx((0.0, 0.25 * COMPUTE_S), abs=1e-15)


def test_a_closure_that_explains_nothing_is_refused() -> None:
    times = tuple(msgspec.structs.replace(time, remainder_relative=1.0) for time in model_times(CHAIN))
    with pytest.raises(UserError, match="explain nothing of its measured iterations"):
        predict(make_profile(model_times=times))


@pytest.mark.parametrize("evaluator", ["simulate", "paradl", "csf"])
def test_the_covariance_of_the_fit_is_propagated(evaluator: str) -> None:
    covariance = np.array([[1e-11, -2e-16], [-2e-16, 1e-20]])
    fit = ring_fit(covariance=tuple(map(tuple, covariance.tolist())))
    terms = np.array([2.0, CHAIN.parameter_bytes])
    expected = Z90 * math.sqrt(terms @ covariance @ terms)
    found = predict(make_profile(communication=(fit,)), "d2", 8, evaluator)
    assert sides(found) == pytest.approx((expected, expected), rel=1e-6)


def test_drift_of_communication_counts_where_it_is_exposed() -> None:
    found = predict(make_profile(communication=(ring_fit(block_relative_sd=0.2),)), "d2", 8)
    expected = Z90 * 0.2 * found.time.communication_s
    assert sides(found) == pytest.approx((expected, expected))


def hidden(profile: Profile) -> Prediction:
    settings = plan_settings(batch=8, first_bucket_bytes=1, bucket_cap_bytes=1 << 40)
    costs = CostModel(profile=profile, network=CHAIN)
    return Predictor(costs, evaluator_named("simulate")).predict(
        Configuration(strategy=parse_strategy("d2"), settings=settings)
    )


def test_the_spread_of_interference_counts_where_there_is_overlap() -> None:
    sure = hidden(make_profile(contexts=(with_compute(1.5, 1.5),)))
    unsure = hidden(make_profile(contexts=(with_compute(1.5, 1.5, sd=0.3),)))
    assert sure.time.overlap_s > 0
    assert "interference, compute" not in sure.provenance.spread_s
    assert unsure.provenance.spread_s["interference, compute"] > 0
    assert sides(unsure) > sides(sure)


def test_the_slow_down_never_falls_below_one_inside_the_interval() -> None:
    found = hidden(make_profile(contexts=(with_compute(1.0, 1.0, sd=0.7),)))
    below, above = sides(found)
    assert below == pytest.approx(0.0, abs=1e-12)
    assert above > 0


def test_the_lag_of_the_slowest_rank_is_in_the_point() -> None:
    lagging = make_profile(model_times=model_times(CHAIN, quantiles=(0.8, 1.0, 1.2), samples=1000))
    found = predict(lagging, "d2", 8, "simulate")
    # Times are spread evenly from 0.8 to 1.2: the larger of two has two thirds of that behind it in the mean.
    factor = 1 + 0.4 * (2 / 3 - 1 / 2)
    assert found.time.straggler == pytest.approx(factor)
    assert found.iteration_s == pytest.approx(factor * found.time.compute_s + found.time.communication_s)


def test_unmeasured_overlap_widens_the_upper_side_by_hidden_time() -> None:
    one_bucket_a_layer = plan_settings(batch=8, first_bucket_bytes=1, bucket_cap_bytes=1)

    def of(profile: Profile, evaluator: str) -> Prediction:
        point = Configuration(strategy=parse_strategy("d2"), settings=one_bucket_a_layer)
        return Predictor(CostModel(profile=profile, network=CHAIN), evaluator_named(evaluator)).predict(point)

    fit = ring_fit("all_reduce")
    for evaluator in ("simulate", "osf", "dag"):
        unknown = of(make_profile(communication=(fit,), contexts=()), evaluator)
        known = of(make_profile(communication=(fit,), contexts=(with_compute(1.0, 1.0),)), evaluator)
        assert unknown.iteration_s == pytest.approx(known.iteration_s)
        assert unknown.time.overlap_s > 0
        hidden = 0.95 * unknown.time.overlap_s
        assert unknown.provenance.spread_s["overlap that was not measured"] == pytest.approx(hidden)
        assert sides(unknown)[0] == pytest.approx(sides(known)[0], abs=1e-15)
        assert sides(unknown)[1] == pytest.approx(math.hypot(sides(known)[1], hidden))
    assert "overlap that was not measured" not in of(make_profile(communication=(fit,)), "csf").provenance.spread_s


def test_a_published_mean_of_interference_spans_none_to_most() -> None:
    cpu = make_profile(communication=(ring_fit("all_reduce"),), contexts=())
    gpu = msgspec.structs.replace(cpu, devices=(msgspec.structs.replace(cpu.devices[0], kind="cuda"),))
    point = Configuration(
        strategy=parse_strategy("d2"), settings=plan_settings(batch=8, first_bucket_bytes=1, bucket_cap_bytes=1)
    )

    def of(profile: Profile, evaluator: str) -> Prediction:
        costs = CostModel(profile=profile, network=CHAIN, backend="gloo")
        return Predictor(costs, evaluator_named(evaluator)).predict(point)

    free, assumed = of(cpu, "simulate"), of(gpu, "simulate")
    # All that is exchanged is hidden but the last of it: compute beside it takes 1.189 times as long.
    assert assumed.iteration_s > free.iteration_s
    assert assumed.iteration_s - free.iteration_s <= 0.189 * assumed.time.overlap_s
    assert assumed.provenance.spread_s["overlap that was not measured"] == pytest.approx(
        max(assumed.iteration_s - free.iteration_s, free.iteration_s + 0.95 * free.time.overlap_s - assumed.iteration_s)
    )
    down, up = sides(assumed)
    unchanged_below, _ = sides(free)
    assert down == pytest.approx(math.hypot(unchanged_below, assumed.iteration_s - free.iteration_s), rel=1e-3)
    assert assumed.iteration_s + up == pytest.approx(free.iteration_s + 0.95 * free.time.overlap_s, rel=1e-2)
    # The closed forms take overlap as free, as their papers do, and their interval tells of the same.
    assert of(gpu, "osf").iteration_s == pytest.approx(of(cpu, "osf").iteration_s)
    assert sides(of(gpu, "osf")) == pytest.approx(sides(of(cpu, "osf")))


def on_gpu(profile: Profile) -> Profile:
    return msgspec.structs.replace(profile, devices=(msgspec.structs.replace(profile.devices[0], kind="cuda"),))


def unmeasured(*operations: str) -> Profile:
    return make_profile(communication=tuple(map(ring_fit, operations)), contexts=())


def test_unmeasured_overlap_widens_the_interval_of_efficiency() -> None:
    found = hidden(on_gpu(unmeasured("all_reduce")))
    low, high = found.time.interval_s
    assert low < found.iteration_s < high
    # One rank overlaps nothing, and is as fast whatever overlap costs.
    of_one_s = found.use.efficiency * found.iteration_s
    assert found.use.efficiency_interval == pytest.approx((of_one_s / high, of_one_s / low), rel=0.01)


def test_stages_wait_for_what_the_others_lose_to_overlap() -> None:
    profile = unmeasured("all_reduce", "send_recv")
    point = Configuration(
        strategy=parse_strategy("p2d2"),
        settings=plan_settings(batch=8, first_bucket_bytes=1, bucket_cap_bytes=1, micro_batches=4, schedule="1f1b"),
    )

    def workload(of: Profile) -> PreparedEvaluation:
        return evaluator_named("simulate").prepare(CostModel(profile=of, network=CHAIN, backend="gloo"), point)

    free, assumed = workload(profile), workload(on_gpu(profile))
    added_s = assumed.timing().iteration_s - free.timing().iteration_s
    assert added_s > 0.95 * free.timing().overlap_s, "the point assumes more than one stage overlaps"
    upper, lower = interval(assumed).moved_s["overlap that was not measured"]
    assert lower == pytest.approx(free.timing().iteration_s)
    assert upper > assumed.timing().iteration_s


def test_measured_slowdown_beside_all_reduces_is_not_unmeasured_overlap() -> None:
    profile = unmeasured("all_reduce")
    point = Configuration(strategy=parse_strategy("d2"), settings=plan_settings(batch=8, first_bucket_bytes=1))
    workload = evaluator_named("simulate").prepare(CostModel(profile=profile, network=CHAIN), point)
    costs = workload.costs
    slowed = dataclasses.replace(costs, communication_slowdown=np.where(costs.is_communication, 1.5, 1.0))
    found = interval(dataclasses.replace(workload, costs=slowed))
    _, lower = found.moved_s["overlap that was not measured"]
    assert lower == pytest.approx(dataclasses.replace(workload, costs=slowed).timing().iteration_s)


def of_large_messages(seconds_of_layers: float = 0.0) -> PreparedEvaluation:
    """d2 over links so slow that messages take most, with two errors of as much as they take."""
    fit = ring_fit(alpha_s=0.05, block_relative_sd=2.0, covariance=((1.0, 0.0), (0.0, 0.0)))
    profile = make_profile(communication=(fit,), model_times=model_times(CHAIN, common_sd=seconds_of_layers))
    point = Configuration(strategy=parse_strategy("d2"), settings=plan_settings(batch=8, bucket_cap_bytes=1 << 40))
    return evaluator_named("simulate").prepare(CostModel(profile=profile, network=CHAIN), point)


def test_errors_of_communication_leave_what_the_iteration_takes_without_any() -> None:
    workload = of_large_messages()
    costs, found = workload.costs, interval(workload)
    seconds = np.where(costs.is_communication, 0.0, costs.seconds)
    floor_s = workload.time(seconds, costs.compute_slowdown, costs.communication_slowdown).iteration_s
    assert len(found.moved_s) >= 2
    assert all(lower == pytest.approx(floor_s) for _, lower in found.moved_s.values())
    point_s = workload.timing().iteration_s
    assert point_s - math.sqrt(2) * (point_s - floor_s) < 0, "in quadrature they would end below nothing"
    assert found.low_s == pytest.approx(floor_s)


def test_compute_s_own_errors_go_below_that() -> None:
    sure, unsure = interval(of_large_messages()), interval(of_large_messages(0.03))
    point_s, moved_s = of_large_messages().timing().iteration_s, unsure.spread_s["compute, all layers"]
    assert moved_s > 0
    assert unsure.low_s == pytest.approx(point_s - math.hypot(point_s - sure.low_s, moved_s))
    assert unsure.low_s < sure.low_s


def test_an_error_of_more_than_any_time_is_refused() -> None:
    workload = of_large_messages()
    endless = [mode._replace(seconds=mode.seconds + np.inf) for mode in workload.costs.modes]
    with pytest.raises(
        UserError, match=r"the error of .* in the profile is too large for a prediction; measure it again"
    ):
        interval(dataclasses.replace(workload, costs=dataclasses.replace(workload.costs, modes=tuple(endless))))
