"""Devices of the catalogue: a sheet is held against a sheet, as factors of the same size would be."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from profile_factory import make_network, noisy_profile

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.command_line import run_command
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.cluster import ClusterFile, Level
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.costs.hardware.named_device import hardware_of_device
from predict.costs.hardware.what_if_hardware import Hardware
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()
A100_FP32, A100_BYTES, H100_FP32, H100_BYTES = 19.5e12, 2039e9, 66.9e12, 3.35e12


def measured_on(name: str) -> Profile:
    profile = noisy_profile(CHAIN)
    devices = tuple(msgspec.structs.replace(device, name=name) for device in profile.devices)
    return msgspec.structs.replace(profile, devices=devices)


A100 = measured_on("NVIDIA A100-SXM4-80GB")


def predicted(hardware: Hardware, cluster: ClusterFile | None = None) -> Prediction:
    model = CostModel(profile=A100, network=CHAIN, hardware=hardware, cluster=cluster)
    at = Configuration(strategy=parse_strategy("d2"), settings=plan_settings(batch=8))
    return Predictor(model, evaluator_named("simulate")).predict(at)


def test_a_named_device_is_the_ratio_of_two_sheets() -> None:
    named = predicted(hardware_of_device("h100-sxm", A100, "fp32", ""))
    factors = Hardware(peak_flops=H100_FP32 / A100_FP32, memory_bandwidth=H100_BYTES / A100_BYTES)
    assert named.iteration_s == predicted(factors).iteration_s < predicted(Hardware()).iteration_s
    assert named.use.peak_flops_per_rank == pytest.approx(H100_FP32)
    assert named.use.peak_flops_basis == "of h100-sxm in fp32, by its data sheet"
    (line,) = (line for line in named.provenance.extrapolated if "h100-sxm" in line)
    assert "h100-sxm instead of a100-sxm-80gb, by roofline: 3.43 times the FLOP/s" in line


def test_the_measured_device_by_its_name_changes_nothing_but_memory() -> None:
    same, plain = predicted(hardware_of_device("a100-sxm-80gb", A100, "fp32", "")), predicted(Hardware())
    assert (same.iteration_s, same.time.interval_s) == (plain.iteration_s, plain.time.interval_s)
    assert same.memory.fits is True


def test_a_cluster_file_says_how_much_memory_there_is() -> None:
    levels = (Level(name="node", ranks=2),)
    hardware = hardware_of_device("h100-sxm", A100, "fp32", "")
    for stated, fits in ((None, True), (1000.0, False)):
        cluster = ClusterFile(name="x", levels=levels, memory_bytes_per_rank=stated)
        assert predicted(hardware, cluster).memory.fits is fits


def test_tf32_is_held_against_tf32() -> None:
    found = hardware_of_device("h100-sxm", A100, "fp32", "cudnn_benchmark+tf32")
    assert found.peak_flops == pytest.approx(494.7 / 156)


@pytest.mark.parametrize(
    ("name", "profile", "dtype", "message"),
    [
        ("h100", A100, "fp32", "choices are a100-pcie-40gb, "),
        (
            "h100-sxm",
            measured_on("AMD EPYC"),
            "fp32",
            "--device h100-sxm: the profile was measured on AMD EPYC, and predictions scale only from one GPU",
        ),
        ("v100-sxm2-32gb", A100, "bf16", "v100-sxm2-32gb has no peak in bf16"),
    ],
)
def test_what_no_sheet_tells_is_refused(name: str, profile: Profile, dtype: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        hardware_of_device(name, profile, dtype, "")
    assert "\n" not in str(caught.value)


def test_a_device_is_named_once() -> None:
    cluster = ClusterFile(name="x", levels=(Level(name="node", ranks=2),), device_name="T4")
    with pytest.raises(UserError, match="both name the device: give only one of them"):
        hardware_of_device("h100-sxm", A100, "fp32", "", cluster)


def call(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["predict", *arguments])
    with pytest.raises(SystemExit) as caught:
        run_command(group, "predict")
    assert isinstance(caught.value.code, int)
    return (caught.value.code, *capfd.readouterr())


def test_commands_take_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_profile(tmp_path / "p.json", A100)
    point = ["--from-profile", str(tmp_path / "p.json"), "--model", "chain", "--strategy", "d2", "--batch", "8"]
    picture = tmp_path / "x.png"
    varied = ["--vary", "device=l4,h200", "--json", "--plot", str(picture)]
    code, out, err = call(["what-if", *point, *varied], monkeypatch, capfd)
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["varied"] for row in rows] == [{}, {"device": "l4"}, {"device": "h200"}]
    assert rows[2]["iteration_s"] < rows[0]["iteration_s"] < rows[1]["iteration_s"]
    assert picture.stat().st_size
    (alone,) = json.loads(call([*point, "--device", "l4", "--json"], monkeypatch, capfd)[1])
    assert alone["iteration_s"] == rows[1]["iteration_s"]
    code, out, err = call(["what-if", *point, "--device", "l4", "--vary", "device=h200"], monkeypatch, capfd)
    assert (code, out) == (2, "")
    assert "both name the device" in err
    assert "names as a100-sxm-80gb,h100-sxm" in call(["what-if", *point, "--vary", "device="], monkeypatch, capfd)[2]
    code, out, _ = call(["devices"], monkeypatch, capfd)
    assert code == 0
    assert "mi300x" in out
    assert json.loads(call(["devices", "--json"], monkeypatch, capfd)[1])[0]["sources"]["memory_bytes"]


def test_a_search_on_another_device_says_so_in_its_commands() -> None:
    asked = "--model gpt2 --device h100-sxm --ranks 2 --batch 8 --json"
    words = ["search", "--from-profile", "v100", *asked.split()]
    first = json.loads(CliRunner().invoke(group, words).stdout)["rows"][0]
    again = CliRunner().invoke(group, [*shlex.split(first["predict_command"])[1:], "--json"])
    assert json.loads(again.stdout)[0]["iteration_s"] == first["prediction"]["iteration_s"]
    assert "h100-sxm" not in first["train_command"]
