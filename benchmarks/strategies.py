"""Accuracy of every strategy that shares layers, on two ranks: measured shards against a shard taken as 1/p.

    python benchmarks/strategies.py -o DIR [--repetitions 2]

A repetition profiles each model whole and as one rank of every strategy runs it, two ranks at once, sweeps the
collectives that the plans hold, and trains serial and every strategy for real, in turn. One profile is then fitted from
all of them and held against every run; memory too. An interrupted benchmark goes on when called again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MODELS = {"vgg11": ("3x32x32", 8, 10), "resnet18": ("3x64x64", 8, 20), "cosmoflow": ("4x32x32x32", 2, 20)}
"""Input shape, global batch, timed iterations."""
STRATEGIES = ("serial", "f2", "c2", "s2")
SIZES = "256:64M:4"


def commands(output: Path, repetition: int) -> Iterator[tuple[str, list[str], Path]]:
    """(module, arguments, directory) of one repetition."""
    base = output / f"r{repetition}"
    shards = ",".join(STRATEGIES[1:])
    for model, (shape, batch, iterations) in MODELS.items():
        for ranks in (1, 2):
            settings = f"--batch {batch} --input-shape {shape} --ranks-on-host {ranks} --isolated none --blocks 3"
            arguments = ["layers", model, *settings.split(), "--iterations", "3"]
            if ranks == 2:
                arguments += ["--shards", shards]
            yield "paradl_bench", arguments, base / f"layers-{model}-{ranks}"
        for strategy in STRATEGIES:
            settings = f"--strategy {strategy} --batch {batch} --input-shape {shape} --warmup 3"
            arguments = ["train", model, *settings.split(), "--iterations", str(iterations)]
            yield "paradl_bench", arguments, base / f"train-{model}-{strategy}"
    sweep = f"--ranks 2 --backend gloo --ops all_reduce,broadcast,all_gather,send_recv --sizes {SIZES} --beside-compute"
    yield "paradl_bench", ["collectives", *sweep.split(), "--blocks", "3"], base / "collectives"


def run(module: str, arguments: list[str], *, shown: bool = False) -> None:
    """Run one command; its table is dropped unless shown."""
    print("$", module.replace("_", "-"), *arguments, flush=True)
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, check=True, stdout=None if shown else subprocess.DEVNULL)


def main() -> None:
    """Measure all repetitions, fit, validate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=2)
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
