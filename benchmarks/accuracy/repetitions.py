"""What benchmarks of accuracy share: repetitions of profiles and real runs in turn, one fit, one validation."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

Command = tuple[list[str], Path]
"""Arguments of ``paradl-bench``, and where it writes."""
Commands = Callable[[Path, int], Iterable[Command]]
"""From the output directory and a repetition's number."""


def measure_and_validate(
    description: str, commands: Callable[..., Iterable[Command]], repetitions: int, **flags: str
) -> None:
    """Measure all repetitions, fit one profile from all of them, hold it against every run, print.

    Args:
        description: shown by ``--help``. repetitions: unless ``--repetitions`` says another number.
        flags: options that ``commands`` takes by name, and what they do.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=repetitions)
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in flags}
    validate(options.output, partial(commands, **chosen), options.repetitions)


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


def validate_across(output: Path, halves: tuple[list[str], list[str]]) -> None:
    """Compare each half of the runs, and hold intervals that count its errors against the other half; print how many
    configurations they contain.
    """
    profile = str(output / "profile.json")
    inside: dict[str, list[bool]] = {}
    for number, (compared, others) in enumerate((halves, halves[::-1])):
        counting, report = output / f"compared-{number}.json", output / f"compared-{number}"
        told = ["validate", "--from-profile", profile, *compared, "-o", f"{report}-own", "--force"]
        run("predict", [*told, "--profile-out", str(counting)])
        run("predict", ["validate", "--from-profile", str(counting), *others, "-o", str(report), "--force"])
        for configuration in json.loads((report / "report.json").read_bytes())["repeated"]:
            inside.setdefault(configuration["strategy"], []).append(
                configuration["by_evaluator"]["simulate"]["covered"]
            )
    if not inside:
        print("No configuration was run twice: intervals are held against none.")
        return
    print("Intervals that count the errors of the other half of the networks:")
    for strategy, held in inside.items():
        print(f"{strategy:8} {sum(held)} of {len(held)} configurations")
    every = list(itertools.chain.from_iterable(inside.values()))
    print(f"{'all':8} {sum(every)} of {len(every)}, {sum(every) / len(every):.1%}")


def run(module: str, arguments: list[str], *, shown: bool = False) -> None:
    """Run one command; its table is dropped unless shown."""
    print("$", module.replace("_", "-"), *arguments, flush=True)
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, check=True, stdout=None if shown else subprocess.DEVNULL)
