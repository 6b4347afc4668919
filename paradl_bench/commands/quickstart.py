"""``paradl-bench quickstart``: the whole loop on one machine: measure, calibrate, predict, train, validate.

Every step is a command that a user could type; this only types them, in order, and shows them.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.terminal.command_line import say
from paradl_bench.plan.collectives.catalog import OF_STRATEGIES

SERIAL_BATCH = 8
"""Global mini-batch of every run; data parallel on two ranks takes half of it on each."""
# Keep the whole under six minutes on two cores. Weights take most of alexnet's iteration, as they do of vgg11's, which
# has twice as many.
SHAPE = "3x64x64"
ITERATIONS = {"resnet18": 40, "mobilenet_v2": 40, "alexnet": 24}
WARMUP = 3
ROUNDS = 3
"""Everything is measured so often, minutes apart: a run is of a later minute, and what a shared host gives changes by
then. Blocks of one measurement are seconds apart and do not tell; three measurements are the fewest that do."""
BLOCKS = {"layers": 2, "collectives": 1}
"""Of each measurement in a round."""
PAGE = "report.html"
_PAIR = ("--ranks", "2", "--backend", "gloo")
# What data parallelism issues, from batch norm's counters to alexnet's largest bucket.
_COLLECTIVES = (
    *(*_PAIR, "--ops", "all_reduce,broadcast", "--sizes", "64:256M:4"),
    *("--contexts", "after-compute,with-compute"),
)
# What predict search needs beside them; of few sizes, since no run here is held against these.
_OTHERS = (
    *(*_PAIR, "--ops", ",".join(sorted(set(OF_STRATEGIES) - {"all_reduce", "broadcast"}))),
    *("--sizes", "1K:64M:8"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the loop; what ``shown`` leaves out of the screen is shown where it goes wrong."""

    title: str
    module: str
    arguments: tuple[str, ...]
    shown: bool = True

    @property
    def command_line(self) -> str:
        """As a user would type it."""
        return shlex.join((self.module.replace("_", "-"), *self.arguments))


def steps(output: Path) -> list[Step]:
    """The loop's commands, writing below ``output``."""
    profile = str(output / "profile.json")
    kinds = [*(name for name, _ in _layer_profiles()), "collectives", "others"]
    measured = [str(output / f"{kind}-r{number}") for kind in kinds for number in range(1, ROUNDS + 1)]
    predictions = [
        ("--from-profile", profile, "--model", model, "--strategy", "serial,d2", "--batch", str(SERIAL_BATCH))
        for model in ITERATIONS
    ]
    trainings = [_training(output, model, strategy) for model in ITERATIONS for strategy in ("serial", "d2")]
    searched = ("--from-profile", profile, "--model", "alexnet", "--ranks", "64", "--batch", "512", "--top", "5")
    runs = [training.arguments[-1] for training in trainings]
    report = str(output / "report")
    return [
        Step("What this machine has", "paradl_bench", ("doctor",)),
        *(step for number in range(1, ROUNDS + 1) for step in _round_of_measurements(output, number)),
        Step("Fit one profile", "calibrate", ("fit", *measured, "-o", profile, "--force")),
        *(Step(f"Predict {arguments[3]}", "predict", arguments) for arguments in predictions),
        Step("Which strategy for alexnet on 64 such ranks, and why not the others", "predict", ("search", *searched)),
        *trainings,
        Step(
            "Hold the predictions against the runs",
            "predict",
            ("validate", "--from-profile", profile, *runs, "-o", report, "--force"),
        ),
        Step(
            "Write one page that explains that search, and the runs",
            "predict",
            ("report", *searched, *runs, "-o", str(output / PAGE), "--force"),
        ),
    ]


def _round_of_measurements(output: Path, number: int) -> list[Step]:
    """Layers of all models, then collectives."""
    where = f"(round {number} of {ROUNDS})"
    round_steps = []
    for name, arguments in _layer_profiles():
        models, batch, ranks = arguments[0].replace(",", ", "), arguments[2], arguments[4]
        title = f"Layer times of {models}, batch {batch}, {ranks} at once {where}"
        words = ("layers", *arguments, "--blocks", str(BLOCKS["layers"]), "-o", str(output / f"{name}-r{number}"))
        round_steps.append(Step(title, "paradl_bench", words))
    alone = f"Collectives between two ranks, alone, beside compute and behind it {where}"
    others = f"The other collectives that strategies issue, for predict search {where}"
    for name, title, arguments in (("collectives", alone, _COLLECTIVES), ("others", others, _OTHERS)):
        counted = ("--blocks", str(BLOCKS["collectives"]), "--seed", str(number - 1))
        words = ("collectives", *arguments, *counted, "-o", str(output / f"{name}-r{number}"))
        round_steps.append(Step(title, "paradl_bench", words))
    return round_steps


def _layer_profiles() -> list[tuple[str, tuple[str, ...]]]:
    """Name and arguments of each layer profile: the serial batch on one rank, half of it on two at once."""
    profiles: list[tuple[str, tuple[str, ...]]] = []
    for ranks in (1, 2):
        arguments = (",".join(ITERATIONS), "--batch", str(SERIAL_BATCH // ranks), "--ranks-on-host", str(ranks))
        profiles.append((f"layers-{ranks}", (*arguments, "--input-shape", SHAPE, "--isolated", "none")))
    return profiles


def _training(output: Path, model: str, strategy: str) -> Step:
    settings = f"--strategy {strategy} --batch {SERIAL_BATCH} --input-shape {SHAPE} --warmup {WARMUP}"
    counted = f"--iterations {ITERATIONS[model]}"
    return Step(
        f"Train {model} for real: {strategy}, {ITERATIONS[model]} iterations of {SERIAL_BATCH} images of {SHAPE}",
        "paradl_bench",
        ("train", model, *settings.split(), *counted.split(), "-o", str(output / f"train-{model}-{strategy}")),
        shown=False,
    )


def run_quickstart(output: Path) -> None:
    """Run all steps; an interrupted quickstart goes on where it stopped.

    Raises:
        UserError: ``output`` is a file.
        WorkError: a step failed; what the earlier ones measured is kept.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; -o takes a directory")
    output.mkdir(parents=True, exist_ok=True)
    todo = steps(output)
    counts = ", ".join(f"{model} {count}" for model, count in ITERATIONS.items())
    say(f"{', '.join(ITERATIONS)} on {SHAPE} images; mini-batch {SERIAL_BATCH}; iterations a run: {counts}")
    begin = time.monotonic()
    for number, step in enumerate(todo, start=1):
        say(
            f"\n[{number}/{len(todo)}, {time.monotonic() - begin:.0f} s] {step.title}\n$ {step.command_line}",
            lines=True,
        )
        _run(step)
    say(f"\nDone in {time.monotonic() - begin:.0f} s. Open {output / PAGE} in a browser.", lines=True)


def _run(step: Step) -> None:
    command = [sys.executable, "-P", "-m", step.module, *step.arguments]
    result = subprocess.run(
        command, stdout=None if step.shown else subprocess.PIPE, stdin=subprocess.DEVNULL, check=False
    )
    if result.returncode == 0:
        return
    if result.stdout:
        say(result.stdout.decode(errors="replace"), lines=True)
    raise WorkError(
        f"`{step.command_line}` ended with exit code {result.returncode}; its measurements are kept: run the same"
        " command again to go on"
    )


@click.command("quickstart")
@click.option("-o", "--output", default="quickstart", show_default=True, type=click.Path(path_type=Path))
def COMMAND(output: Path) -> None:  # noqa: N802
    """Profile three small models on two CPU cores, sweep, calibrate, predict, train for real, and compare."""
    run_quickstart(output)
