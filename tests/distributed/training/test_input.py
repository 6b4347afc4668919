"""Runs that read images: the samples of serial training, however they are read and gradients exchanged; refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from in_process import run_in_process
from PIL import Image

from paradl_bench.measure.execution.optimizers import build_optimizer
from paradl_bench.measure.input.images import decode, read_file, transform
from paradl_bench.network.models.catalog import load_model
from paradl_bench.records.measurement import read_records
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, read_run
from paradl_bench.strategies.exchange.options import ExchangeOptions

pytestmark = pytest.mark.distributed

NETWORK = """
from torch import nn
from paradl_bench.network.models.token_tasks import NextToken

class Small(nn.Module):
    input_shape = (3, 16, 16)

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.two(self.one(x).relu()).relu().mean((2, 3)))

class Oblong(Small):
    input_shape = (3, 16, 12)

class Tokens(nn.Module):
    token_task = NextToken(vocabulary=10, sequence=4)

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, ids):
        return self.head(self.embedding(ids))
"""
BATCH, ITERATIONS = 6, 4
RUNS = {
    "serial": ("serial", "1", "pytorch"),
    "unoverlapped": ("d2", "0", "naive"),
    "layerwise": ("d2", "2", "mxnet"),
    "stages": ("p2", "1", "pytorch"),
}
DDP = ("d2", "1", "pytorch")


def make_folder(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"class{index % 3}" / f"{index}.{('png', 'jpg', 'ppm')[index % 3]}" for index in range(count)]
    for index, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (20 + index, 30, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


def train(where: Path, name: str, *more: str, model: str = "small:Small", source: str = "images") -> Any:
    strategy, workers, preset = RUNS.get(name, DDP)
    line = ("train", model, "--strategy", strategy, "--batch", str(BATCH), "--iterations", str(ITERATIONS))
    reading = ("--input", source, "--io-workers", workers, "--preset", preset)
    return run_in_process(where, *line, "--warmup", "3", *reading, "-o", name, *more)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("fed")
    (where / "small.py").write_text(NETWORK)
    make_folder(where / "images", 11)
    return where


@pytest.fixture(scope="module")
def place(workplace: Path) -> Path:
    for name in RUNS:
        result = train(workplace, name)
        assert result.returncode == 0, result.stderr
    return workplace


def losses_by_hand(where: Path) -> list[float]:
    """Plain torch on the mini-batches in their order; the one of the memory's iteration is that before it again."""
    paths = sorted(path for path in (where / "images").rglob("*.*"))
    folders = sorted({path.parent for path in paths})
    order = random.Random(0).sample(range(len(paths)), len(paths))
    model = load_model("small:Small")
    optimizer = build_optimizer("sgd", model.module.parameters())
    losses = []
    for batch in (0, 1, 2, 2, *range(3, 4 + ITERATIONS)):
        numbers = range(batch * BATCH, (batch + 1) * BATCH)
        files = [paths[order[number % len(paths)]] for number in numbers]
        samples = [
            transform(decode(read_file(path)), 16, random.Random(number))
            for path, number in zip(files, numbers, strict=True)
        ]
        targets = torch.tensor([folders.index(path.parent) for path in files])
        loss = torch.nn.functional.cross_entropy(model.module(torch.stack(samples)), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses[-ITERATIONS:]


def losses_of(where: Path, name: str) -> Sequence[float]:
    records = read_records(where / name, TRAINING_FILE, TrainingIterations)
    return np.mean([record.losses for record in records if record.losses], axis=0).tolist()


def test_losses_are_those_of_plain_training(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    wanted = losses_by_hand(place)
    for name in RUNS:
        assert losses_of(place, name) == pytest.approx(wanted, rel=1e-4), name


def test_a_preset_decides_when_gradients_are_exchanged(place: Path) -> None:
    runs = {name: read_run(place / name) for name in RUNS}
    assert all(run.issued_equals_plan for run in runs.values())
    exchange = {name: run.settings.of(ExchangeOptions) for name, run in runs.items()}
    messages = (4 * (6 * 4 + 4), 4 * (4 * 6 * 9 + 6), 4 * (3 * 4 * 9 + 4))
    for name, after in (("unoverlapped", True), ("layerwise", False)):
        assert (exchange[name].fused_bytes, exchange[name].after_backward) == (messages, after)
    assert all(not exchange[name].fused_bytes for name in ("serial", "stages"))


def test_a_record_says_what_was_read_by_whom(place: Path) -> None:
    for name, (_, workers, preset) in RUNS.items():
        about = read_run(place / name).input
        assert about is not None
        assert (about.files, about.crop, about.workers, about.preset) == (11, 16, int(workers), preset)
        assert about.source == str(place / "images")
        for record in read_records(place / name, TRAINING_FILE, TrainingIterations):
            if name == "stages" and record.rank == 1:
                assert record.input is None
                continue
            assert record.input is not None
            read = record.input
            by = {0: (), 1: (0,) * ITERATIONS, 2: (0, 1) * (ITERATIONS // 2)}[int(workers)]
            assert read.worker == by
            assert min(read.read_s + read.decode_s + read.transform_s) > 0
            parts = zip(read.waited_s, record.fw_s, record.bw_s, record.exposed_ge_s, record.wu_s, strict=True)
            if name != "stages":
                assert [sum(part) for part in parts] == pytest.approx(record.iteration_s)
            if not read.worker:
                assert all(waited > spent for waited, spent in zip(read.waited_s, read.decode_s, strict=True))


def test_a_run_goes_on_with_the_same_input_alone(place: Path) -> None:
    again = train(place, "layerwise")
    assert again.returncode == 0, again.stderr
    assert "holds all 4 iterations already" in again.stderr
    other = train(place, "layerwise", "--preset", "tensorflow")
    assert other.returncode == 2
    assert "layerwise was measured with preset mxnet, not tensorflow" in other.stderr


def test_made_images_are_gone_after_the_run(workplace: Path) -> None:
    result = train(workplace, "ddp", "-o", "made", source="synthetic")
    assert result.returncode == 0, result.stderr
    assert not (workplace / "made" / ".images").exists()
    assert json.loads((workplace / "made" / "run.json").read_text())["input"]["files"] == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "small:Tokens"}, "--input reads images, and small:Tokens reads token ids"),
        ({"model": "small:Oblong"}, "a sample of small:Oblong is 3x16x12"),
        ({"source": "absent"}, "absent is not a folder"),
        ({"source": "empty"}, "empty holds no image"),
        ({"source": "many"}, "images in 5 folders, and targets of this model have 4 classes"),
        ({"source": "broken"}, "no image, or of a format that Pillow does not read"),
        ({"more": ("--preset", "fast")}, "--preset fast: choices are naive"),
        ({"more": ("--preset", "naive")}, "--preset naive reads in the training process: give --io-workers 0"),
        ({"more": ("--preset", "cntk", "--strategy", "f2")}, "--preset cntk is for data parallelism alone (d2)"),
        ({"more": ("--preset", "mxnet", "--bucket-cap-mb", "1")}, "--bucket-cap-mb is for DDP's buckets"),
        ({"more": ("--preset", "mxnet", "--compile")}, "--preset mxnet with --compile"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(workplace: Path, changes: dict[str, Any], said: str) -> None:
    (workplace / "empty").mkdir(exist_ok=True)
    (workplace / "broken").mkdir(exist_ok=True)
    (workplace / "broken" / "0.png").write_bytes(b"no image")
    for index in range(5):
        make_folder(workplace / "many" / str(index), 1)
    more = changes.pop("more", ())
    result = train(workplace, "ddp", "-o", "refused", *more, **changes)
    assert result.returncode == 2
    # A host that is busy may be told of before.
    assert said in result.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(("flag", "value"), [("--io-workers", "1"), ("--preset", "cntk")])
def test_options_of_input_need_one(workplace: Path, flag: str, value: str) -> None:
    line = ("train", "small:Small", "--strategy", "serial", "--batch", "2", flag, value, "-o", "refused")
    result = run_in_process(workplace, *line)
    assert result.returncode == 2
    assert f"{flag} needs --input FOLDER or --input synthetic" in result.stderr
