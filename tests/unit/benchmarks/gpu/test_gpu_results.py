"""The reference results of a GPU: which commands make them, what is passed over, and what the summary says."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import click
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "gpu"))

import gpu_analysis
import gpu_operators
import gpu_results
from synthetic_measurements import write_collectives

from calibrate.profile.profile import read_profile
from paradl_bench.cli import group
from paradl_bench.network.kernel import KernelSamples
from paradl_bench.network.kinds.kernel_shape import kernel_shape, layer_of_sizes
from predict.costs.compute.kernel_costs import KernelCosts

LINEAR = {"batch": 4096, "in_features": 2048, "out_features": 2048, "bias": 0}


def options(tmp_path: Path, **changes: object) -> Namespace:
    given = {
        "device": "cuda",
        "networks": "",
        "kernel_budget": "4m",
        "minutes": 9.0,
        "nccl_tests": None,
        "published": "h100-sxm",
        "output": tmp_path,
    }
    return Namespace(**given | changes)


@pytest.mark.parametrize(("device", "nccl_tests"), [("cuda", Path("nccl-tests")), ("cpu", None)])
def test_every_command_is_one_that_paradl_bench_knows(tmp_path: Path, device: str, nccl_tests: Path | None) -> None:
    found = list(gpu_results.measurements(options(tmp_path, device=device, nccl_tests=nccl_tests)))
    for _, (name, *arguments) in found:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        # Options are read, and nothing is run.
        command.make_context(name, [*arguments, "-o", "x"])
    names = [name for name, _ in found]
    assert len(set(names)) == len(names)
    # Layers and a run of every network in both precisions, parts in one; the rates, the kernels, maybe nccl-tests.
    cases = gpu_results.CASES[device]
    assert len(names) == 5 * len(cases) + 2 + (nccl_tests is not None)
    # What parts layers runs in fp32 alone.
    of_parts = [words for _, words in found if "--shards" in words]
    assert [words[words.index("--dtype") + 1] for words in of_parts] == ["fp32"] * len(cases)


def test_complete_results_are_skipped_and_failures_stop_no_other_measurement(tmp_path: Path) -> None:
    given = options(tmp_path, networks="vgg16", nccl_tests=tmp_path)
    (tmp_path / "build").mkdir()
    write_collectives(tmp_path / "raw/nccl-tests")
    started: list[str] = []

    def timed(command: list[str]) -> tuple[int, float]:
        started.append(Path(command[-1]).relative_to(tmp_path / "raw").as_posix())
        return (3 if started[-1] == "vgg16/train-fp32" else 0), 1.5

    with mock.patch.object(gpu_results, "timed", timed):
        assert gpu_results.measure(given) == ["vgg16/train-fp32 ended with exit code 3"]
        runs = [f"vgg16/{what}-{dtype}" for dtype in ("fp32", "bf16") for what in ("layers", "train")]
        assert started == ["rates", *runs, "kernels", "vgg16/shards-fp32"]
        gpu_results.measure(given)
    # Seconds of all attempts.
    assert json.loads((tmp_path / "seconds.json").read_text()) == dict.fromkeys(started, 3.0)


def test_the_summary_holds_closure_time_memory_and_missing_results(tmp_path: Path) -> None:
    (case,) = gpu_results.chosen(options(tmp_path, networks="cosmoflow-256"))
    pair = {"predicted_s": 0.11, "interval_s": [0.1, 0.12], "measured_median_s": 0.1, "measured_iqr_s": 0.001}
    own = pair | {"error": 0.1, "covered": True, "memory": {"error": -0.02, "measured": "allocator"}}
    others = pair | {"error": -0.25, "covered": False}
    pairs = {gpu_analysis.OWN: {"fp32": own}, gpu_analysis.OTHERS: {"fp32": others}}
    (tmp_path / "seconds.json").write_text(json.dumps({"cosmoflow-256/layers-fp32": 90.0, "kernels": 30.0}))
    whole = SimpleNamespace(shard="", remainder_relative=0.015)
    part = SimpleNamespace(shard="s2", remainder_relative=0.5)
    with mock.patch.object(gpu_analysis, "closures", return_value=[whole, part]):
        row = gpu_analysis.row(gpu_analysis.Measured(case, "fp32", tmp_path, tmp_path), pairs)
    gpu_analysis.write_summary(tmp_path, [row], ["kernels: not complete"])
    text = (tmp_path / "summary.md").read_text()
    cells = "+1.5% | 110.00 ms | 100.0 to 120.0 ms | 100.00 ms | +10.0% | -25.0% | - | - | -2.0% (allocator) |"
    assert f"| cosmoflow-256 | fp32 | 1 | {cells}" in text
    assert "| own layers | 1 | 10.0% | 10.0% | 1 |\n| other networks | 1 | 25.0% | 25.0% | 0 |\n" in text
    assert "Layers took 1.5 minutes of the device, all measurements 2.0." in text
    assert text.endswith("- kernels: not complete\n")


def test_own_kernels_stand_beside_published_ones(tmp_path: Path) -> None:
    """Kernels that take twice what a shipped regressor says are one half, of each kind, stage and dtype."""
    shape = kernel_shape(layer_of_sizes("linear", LINEAR, {"function": "linear"}).layer, "FW", 4096, "fp32")
    assert shape
    answer = KernelCosts(read_profile("h100-sxm").kernel_models, "fp32").of_shape(shape)
    assert answer
    samples = KernelSamples(
        shape=shape, dtype="fp32", block=0, samples_s=(2 * answer.seconds,) * 3, calls_per_sample=1, reference_s=()
    )
    far = msgspec.structs.replace(samples, shape=msgspec.structs.replace(shape, kind="conv"))
    with mock.patch.object(gpu_operators, "read_records", return_value=[samples, far]):
        (row,) = gpu_operators.operators_beside(tmp_path, "h100-sxm")
    assert (row["kernels"], row["answered"], row["median"]) == (1, 1, pytest.approx(0.5))
    lines = gpu_operators.operator_lines([row], "h100-sxm")
    gpu_analysis.write_summary(tmp_path, [], [], lines)
    text = (tmp_path / "summary.md").read_text()
    assert "| linear | FW | fp32 | 1 | 1 | 0.50 | 0.50 to 0.50 |" in text
    assert gpu_operators.operator_lines([], "h100-sxm") == []


def test_nothing_is_said_to_be_analysed_that_was_not_measured(tmp_path: Path) -> None:
    failed = gpu_results.analyse(options(tmp_path, networks="vgg16"))
    assert failed[0] == "vgg16/layers-fp32: not complete"
    assert failed[-1] == "kernels: not complete"
    assert json.loads((tmp_path / "summary.json").read_text())["networks"] == []


def test_an_unknown_network_or_missing_gpu_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_results.chosen(options(tmp_path, networks="vgg61"))
    assert ended.value.code == 2
    assert "unknown network 'vgg61'; there are resnet50, " in capsys.readouterr().err
    torch = pytest.importorskip("torch")
    words = ["gpu_results.py", "-o", str(tmp_path / "out")]
    with mock.patch.object(sys, "argv", words), mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert gpu_results.main() == 3
    assert capsys.readouterr().err == "gpu-results: torch sees no GPU here; --device cpu rehearses\n"
    assert not (tmp_path / "out").exists()
