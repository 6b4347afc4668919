"""Predictions of pipelines from a profile whose times are known."""

from __future__ import annotations

import pytest
from profile_factory import free_copies, linear_seconds, make_network, make_profile, ring_fit

from paradl_bench.spec.plan import PlanSettings, Transfer
from paradl_bench.spec.strategy import parse_strategy
from paradl_bench.strategies.catalog import planner_for
from predict.cost_model import CostModel
from predict.prediction import Prediction, Predictor
from predict.workload import Point, evaluator_named

CHAIN = make_network()


def predict(evaluator: str = "simulate", strategy: str = "p2", schedule: str = "gpipe", batch: int = 16) -> Prediction:
    # Micro-batches of 4, which the profile has times of.
    settings = PlanSettings(batch=batch, micro_batches=4, schedule=schedule)
    profile = make_profile(communication=(ring_fit(), ring_fit("send_recv")), copies=free_copies())
    model = CostModel(profile=profile, network=CHAIN)
    return Predictor(model, evaluator_named(evaluator)).predict(
        Point(strategy=parse_strategy(strategy), settings=settings)
    )


def test_parts_add_up_to_the_iteration() -> None:
    found = predict()
    parts = found.breakdown_s
    assert parts["pipeline_idle"] > 0
    assert sum(parts[name] for name in ("FW", "BW", "GE", "WU", "pipeline_idle")) == pytest.approx(found.iteration_s)
    low, high = found.interval_s
    assert low <= found.iteration_s <= high


def test_two_stages_take_less_than_one_device_and_more_than_half_of_it() -> None:
    serial_s = 4 * sum(linear_seconds(layer, phase, 4) for layer in CHAIN.layers for phase in ("FW", "BW"))
    assert serial_s / 2 < predict().iteration_s < serial_s


def test_the_closed_form_knows_no_overlap_and_one_schedule() -> None:
    assert predict("paradl").iteration_s >= predict().breakdown_s["FW"]
    assert any("GPipe's schedule alone" in line for line in predict("paradl", schedule="1f1b").extrapolated)
    assert not any("GPipe's schedule" in line for line in predict("paradl").extrapolated)


def test_replicas_of_stages_exchange_their_gradients() -> None:
    found = predict(strategy="d2p2", batch=32)
    assert found.breakdown_s["GE"] > 0
    assert found.iteration_s > predict().iteration_s


def test_a_send_takes_the_time_of_its_messages_and_a_receive_none() -> None:
    model = CostModel(profile=make_profile(communication=(ring_fit("send_recv"),)), network=CHAIN)
    strategy = parse_strategy("p2")
    plan = planner_for(strategy).plan(CHAIN, strategy, PlanSettings(batch=16, micro_batches=4))
    seconds = model.price(plan).costs.seconds
    for work, found in zip(plan.works, seconds, strict=True):
        if isinstance(work, Transfer):
            expected = sum(50e-6 + size * 1e-9 for size in work.message_bytes)
            assert found == pytest.approx(expected if work.direction == "send" else 0.0)
