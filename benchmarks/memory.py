"""Peak memory of every strategy on two ranks: predicted beside what torch's tracker saw, category by category.

    python benchmarks/memory.py -o DIR [--models vgg11,resnet18] [--strategies serial,f2,p2:1f1b]

Trains each model for a few iterations under each strategy and compares the rank that held most with the prediction,
which needs no profile. Peaks do not depend on the speed of the machine. The table is kept as ``memory.txt`` beside the
runs, with what a limit refuses. What was measured is kept; with ``--predict-only`` only that is predicted anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from paradl_bench.core.files.storage import write_text_atomically
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.training.training_record import TrainingRun, read_run
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.memory.peak import MemoryUse


class Subject(NamedTuple):
    """A model, the shape of one sample, and the global batch."""

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
STRATEGIES = ("serial", "d2", "z1d2", "z2d2", "z3d2", "f2", "c2", "s2", "t2", "p2:gpipe", "p2:1f1b")
CATEGORIES = ("parameters", "buffers", "optimizer", "gradients", "communication", "input", "activations")
"""What both sides are added up to; the tracker's temporary tensors are gradients of activations."""
_SAME = {"temporary": "activations", "other": "input", "buckets": "communication"}


def runs(output: Path, models: list[str], strategies: list[str]) -> Iterator[tuple[Subject, str, Path]]:
    """(subject, strategy with its schedule, directory)."""
    for subject in SUBJECTS:
        for strategy in strategies:
            if subject.model in models:
                yield subject, strategy, output / f"{subject.model}-{subject.shape}-{strategy.replace(':', '-')}"


def train(subject: Subject, strategy: str, directory: Path, options: list[str]) -> str:
    """One run, unless the directory holds it; returns why there is none."""
    name, _, schedule = strategy.partition(":")
    settings = ["--strategy", name, "--batch", str(subject.batch), "--input-shape", subject.shape]
    settings += ["--schedule", schedule] if schedule else []
    command = [sys.executable, "-m", "paradl_bench", "train", subject.model, *settings, "--iterations", "1"]
    found = subprocess.run([*command, "--warmup", "3", *options, "-o", str(directory)], capture_output=True, text=True)
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


@cache
def network_of(subject: Subject) -> ModelGraph:
    """The traced network."""
    shape = tuple(map(int, subject.shape.split("x")))
    return trace_network(load_model(subject.model, shape, device="meta"))


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
    return f"{'model':23} {'strategy':9} {'tracked':>9} {'predicted':>9} {'error':>7}{names}"


def compare(subject: Subject, strategy: str, run: TrainingRun) -> tuple[str, float]:
    """A line of the table, and the relative error of its peak."""
    peak = max(run.memory, key=lambda rank: rank.tracked_bytes)
    use = predicted(subject, run)
    error = use.peak_bytes / peak.tracked_bytes - 1
    tracked, expected = by_category(peak.parts_bytes), by_category(use.parts_bytes)
    cells = (f"{tracked[name] / 1e6:.2f} {(expected[name] - tracked[name]) / 1e6:+.2f}" for name in CATEGORIES)
    line = f"{subject.model + ' ' + subject.shape:23} {strategy:9} "
    line += f"{peak.tracked_bytes / 1e6:9.2f} {use.peak_bytes / 1e6:9.2f} {error:+7.1%}"
    return line + "".join(f" {cell:>17}" for cell in cells), error


def main() -> None:
    """Train, predict, print a table in MB: tracked, and the error where the sides differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", default=",".join(dict.fromkeys(subject.model for subject in SUBJECTS)))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--predict-only", action="store_true")
    options, passed_on = parser.parse_known_args()
    lines, errors, without = [heading()], [], []
    print(lines[0], flush=True)
    for subject, strategy, directory in runs(options.output, options.models.split(","), options.strategies.split(",")):
        why = "" if options.predict_only else train(subject, strategy, directory, passed_on)
        if why:
            without.append(f"{subject.model} {subject.shape} {strategy}: {why}")
            print(without[-1], flush=True)
        if not (directory / "run.json").exists():
            continue
        line, error = compare(subject, strategy, read_run(directory))
        errors.append(error)
        lines.append(line)
        print(line, flush=True)
    lines.append(f"largest error {max(map(abs, errors), default=0):.1%} of {len(errors)} runs")
    print(lines[-1])
    write_text_atomically(options.output / "memory.txt", "\n".join([*lines, *without]) + "\n")


if __name__ == "__main__":
    main()
