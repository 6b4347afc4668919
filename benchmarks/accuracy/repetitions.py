"""What benchmarks of accuracy share: repetitions of profiles and real runs in turn, one fit, one validation."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Commands = Callable[[Path, int], Iterable[tuple[list[str], Path]]]
"""From the output directory and a repetition's number: arguments of ``paradl-bench``, and where each one writes."""


def measure_and_validate(description: str, commands: Commands, repetitions: int) -> None:
    """Measure all repetitions, fit one profile from all of them, hold it against every run, print.

    Args:
        description: shown by ``--help``. repetitions: unless ``--repetitions`` says another number.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=repetitions)
    options = parser.parse_args()
    validate(options.output, commands, options.repetitions)


def validate(output: Path, commands: Commands, repetitions: int) -> None:
    """Measure all repetitions below ``output``, fit ``profile.json`` there, print how runs and predictions differ."""
    profiles, runs = [], []
    for repetition in range(repetitions):
        for arguments, directory in commands(output, repetition):
            run("paradl_bench", [*arguments, "-o", str(directory)])
            (runs if arguments[0] == "train" else profiles).append(str(directory))
    fit_and_validate(output, profiles, runs)


def fit_and_validate(output: Path, profiles: Iterable[str], runs: Iterable[str]) -> None:
    """Fit ``profile.json`` from directories of measurements, hold it against those of runs, print how they differ."""
    profile = str(output / "profile.json")
    run("calibrate", ["fit", *profiles, "-o", profile, "--force"])
    report = ["validate", "--from-profile", profile, *runs, "-o", str(output / "report"), "--force"]
    run("predict", report, shown=True)


def run(module: str, arguments: list[str], *, shown: bool = False) -> None:
    """Run one command; its table is dropped unless shown."""
    print("$", module.replace("_", "-"), *arguments, flush=True)
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, check=True, stdout=None if shown else subprocess.DEVNULL)
