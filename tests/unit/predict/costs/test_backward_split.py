"""Backward in two parts, priced as shares of the whole."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from profile_factory import free_copies, layer_times, linear_seconds, make_network, make_profile, ring_fit, summary

from calibrate.profile.profile import Profile
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Compute, Plan
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.compute.backward_split import SPLIT_MODE
from predict.costs.cost_model import CostModel
from predict.costs.priced import PricedPlan
from predict.costs.sourced import UNIFORM_TO_SD, Source
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()
LINEAR = [layer for layer in CHAIN.layers if layer.parameters]
SETTINGS = plan_settings(batch=16, micro_batches=4, schedule="zb")


def profile_with(*shares: float) -> Profile:
    """Parts of the first so many linear layers were measured alone, the input's taking that share of both."""
    in_situ = layer_times(CHAIN)
    alone = []
    for layer, share in zip(LINEAR, shares, strict=False):
        for time in in_situ:
            if (time.operation, time.phase) != (layer.operation, "BW"):
                continue
            for phase, own in (("BW_input", share), ("BW_weight", 1 - share)):
                # Alone everything takes three times as long, to tell a share from seconds.
                taken = summary(3 * own * linear_seconds(layer, "BW", time.batch))
                alone.append(msgspec.structs.replace(time, mode="isolated", phase=phase, time=taken))
    return make_profile(
        layer_times=(*in_situ, *alone), communication=(ring_fit(), ring_fit("send_recv")), copies=free_copies()
    )


def priced(profile: Profile) -> PricedPlan:
    costs = CostModel(profile=profile, network=CHAIN)
    return costs.price(planner_for(parse_strategy("p2")).plan(CHAIN, parse_strategy("p2"), SETTINGS))


def parts(plan: Plan) -> dict[tuple[str, str], int]:
    return {(work.layer, work.phase): i for i, work in enumerate(plan.works) if isinstance(work, Compute)}


def predict(profile: Profile, schedule: str = "zb") -> Prediction:
    point = Configuration(strategy=parse_strategy("p2"), settings=SETTINGS.changed(PipelineOptions, schedule=schedule))
    return Predictor(CostModel(profile=profile, network=CHAIN), evaluator_named("simulate")).predict(point)


@pytest.mark.parametrize("shares", [(), (0.3, 0.3, 0.3)])
def test_backward_parts_of_a_layer_sum_to_its_whole_backward(shares: tuple[float, ...]) -> None:
    found = priced(profile_with(*shares))
    where = parts(found.plan)
    split = [layer for layer in LINEAR if (layer.name, "BW_input") in where]
    assert split
    for layer in split:
        own = [found.costs.seconds[where[layer.name, phase]] for phase in ("BW_input", "BW_weight")]
        assert sum(own) == pytest.approx(linear_seconds(layer, "BW", 4))
        expected = shares[0] if shares else layer.bw_input_flops / (layer.bw_input_flops + layer.bw_weight_flops)
        assert own[0] / sum(own) == pytest.approx(expected)


def test_what_one_part_takes_the_other_does_not() -> None:
    found = priced(profile_with())
    (mode,) = (mode for mode in found.costs.modes if mode.name == SPLIT_MODE)
    assert mode.seconds.sum() == pytest.approx(0.0)
    where = parts(found.plan)
    layer = next(layer for layer in LINEAR if (layer.name, "BW_input") in where)
    moved = mode.seconds[where[layer.name, "BW_input"]]
    assert moved == pytest.approx(UNIFORM_TO_SD * linear_seconds(layer, "BW", 4))
    assert np.all(mode.seconds[[i for (_, phase), i in where.items() if phase in ("FW", "BW")]] == 0)


def test_unmeasured_backward_parts_carry_the_flops_error_of_measured_ones() -> None:
    layer = LINEAR[0]
    by_flops = layer.bw_input_flops / (layer.bw_input_flops + layer.bw_weight_flops)
    found = priced(profile_with(by_flops + 0.1))
    where = parts(found.plan)
    (mode,) = (mode for mode in found.costs.modes if mode.name == SPLIT_MODE)
    other = LINEAR[-1]
    index = where[other.name, "BW_weight"]
    assert mode.seconds[index] == pytest.approx(-0.1 * linear_seconds(other, "BW", 4))
    assert found.costs.source[index, Source.SCALED] == 1
    all_measured = priced(profile_with(0.4, 0.4, 0.4))
    index = parts(all_measured.plan)[other.name, "BW_weight"]
    assert all_measured.costs.source[index, Source.MEASURED] == 1


def test_a_prediction_says_what_parts_backward() -> None:
    guessed, measured = predict(profile_with()), predict(profile_with(0.5, 0.5, 0.5))
    assert any("--isolated split measures it" in line for line in guessed.provenance.extrapolated)
    assert not any("--isolated split" in line for line in measured.provenance.extrapolated)
    assert guessed.provenance.sources["scaled"] > 0
    assert measured.provenance.sources["scaled"] == 0
    low, high = guessed.time.interval_s
    assert high - low > measured.time.interval_s[1] - measured.time.interval_s[0]


def test_zero_bubble_is_faster_and_less_idle_than_1f1b() -> None:
    profile = profile_with(0.5, 0.5, 0.5)
    zero_bubble, alternating = predict(profile), predict(profile, "1f1b")
    assert zero_bubble.iteration_s < alternating.iteration_s
    assert zero_bubble.time.breakdown_s["pipeline_idle"] < alternating.time.breakdown_s["pipeline_idle"]
