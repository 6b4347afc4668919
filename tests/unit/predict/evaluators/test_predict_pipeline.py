"""Predictions of pipelines from a profile whose times are known."""

from __future__ import annotations

import pytest
from profile_factory import free_copies, linear_seconds, make_network, make_profile, ring_fit

from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Transfer, WeightUpdate
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 2), ("1f1b", 2), ("interleaved", 2), ("zb", 3)])
def test_each_stage_sums_gradients_of_all_micro_batches_except_one(schedule: str, ranks: int) -> None:
    strategy, network = parse_strategy(f"p{ranks}"), make_network((64,) * 7)
    plan = planner_for(strategy).plan(network, strategy, plan_settings(batch=24, micro_batches=6, schedule=schedule))
    added = [
        sum(work.bytes for work in (plan.works[index] for index in role.work) if isinstance(work, BucketCopy))
        for role in plan.roles
    ]
    held = [
        4 * sum(work.elements for work in (plan.works[index] for index in role.work) if isinstance(work, WeightUpdate))
        for role in plan.roles
    ]
    assert added == [5 * own for own in held]
    assert sum(held) == network.parameter_bytes


def test_a_pipeline_slows_by_gradient_sums_of_its_slowest_stage() -> None:
    """Of one micro-batch there is nothing to add up."""
    for count, added in ((1, 0.0), (2, 1.0)):
        free, slow = (
            predict(micro_batches=count, batch=4 * count, beta_s_per_byte=beta).iteration_s for beta in (0.0, 1e-9)
        )
        assert slow - free <= added * CHAIN.parameter_bytes * 1e-9 + 1e-15
        assert (slow > free) == bool(added)


def predict(
    evaluator: str = "simulate",
    strategy: str = "p2",
    schedule: str = "gpipe",
    batch: int = 16,
    *,
    micro_batches: int = 4,
    beta_s_per_byte: float = 0.0,
) -> Prediction:
    # Micro-batches of 4, which the profile has times of.
    settings = plan_settings(batch=batch, micro_batches=micro_batches, schedule=schedule)
    copies = free_copies(beta_s_per_byte=beta_s_per_byte, directions=("into", "out", "add"))
    profile = make_profile(communication=(ring_fit(), ring_fit("send_recv")), copies=copies)
    costs = CostModel(profile=profile, network=CHAIN)
    return Predictor(costs, evaluator_named(evaluator)).predict(
        Configuration(strategy=parse_strategy(strategy), settings=settings)
    )


def test_parts_add_up_to_the_iteration() -> None:
    found = predict()
    parts = found.time.breakdown_s
    assert parts["pipeline_idle"] > 0
    assert sum(parts[name] for name in ("FW", "BW", "GE", "WU", "pipeline_idle")) == pytest.approx(found.iteration_s)
    low, high = found.time.interval_s
    assert low <= found.iteration_s <= high


def test_two_stages_take_between_half_and_all_of_serial_time() -> None:
    serial_s = 4 * sum(linear_seconds(layer, phase, 4) for layer in CHAIN.layers for phase in ("FW", "BW"))
    assert serial_s / 2 < predict().iteration_s < serial_s


def test_the_closed_form_knows_no_overlap_and_one_schedule() -> None:
    assert predict("paradl").iteration_s >= predict().time.breakdown_s["FW"]
    assert any("only GPipe's schedule" in line for line in predict("paradl", schedule="1f1b").provenance.extrapolated)
    assert not any("GPipe's schedule" in line for line in predict("paradl").provenance.extrapolated)


def test_replicas_of_stages_exchange_their_gradients() -> None:
    found = predict(strategy="d2p2", batch=32)
    assert found.time.breakdown_s["GE"] > 0
    assert found.iteration_s > predict().iteration_s


def test_a_send_takes_its_messages_time_and_a_receive_none() -> None:
    costs = CostModel(profile=make_profile(communication=(ring_fit("send_recv"),)), network=CHAIN)
    strategy = parse_strategy("p2")
    plan = planner_for(strategy).plan(CHAIN, strategy, plan_settings(batch=16, micro_batches=4))
    seconds = costs.price(plan).costs.seconds
    for work, found in zip(plan.works, seconds, strict=True):
        if isinstance(work, Transfer):
            expected = sum(50e-6 + size * 1e-9 for size in work.message_bytes)
            assert found == pytest.approx(expected if work.direction == "send" else 0.0)
