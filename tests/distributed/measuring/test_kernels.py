"""``paradl-bench kernels`` as a command: a small sweep, going on, its plan, what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from in_process import run_in_process

from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.records.measurement import read_manifest, read_records


def kernels(workplace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(workplace, "kernels", *arguments)


@pytest.mark.distributed
def test_a_small_sweep_is_measured_shown_and_not_measured_again(tmp_path: Path) -> None:
    settings = ("--for", "resnet18", "--batch", "1", "--input-shape", "3x32x32", "--kinds", "linear,optimizer")
    limits = ("--samples", "3", "--blocks", "2", "--memory", "400M", "-o", "out", "--json")
    done = kernels(tmp_path, *settings, *limits)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["planned"], summary["kernels"], summary["complete"]) == (3, 3, True)
    assert {(s["kind"], s["stage"]): s["kernels"] for s in summary["stages"]} == {
        ("linear", "FW"): 1,
        ("linear", "BW_input"): 1,
        ("linear", "BW_weight"): 1,
        ("optimizer", "WU"): 2,
    }
    records = read_records(tmp_path / "out", KERNELS_FILE, KernelSamples)
    layer = next(record.shape for record in records if record.shape.stage == "FW")
    assert layer.sizes == {"batch": 1, "in_features": 512, "out_features": 1000, "bias": 1}
    manifest = read_manifest(tmp_path / "out")
    assert manifest.kind == "kernels"
    assert manifest.environment.settings["threads"] == "1"
    assert manifest.environment.settings["pinned"] == "one core a rank"
    again = kernels(tmp_path, *settings, *limits)
    assert again.returncode == 0, again.stderr
    assert read_records(tmp_path / "out", KERNELS_FILE, KernelSamples) == records


@pytest.mark.distributed
def test_a_plan_measures_no_kernel(tmp_path: Path) -> None:
    done = kernels(tmp_path, "--plan", "--kinds", "softmax,copy", "--budget", "5s", "--memory", "16M", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {kernel["kind"] for kernel in plan["kernels"]} == {"softmax", "copy"}
    assert 0 < plan["estimated_s"] <= 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "-o DIR is missing"),
        (("--kinds", "convolution", "-o", "x"), "unknown kind 'convolution'"),
        (("--kinds", "dropout", "-o", "x"), "give --for MODEL"),
        (("--kinds", "conv,", "-o", "x"), "a name is empty"),
        (("--batch", "4", "-o", "x"), "--batch is for --for"),
        (("--budget", "soon", "-o", "x"), "write 10us, 40ms, 90s, 10m or 1.5h"),
        (("--dtype", "fp64", "-o", "x"), "choices are fp32, bf16"),
        (("--for", "resnet19", "-o", "x"), "did you mean resnet18"),
        (("--kinds", "linear", "--memory", "100", "--samples", "2", "-o", "x"), "raise --kernel-limit or --memory"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = kernels(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()
