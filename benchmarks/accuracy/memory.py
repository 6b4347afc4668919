"""Peak memory of every strategy on two ranks: predicted beside what torch's tracker saw, category by category.

    python benchmarks/accuracy/memory.py -o DIR [--models vgg11,resnet18] [--strategies serial,f2,p2:1f1b]
    python benchmarks/accuracy/memory.py -o DIR --networks alone|ranks

The second command takes networks of many kinds: torchvision's, those of ``user_networks.py``, and drawn ones
(``tests/random_modules``) at the batch that needs 60 MB. ``alone`` trains each serially in this process; ``ranks``
by ``paradl-bench train``, serially and then under two strategies that take turns.

Trains each model for a few iterations under each strategy and compares the rank that held most with the prediction,
which needs no profile. Peaks do not depend on the speed of the machine. The table is kept as ``memory.txt`` beside the
runs, with what a limit refuses. What was measured is kept; with ``--predict-only`` only that is predicted anew.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from paradl_bench.core.files.storage import write_text_atomically
from paradl_bench.measure.execution.optimizers import build_optimizer
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.memory_tracking import track_memory
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.training.training_record import MemoryPeak, TrainingRun, read_run
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.memory.peak import MemoryUse

FOLDERS = (Path(__file__).parents[1] / "networks", Path(__file__).parents[2] / "tests")
"""Where networks lie that are no part of the program."""
sys.path[:0] = map(str, FOLDERS)


class Subject(NamedTuple):
    """A model, the shape of one sample (empty for its own), and the global batch (0 for what needs 60 MB)."""

    model: str
    shape: str
    batch: int


SUBJECTS = (
    Subject("vgg11", "3x32x32", 8),
    Subject("resnet18", "3x64x64", 8),
    Subject("cosmoflow", "4x32x32x32", 2),
    Subject("cosmoflow", "4x64x64x64", 4),
    Subject("mobilenet_v2", "3x64x64", 8),
    Subject("densenet121", "3x64x64", 8),
    Subject("googlenet", "3x64x64", 8),
)
CATALOG = (
    *SUBJECTS[1:2],
    *SUBJECTS[3:],
    Subject("squeezenet1_1", "3x96x96", 16),
    Subject("shufflenet_v2_x1_0", "3x96x96", 16),
    Subject("efficientnet_b0", "3x64x64", 8),
    Subject("resnet50", "3x64x64", 4),
)
USERS = {
    **{"DiffusionUNet": 16, "Autoencoder": 32, "Swin": 20, "Unet3d": 24, "ESPCN": 48, "WaveNet": 16, "Llama": 24},
    **{"Shuffle": 16, "FNO": 64, "VQ": 16, "UNetUp": 16, "ParamView": 2048},
}
"""Networks of ``user_networks.py``, and their batches."""
DRAWN = range(7_000_000, 7_000_040)
"""Numbers of drawn networks."""
NETWORKS = (
    *CATALOG,
    *(Subject(f"user_networks:{name}", "", batch) for name, batch in USERS.items()),
    *(Subject(f"random_modules:module{number}", "", 0) for number in DRAWN),
)
IN_TURN = ("d2", "f2", "p2:gpipe", "c2", "z3d2", "s2", "t2", "z2d2")
LEAST_BYTES, LARGE_BYTES = 60e6, 50e6
"""What batches are chosen to need; networks are held to 2% from here on."""
STRATEGIES = ("serial", "d2", "z1d2", "z2d2", "z3d2", "f2", "c2", "s2", "t2", "p2:gpipe", "p2:1f1b")
CATEGORIES = ("parameters", "buffers", "optimizer", "gradients", "communication", "input", "activations")
"""What both sides are added up to; the tracker's temporary tensors are gradients of activations."""
NAME_WIDTH = 32
_SAME = {"temporary": "activations", "other": "input", "buckets": "communication"}


Runs = Iterator[tuple[Subject, str, Path]]


def runs(output: Path, models: list[str], strategies: list[str]) -> Runs:
    """(subject, strategy with its schedule, directory)."""
    for subject in dict.fromkeys((*SUBJECTS, *NETWORKS)):
        for strategy in strategies:
            if subject.model in models:
                yield subject, strategy, directory_of(output, subject, strategy)


def runs_of_networks(output: Path) -> Runs:
    """Likewise, of many kinds of networks: all of them serial, then each under one strategy, then under another."""
    for turn in range(3):
        for number, subject in enumerate(NETWORKS):
            strategy = IN_TURN[(number + 3 * turn) % len(IN_TURN)] if turn else "serial"
            yield subject, strategy, directory_of(output, subject, strategy)


def directory_of(output: Path, subject: Subject, strategy: str) -> Path:
    """Of a run."""
    return output / f"{subject.model.replace(':', '-')}-{subject.shape}-{strategy.replace(':', '-')}"


@cache
def batch_of(subject: Subject) -> int:
    """The global batch: even, and where none is given the least that needs 60 MB, within a quarter."""
    batch, serial = subject.batch or 8, parse_strategy("serial")
    network = network_of(subject)
    while not subject.batch and memory_of_plan(network, serial, PlanSettings(batch=batch)).peak_bytes < LEAST_BYTES:
        batch = batch * 5 // 8 * 2
    return batch


def train(subject: Subject, strategy: str, directory: Path, options: list[str]) -> str:
    """One run, unless the directory holds it; returns why there is none."""
    name, _, schedule = strategy.partition(":")
    settings = ["--strategy", name, "--batch", str(batch_of(subject))]
    settings += ["--input-shape", subject.shape] if subject.shape else []
    settings += ["--schedule", schedule] if schedule else []
    command = [sys.executable, "-m", "paradl_bench", "train", subject.model, *settings, "--iterations", "1"]
    command += ["--warmup", "3", *options, "-o", str(directory)]
    paths = os.pathsep.join([str(path) for path in FOLDERS] + [os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


@cache
def network_of(subject: Subject) -> ModelGraph:
    """The traced network."""
    return trace_network(load_model(subject.model, shape_of(subject), device="meta"))


def shape_of(subject: Subject) -> tuple[int, ...] | None:
    """Of one sample; None for the model's own."""
    return tuple(map(int, subject.shape.split("x"))) if subject.shape else None


def predicted(subject: Subject, run: TrainingRun) -> MemoryUse:
    """What memory a run like this is predicted to need."""
    return memory_of_plan(network_of(subject), parse_strategy(run.strategy), run.settings)


def by_category(parts: dict[str, int]) -> dict[str, int]:
    """Bytes under names that both sides share."""
    sums = dict.fromkeys(CATEGORIES, 0)
    for name, size in parts.items():
        sums[_SAME.get(name, name)] += size
    return sums


def heading() -> str:
    """Of the table."""
    names = "".join(f" {name:>17}" for name in CATEGORIES)
    return f"{'model':{NAME_WIDTH}} {'strategy':9} {'tracked':>9} {'predicted':>9} {'error':>7}{names}"


class Compared(NamedTuple):
    """A run's line of the table, what was tracked, and the relative error of what was predicted."""

    line: str
    tracked_bytes: int
    error: float


def trained_here(subject: Subject) -> MemoryPeak:
    """The peak of serial training in this process."""
    batch = batch_of(subject)
    model = load_model(subject.model, shape_of(subject))
    model.module.train()
    optimizer = build_optimizer("sgd", model.module.parameters())
    inputs, targets = model.make_batch(batch, 0)

    def iterate() -> None:
        model.loss(model.module(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    iterate()
    return track_memory(iterate, model.module, optimizer, (inputs, targets), rank=0)


def compare(subject: Subject, strategy: str, peak: MemoryPeak, use: MemoryUse) -> Compared:
    """What a rank was seen to hold at most beside its prediction."""
    error = use.peak_bytes / peak.tracked_bytes - 1
    tracked, expected = by_category(peak.parts_bytes), by_category(use.parts_bytes)
    cells = (f"{tracked[name] / 1e6:.2f} {(expected[name] - tracked[name]) / 1e6:+.2f}" for name in CATEGORIES)
    line = f"{subject.model + ' ' + subject.shape:{NAME_WIDTH}} {strategy:9} "
    line += f"{peak.tracked_bytes / 1e6:9.2f} {use.peak_bytes / 1e6:9.2f} {error:+7.1%}"
    return Compared(line + "".join(f" {cell:>17}" for cell in cells), peak.tracked_bytes, error)


def summary(found: Sequence[Compared]) -> list[str]:
    """Of all runs, and of those that need more than 50 MB."""
    large = [run for run in found if run.tracked_bytes > LARGE_BYTES]
    lines = [f"largest error {max((abs(run.error) for run in found), default=0):.1%} of {len(found)} runs"]
    within = sum(abs(run.error) <= 0.02 for run in large)
    return [*lines, f"over 50 MB: {within} of {len(large)} runs within 2%"]


def main() -> None:
    """Train, predict, print a table in MB: tracked, and the error where the sides differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", default=",".join(dict.fromkeys(subject.model for subject in SUBJECTS)))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--networks", choices=("alone", "ranks"), help="networks of many kinds")
    parser.add_argument("--predict-only", action="store_true")
    options, passed_on = parser.parse_known_args()
    print(heading(), flush=True)
    found: list[Compared] = []
    without: list[str] = []
    if options.networks == "alone":
        for subject in NETWORKS:
            use = memory_of_plan(network_of(subject), parse_strategy("serial"), PlanSettings(batch=batch_of(subject)))
            found.append(compare(subject, "serial", trained_here(subject), use))
            print(found[-1].line, flush=True)
    else:
        chosen = runs(options.output, options.models.split(","), options.strategies.split(","))
        on_ranks(runs_of_networks(options.output) if options.networks else chosen, options, passed_on, found, without)
    last = summary(found)
    print(*last, sep="\n")
    lines = [heading(), *(run.line for run in found), *last, *without]
    write_text_atomically(options.output / "memory.txt", "\n".join(lines) + "\n")


def on_ranks(
    chosen: Runs, options: argparse.Namespace, passed_on: list[str], found: list[Compared], without: list[str]
) -> None:
    """Train what is chosen, and add its comparisons, and what is refused."""
    for subject, strategy, directory in chosen:
        why = "" if options.predict_only else train(subject, strategy, directory, passed_on)
        if why:
            without.append(f"{subject.model} {subject.shape} {strategy}: {why}")
            print(without[-1], flush=True)
        if (directory / "run.json").exists():
            run = read_run(directory)
            peak = max(run.memory, key=lambda rank: rank.tracked_bytes)
            found.append(compare(subject, strategy, peak, predicted(subject, run)))
            print(found[-1].line, flush=True)


if __name__ == "__main__":
    main()
