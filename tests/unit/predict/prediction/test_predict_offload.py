"""Predictions with the optimizer's state in host memory."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from profile_factory import free_copies, layer_times, make_network, make_profile, ring_fit

from calibrate.profile.input_side import HostCopy, InputSide
from calibrate.profile.profile import CopyTime, Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()
PARAMETERS = CHAIN.parameter_bytes
TENSORS = len(CHAIN.parameters)


def copy_time(direction: str, alpha_s: float, beta_s_per_byte: float) -> CopyTime:
    (copy,) = free_copies((1,), directions=(direction,))
    return msgspec.structs.replace(copy, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)


STATE_COPIES = (copy_time("fetch", 2e-6, 3e-10), copy_time("store", 5e-6, 7e-10))


def profile_with(*copies: CopyTime, **changes: object) -> Profile:
    return make_profile(
        layer_times=layer_times(CHAIN), communication=(ring_fit(),), copies=(*free_copies(), *copies), **changes
    )


def predict(profile: Profile, strategy: str = "serial", evaluator: str = "simulate", **settings: object) -> Prediction:
    asked = PlanSettings(batch=16, **settings)  # type: ignore[arg-type]
    costs = CostModel(profile=profile, network=CHAIN)
    point = Configuration(strategy=parse_strategy(strategy), settings=asked)
    return Predictor(costs, evaluator_named(evaluator)).predict(point)


@pytest.mark.parametrize("strategy", ["serial", "d2"])
def test_the_iteration_takes_both_copies_longer(strategy: str) -> None:
    profile = profile_with(*STATE_COPIES)
    kept, moved = (predict(profile, strategy, offload=offload) for offload in ("none", "optimizer"))
    copies_s = TENSORS * (2e-6 + 5e-6) + PARAMETERS * (3e-10 + 7e-10)
    assert moved.iteration_s - kept.iteration_s == pytest.approx(copies_s, rel=1e-9)
    assert moved.time.breakdown_s["WU"] - kept.time.breakdown_s["WU"] == pytest.approx(copies_s, rel=1e-9)
    assert any("lies in host memory, bytes a rank: " in note for note in moved.provenance.notes)
    assert not any("optimizer's state were not measured" in text for text in moved.provenance.extrapolated)


def test_copies_into_buckets_stand_for_it_on_a_cpu() -> None:
    bucket = copy_time("into", 0.0, 1e-9)
    profile = make_profile(layer_times=layer_times(CHAIN), communication=(ring_fit(),), copies=(bucket,))
    kept, moved = (predict(profile, offload=offload) for offload in ("none", "optimizer"))
    assert moved.iteration_s - kept.iteration_s == pytest.approx(2 * PARAMETERS * 1e-9, rel=1e-9)
    text = "copies of the optimizer's state were not measured: the times of copies into buckets are used"
    assert any(text in line for line in moved.provenance.extrapolated)


def test_copies_of_the_input_stand_for_it_on_a_device() -> None:
    pinned = HostCopy(how="pinned", alpha_s=1e-6, beta_s_per_byte=4e-11, relative_sd=0.1, bytes_range=(1, 1 << 20))
    profile = profile_with(input_side=(InputSide(source="synthetic", copies=(pinned,)),))
    found = predict(profile, offload="optimizer")
    assert any("times of the input's copies from pinned memory" in line for line in found.provenance.extrapolated)


def test_a_device_whose_copies_nobody_measured_is_refused() -> None:
    profile = profile_with()
    (device,) = profile.devices
    profile = msgspec.structs.replace(profile, devices=(msgspec.structs.replace(device, kind="cuda"),))
    with pytest.raises(UserError, match="no times of copying to the device and back, which --offload needs; measure"):
        predict(profile, offload="optimizer")


@pytest.mark.parametrize("evaluator", ["paradl", "osf", "csf", "dag"])
def test_closed_forms_refuse_it_in_one_line(evaluator: str) -> None:
    with pytest.raises(UserError, match=f"^{evaluator} cannot predict --offload optimizer: give --evaluator simulate$"):
        predict(profile_with(*STATE_COPIES), evaluator=evaluator, offload="optimizer")


def test_the_command_takes_it_and_refuses_other_words(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile_with(*STATE_COPIES))
    words = ["--from-profile", str(path), "--model", "chain", "--strategy", "serial", "--batch", "16", "--json"]
    result = CliRunner().invoke(group, [*words, "--offload", "optimizer"])
    (found,) = json.loads(result.output)
    assert found["options"] == {"offload": "optimizer"}
    assert CliRunner().invoke(group, [*words, "--offload", "gradients"]).exit_code == 2
