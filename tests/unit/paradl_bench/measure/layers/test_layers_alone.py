"""Predictions from a profile that holds layer times and no iterations, as imported traces give it."""

from __future__ import annotations

import msgspec
import pytest
from profile_factory import make_profile

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named, evaluators

BATCH = 16


def layers_alone(**changes: object) -> Profile:
    return make_profile(model_times=(), copies=(), **changes)


def predict(profile: Profile, strategy: str, evaluator: str = "simulate", optimizer: str = "sgd") -> Prediction:
    network = next(iter(profile.network.values()))
    model = CostModel(profile=profile, network=network, optimizer=optimizer)
    settings = PlanSettings(batch=BATCH, optimizer=optimizer)
    point = Configuration(strategy=parse_strategy(strategy), settings=settings)
    return Predictor(model, evaluator_named(evaluator)).predict(point)


@pytest.mark.parametrize("evaluator", sorted({*evaluators()} - {"flops"}))
@pytest.mark.parametrize("strategy", ["serial", "d2"])
def test_every_evaluator_predicts_and_says_what_it_took_as_none(evaluator: str, strategy: str) -> None:
    found = predict(layers_alone(), strategy, evaluator)
    assert found.iteration_s > 0
    assert any("time between operations" in text and "taken as none" in text for text in found.provenance.extrapolated)
    assert any(
        "weight update: not measured, at the bandwidth of memory" in text for text in found.provenance.extrapolated
    )


def test_the_update_moves_five_tensors_through_memory() -> None:
    profile = layers_alone()
    network = next(iter(profile.network.values()))
    bandwidth = profile.devices[0].memory_bandwidth_bytes_per_s
    assert bandwidth
    exact = 5 * 4 * network.parameter_elements / bandwidth
    assert predict(profile, "serial").time.breakdown_s["WU"] == pytest.approx(exact)
    assert predict(profile, "serial", optimizer="adam").time.breakdown_s["WU"] == pytest.approx(exact * 7 / 5)


def test_without_a_bandwidth_it_is_none_and_said_to_be() -> None:
    device = msgspec.structs.replace(make_profile().devices[0], memory_bandwidth_bytes_per_s=None, peak_flops=None)
    found = predict(layers_alone(devices=(device,)), "d2")
    assert found.time.breakdown_s["WU"] == 0
    for what in ("weight update", "copies of gradients"):
        assert any(text.startswith(what) and "taken as none" in text for text in found.provenance.extrapolated)


def test_iterations_of_another_dtype_are_no_layers_alone() -> None:
    profile = make_profile()
    network = next(iter(profile.network.values()))
    with pytest.raises(UserError, match="no iterations in bf16"):
        CostModel(profile=profile, network=network, dtype="bf16")
