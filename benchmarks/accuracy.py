"""Accuracy, coverage and closure on this machine: profiles and real runs in turn, many times over.

    python benchmarks/accuracy.py -o DIR [--repetitions 5]

Every repetition profiles the models (one rank, and two at once), sweeps gloo, and trains serial and d2 for real; so
profiles and runs see the same slow and fast spells of the machine. One profile is then fitted from all repetitions and
held against every run. About six minutes a repetition on two cores; an interrupted benchmark goes on when called again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SHAPES = {"3x64x64": ("resnet18", "mobilenet_v2"), "3x32x32": ("vgg11",)}
ITERATIONS = {"resnet18": 24, "mobilenet_v2": 30, "vgg11": 12}
BATCHES = (4, 8)


def commands(output: Path, repetition: int) -> Iterator[tuple[str, list[str], Path]]:
    """(module, arguments, directory) of one repetition, profiles and runs in turn."""
    base = output / f"r{repetition}"
    for shape, models in SHAPES.items():
        for ranks in (1, 2):
            directory = base / f"layers-{models[0]}-{ranks}"
            batches = ",".join(str(batch // ranks) for batch in BATCHES)
            profile = f"--batch {batches} --ranks-on-host {ranks} --input-shape {shape} --isolated none --blocks 3"
            yield "paradl_bench", ["layers", ",".join(models), *profile.split(), "--iterations", "3"], directory
        for model in models:
            for batch in BATCHES:
                for strategy in ("serial", "d2"):
                    run = f"--strategy {strategy} --batch {batch} --input-shape {shape} --warmup 3"
                    arguments = ["train", model, *run.split(), "--iterations", str(ITERATIONS[model])]
                    yield "paradl_bench", arguments, base / f"train-{model}-{strategy}-{batch}"
    sweep = "--ranks 2 --backend gloo --ops all_reduce,broadcast --sizes 128:512M:4 --beside-compute --blocks 3"
    yield "paradl_bench", ["collectives", *sweep.split()], base / "collectives"


def run(module: str, arguments: list[str], *, shown: bool = False) -> None:
    """Run one command; its table is dropped unless shown."""
    print("$", module.replace("_", "-"), *arguments, flush=True)
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, check=True, stdout=None if shown else subprocess.DEVNULL)


def main() -> None:
    """Measure all repetitions, fit, validate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    profiles, runs = [], []
    for repetition in range(options.repetitions):
        for module, arguments, directory in commands(options.output, repetition):
            run(module, [*arguments, "-o", str(directory)])
            (runs if arguments[0] == "train" else profiles).append(str(directory))
    profile = str(options.output / "profile.json")
    run("calibrate", ["fit", *profiles, "-o", profile, "--force"])
    report = ["validate", "--from-profile", profile, *runs, "-o", str(options.output / "report"), "--force"]
    run("predict", report, shown=True)


if __name__ == "__main__":
    main()
