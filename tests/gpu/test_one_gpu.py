"""What only a GPU shows: measurements on one, its modes, its allocator, and NCCL between several."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from in_process import run_in_process

from paradl_bench.records.measurement import LAYERS_FILE, read_manifest, read_records
from paradl_bench.records.samples import LayerSamples
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations

GPUS = torch.cuda.device_count()
REQUIRED = os.environ.get("PARADL_TEST_GPU") == "required"
pytestmark = pytest.mark.skipif(GPUS == 0 and not REQUIRED, reason="torch sees no GPU here")
several = pytest.mark.skipif(GPUS < 2, reason=f"takes two GPUs, torch sees {GPUS}")
SMALL = ("--input-shape", "3x64x64", "--device", "cuda")


def called(where: Path, *arguments: str) -> Path:
    """The directory that a command wrote."""
    found = run_in_process(where, *arguments, "-o", "out")
    assert found.returncode == 0, found.stderr
    return where / "out"


PRODUCTS = """
from torch import nn


class Products(nn.Module):
    input_shape, classes = (3, 32, 32), 10

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x)
"""


def trained(where: Path, *more: str, model: Sequence[str] = ("resnet18", *SMALL)) -> dict[str, Any]:
    output = called(where, "train", *model, "--iterations", "4", "--warmup", "3", *more)
    record: dict[str, Any] = json.loads((output / "run.json").read_text())
    return record


def test_layers_of_a_gpu_are_measured_on_it(tmp_path: Path) -> None:
    output = called(tmp_path, "layers", "resnet18", "--batch", "4", *SMALL, "--blocks", "2", "--iterations", "2")
    environment = read_manifest(output).environment
    assert environment.device == "cuda"
    assert environment.device_name == torch.cuda.get_device_name(0)
    layers = read_records(output, LAYERS_FILE, LayerSamples)
    assert {layer.phase for layer in layers} >= {"FW", "BW"}
    assert all(min(layer.samples_s) >= 0 for layer in layers)
    assert sum(max(layer.samples_s) for layer in layers if layer.operation.startswith("conv")) > 0


def test_copying_ahead_feeds_the_same_samples(tmp_path: Path) -> None:
    # No convolutions: cuDNN chooses among algorithms by the run, and two runs of one preset came 0.2% apart on an H200.
    model = ("products:Products", "--device", "cuda")
    losses = []
    for preset in ("mxnet", "caffe-mpi"):
        (tmp_path / preset).mkdir()
        (tmp_path / preset / "products.py").write_text(PRODUCTS)
        reading = ("--input", "synthetic", "--io-workers", "1", "--preset", preset)
        record = trained(tmp_path / preset, "--batch", "4", "--strategy", "serial", *reading, model=model)
        losses.append(record["losses"])
        rows = read_records(tmp_path / preset / "out", TRAINING_FILE, TrainingIterations)
        assert all(row.input is not None and row.input.copied_s for row in rows)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_serial_run_knows_the_allocators_peak(tmp_path: Path) -> None:
    record = trained(tmp_path, "--batch", "4", "--strategy", "serial")
    (memory,) = record["memory"]
    assert memory["allocator_bytes"] >= memory["parts_bytes"]["parameters"]
    assert memory["reserved_bytes"] >= memory["allocator_bytes"]
    assert memory["device_bytes"] >= memory["reserved_bytes"]


@pytest.mark.parametrize(
    ("options", "label"),
    [
        (("--tf32",), "tf32"),
        (("--cudnn-benchmark",), "cudnn_benchmark"),
        (("--dtype", "bf16", "--channels-last", "--cudnn-benchmark"), "channels_last+cudnn_benchmark"),
    ],
)
def test_a_gpus_modes_are_recorded_with_the_run(tmp_path: Path, options: tuple[str, ...], label: str) -> None:
    record = trained(tmp_path, "--batch", "4", "--strategy", "serial", *options)
    assert record["kernel_settings"] == label
    assert record["dtype"] == ("bf16" if "bf16" in options else "fp32")


def test_tensorfloat_is_off_unless_asked_for(tmp_path: Path) -> None:
    output = called(tmp_path, "train", "resnet18", *SMALL, "--batch", "4", "--strategy", "serial", "--iterations", "2")
    settings = read_manifest(output).environment.settings
    assert (settings["tf32_matmul"], settings["tf32_cudnn"]) == ("False", "False")


@several
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["d2", "f2", "c2", "s2", "p2", "z3d2"])
def test_ranks_on_gpus_issue_what_is_planned(tmp_path: Path, strategy: str) -> None:
    record = trained(tmp_path, "--batch", "4", "--strategy", strategy)
    assert record["backend"] == "nccl"
    assert record["issued_equals_plan"], record["differences"]


@several
@pytest.mark.distributed
def test_nccls_results_are_right(tmp_path: Path) -> None:
    """A sweep ends with an error where a result is wrong."""
    sweep = (
        "collectives --ranks 2 --backend nccl --device cuda --ops all_reduce,all_gather,reduce_scatter --sizes 1K:1M:32"
    )
    called(tmp_path, *sweep.split(), "--blocks", "2")
