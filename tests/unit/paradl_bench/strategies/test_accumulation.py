"""Gradients of micro-batches that are accumulated: plans, prices and memory against sums by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import numpy as np
import pytest
from in_process import run_in_process
from network_factory import NetworkFactory
from profile_factory import free_copies, make_network, make_profile

from calibrate.profile.profile import Profile
from paradl_bench.core.bounds import MOST_ACCUMULATED
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.statistics import Z90
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Collective, Compute, Phase, Plan, Stream, WeightUpdate
from paradl_bench.strategies.data.zero import plan as zero_plan
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes import accumulation
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.cli import main
from predict.costs.cost_model import CostModel
from predict.costs.hardware.what_if_hardware import Hardware
from predict.costs.sourced import UNIFORM_TO_SD
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

CHAIN = make_network((64, 128, 256, 32), buffers=True)
CHAIN_OF_PROFILE = make_network()


def convolutional() -> ModelGraph:
    factory = NetworkFactory(8, 16, 16)
    for index in range(3):
        factory.conv(f"conv{index}", 8, 3, padding=1)
    factory.flatten("flatten")
    factory.loss()
    return factory.network("chain")


def planned(strategy: str, network: ModelGraph = CHAIN, batch: int = 32, **settings: Any) -> Plan:
    parsed = parse_strategy(strategy)
    return planner_for(parsed).plan(network, parsed, plan_settings(batch=batch, **settings))


def computed(plan: Plan) -> Counter[tuple[str, str]]:
    works = (plan.works[work] for work in plan.roles[0].work)
    return Counter((work.layer, work.phase) for work in works if isinstance(work, Compute))


@pytest.mark.parametrize("strategy", ["serial", "d2", "z1d2", "z2d2", "z3d2", "f2", "d2f2"])
def test_every_micro_batch_is_computed_and_weights_are_updated_once(strategy: str) -> None:
    once, often = planned(strategy), planned(strategy, accumulate=4)
    assert computed(often) == Counter({key: 4 * count for key, count in computed(once).items()})
    updates = [sum(isinstance(plan.works[w], WeightUpdate) for w in plan.roles[0].work) for plan in (once, often)]
    assert updates == [1, 1]
    assert (once.micro_batches, often.micro_batches) == (1, 4)
    assert once.local_batch == often.local_batch


@pytest.mark.parametrize("strategy", ["d2", "z1d2"])
def test_replicas_exchange_once_beside_the_last_backward(strategy: str) -> None:
    once, often = planned(strategy), planned(strategy, accumulate=4)
    assert once.collectives() == often.collectives()
    assert once.roles[0].setup == often.roles[0].setup
    role = often.roles[0]
    sent = [task for task in range(role.tasks) if often.works[role.work[task]] in _all_reduces(often)]
    forward = [task for task in range(role.tasks) if role.phase[task] == Phase.FW and role.stream[task] == 0]
    assert min(sent) > max(forward)


def _all_reduces(plan: Plan) -> list[Collective]:
    return [work for work in plan.works if isinstance(work, Collective) and work.operation == "all_reduce"]


@pytest.mark.parametrize("strategy", ["f2", "c2", "s2"])
def test_shared_layers_communicate_every_micro_batch_with_unchanged_total_bytes(strategy: str) -> None:
    network = convolutional()
    once, often = planned(strategy, network), planned(strategy, network, accumulate=4)
    assert len(often.of_layers()) == 4 * len(once.of_layers()) > 0
    size = {plan.micro_batches: sum(_bytes(work) for work in plan.of_layers()) for plan in (once, often)}
    assert size[1] == size[4]


def _bytes(work: Any) -> int:
    return work.message_bytes if isinstance(work, Collective) else sum(work.sends_bytes)


@pytest.mark.parametrize("strategy", ["z2d2", "z3d2"])
def test_sharded_gradients_are_reduced_for_every_micro_batch(strategy: str) -> None:
    once, often = (planned(strategy, accumulate=count).collectives() for count in (1, 4))
    assert often == Counter({key: 4 * count for key, count in once.items()})


@pytest.mark.parametrize("strategy", ["serial", "d2", "z2d2", "z3d2", "d2f2"])
def test_repeated_micro_batches_are_those_appended_one_by_one(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = planned(strategy, batch=40, accumulate=5)
    for module in (accumulation, zero_plan):
        monkeypatch.setattr(module, "MICRO_BATCHES_APART", 5)
    appended = planned(strategy, batch=40, accumulate=5)
    assert repeated.works == appended.works
    for role, other in zip(repeated.roles, appended.roles, strict=True):
        assert np.array_equal(role.work, other.work)
        assert np.array_equal(role.dependency_start, other.dependency_start)
        assert np.array_equal(role.dependencies, other.dependencies)
        assert role.exchanged_before == other.exchanged_before


def test_gradients_are_added_to_those_before_them() -> None:
    plan = planned("d2", batch=24, accumulate=3)
    role = plan.roles[0]
    added = [plan.works[work] for work in role.work if _adds(plan.works[work])]
    assert sum(work.bytes for work in added) == 2 * CHAIN.parameter_bytes
    assert all(role.stream[task] == Stream.COMPUTE for task in range(role.tasks) if _adds(plan.works[role.work[task]]))
    assert not any(_adds(work) for work in planned("d2").works)


def _adds(work: object) -> bool:
    return isinstance(work, BucketCopy) and work.direction == "add"


@pytest.mark.parametrize(
    ("strategy", "count", "message"),
    [
        (
            "d2",
            3,
            "16 samples a rank do not split evenly into 3 micro-batches; give --accumulate one of 1, 2, 4, 8, 16",
        ),
        ("serial", 5, "give --accumulate one of 1, 2, 4, 8, 16, 32"),
        ("p2", 2, "give --micro-batches, not --accumulate"),
        ("d2p2", 2, "a pipeline adds up the gradients of its own micro-batches"),
    ],
)
def test_what_cannot_be_is_refused(strategy: str, count: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(strategy, accumulate=count)


def predicted(
    strategy: str, profile: Profile, batch: int = 32, evaluator: str = "simulate", **options: Any
) -> Prediction:
    settings = plan_settings(batch=batch, **options)
    model = CostModel(profile=profile, network=profile.network["chain"])
    return Predictor(model, evaluator_named(evaluator)).predict(
        Configuration(strategy=parse_strategy(strategy), settings=settings)
    )


def test_accumulated_time_is_all_micro_batches_plus_one_weight_update() -> None:
    profile = make_profile()
    small, whole = predicted("serial", profile, 8), predicted("serial", profile, 32, accumulate=4)
    assert whole.time.phases_s["FW"] == pytest.approx(4 * small.time.phases_s["FW"])
    assert whole.time.phases_s["BW"] == pytest.approx(4 * small.time.phases_s["BW"])
    assert whole.time.phases_s["WU"] == pytest.approx(small.time.phases_s["WU"])
    assert whole.time.compute_s == pytest.approx(
        4 * (small.time.compute_s - small.time.phases_s["WU"]) + small.time.phases_s["WU"]
    )
    assert sum(whole.time.phases_s.values()) == pytest.approx(whole.iteration_s)


def test_adding_up_takes_as_long_as_copying_into_buckets() -> None:
    beta = 1e-9
    free, slow = make_profile(), make_profile(copies=free_copies(beta_s_per_byte=beta))
    size = free.network["chain"].parameter_bytes
    for count in (1, 2, 4):
        found, without = (predicted("serial", profile, accumulate=count) for profile in (slow, free))
        assert found.iteration_s - without.iteration_s == pytest.approx((count - 1) * size * beta)


def test_adding_up_takes_what_was_measured_of_it() -> None:
    copies = (*free_copies(beta_s_per_byte=7e-9), *free_copies(beta_s_per_byte=2e-9, directions=("add",)))
    profile = make_profile(copies=copies)
    found, free = (predicted("serial", each, accumulate=4) for each in (profile, make_profile(copies=free_copies())))
    assert found.iteration_s - free.iteration_s == pytest.approx(3 * profile.network["chain"].parameter_bytes * 2e-9)
    assert not any("adding up" in line for line in found.provenance.extrapolated)
    assert not found.provenance.sources["scaled"]


def test_accumulation_cost_is_flagged_with_half_its_time_uncertain() -> None:
    beta = 1e-9
    profile = make_profile(copies=free_copies(beta_s_per_byte=beta))
    once, twice = (predicted("serial", profile, 8 * count, accumulate=count) for count in (1, 2))
    assert not any("adding up" in line for line in once.provenance.extrapolated)
    assert any("adding up gradients was not measured" in line for line in twice.provenance.extrapolated)
    added_s = profile.network["chain"].parameter_bytes * beta
    assert twice.provenance.sources["scaled"] == pytest.approx(added_s / twice.iteration_s)
    assert twice.provenance.spread_s["scaling"] == pytest.approx(Z90 * 0.5 * added_s * UNIFORM_TO_SD)


def test_another_device_adds_up_as_it_copies() -> None:
    """What a copy takes a tensor, whatever its size, is no matter of bandwidth."""
    alpha_s, beta = 1e-5, 1e-9
    copies = tuple(msgspec.structs.replace(copy, alpha_s=alpha_s) for copy in free_copies(beta_s_per_byte=beta))
    profile = make_profile(copies=copies)
    model = CostModel(profile=profile, network=CHAIN_OF_PROFILE, hardware=Hardware(memory_bandwidth=4.0))
    priced = model.price(planned("serial", CHAIN_OF_PROFILE, accumulate=2))
    for work, seconds in zip(priced.plan.works, priced.costs.seconds, strict=True):
        if isinstance(work, BucketCopy):
            assert seconds == pytest.approx(work.tensors * alpha_s + work.bytes * beta / 4)


def test_the_exchange_hides_behind_the_last_backward_alone() -> None:
    profile = make_profile()
    once, often = (predicted("d2", profile, accumulate=count) for count in (1, 4))
    assert often.time.communication_s == pytest.approx(once.time.communication_s)
    assert often.time.overlap_s <= once.time.overlap_s + 1e-12
    assert often.options == {"accumulate": "4"}


@pytest.mark.parametrize("evaluator", ["paradl", "osf", "csf", "dag"])
def test_closed_forms_say_that_they_know_none(evaluator: str) -> None:
    with pytest.raises(UserError, match=f"{evaluator} cannot predict --accumulate 2: give --evaluator simulate"):
        predicted("d2", make_profile(), evaluator=evaluator, accumulate=2)


def test_gradients_of_earlier_micro_batches_are_held_beside_activations() -> None:
    network, settings = convolutional(), PlanSettings(batch=32)
    serial = parse_strategy("serial")
    whole = memory_of_plan(network, serial, settings)
    small = memory_of_plan(network, serial, PlanSettings(batch=8))
    parts = memory_of_plan(network, serial, PlanSettings(batch=32, accumulate=4))
    assert parts.parts_bytes["input"] == whole.parts_bytes["input"]
    assert parts.parts_bytes["activations"] == small.parts_bytes["activations"]
    assert parts.parts_bytes["gradients"] >= network.parameter_bytes > small.parts_bytes["gradients"]
    assert parts.peak_bytes < whole.peak_bytes


def predict(where: Path, *arguments: str) -> CompletedProcess[str]:
    return run_in_process(where, *arguments, main=main, program="predict")


def test_predict_takes_it_as_a_user_gives_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(encode_pretty(make_profile()))
    common = ("--from-profile", str(path), "--model", "chain", "--strategy", "d2", "--batch", "32")
    done = predict(tmp_path, *common, "--accumulate", "4", "-o", "found.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())[0]["options"] == {"accumulate": "4"}
    refused = predict(tmp_path, *common, "--accumulate", "3")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_pipelines_take_more_micro_batches_than_accumulation() -> None:
    more = MOST_ACCUMULATED + 1
    with pytest.raises(ValueError, match=f"accumulate has to be from 1 to {MOST_ACCUMULATED}, not {more}"):
        PlanSettings(batch=more, accumulate=more)
    assert PipelineOptions(micro_batches=more).micro_batches == more
