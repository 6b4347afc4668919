"""``predict init``: the commands for one's case, from three answers. Imports click alone."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.help import GroupedCommand

_HAVE = ("profile", "logs", "nothing")
_MARKS = (
    ("rccl-tests", ("rccl", "RCCL")),
    ("nccl-tests", ("nccl-tests", "NCCL", "nThread")),
    ("osu", ("OSU ", "osu_")),
    ("imb", ("Intel(R) MPI Benchmarks",)),
    ("kineto", ("traceEvents",)),
)
"""What a format's files say of themselves at their beginning."""
_HEAD_CHARACTERS = 4096
_SHIPPED = "h100-sxm"
"""Of the profiles that come with the tool, the one with most collectives."""
_NETWORK = "network.json"


class Case(NamedTuple):
    """What somebody has, and wants to know.

    Attributes:
        path: of the profile or the logs.
        ranks: the most. batch: global, in samples.
    """

    have: str
    path: str
    model: str
    ranks: int
    batch: int
    device: str


@click.command("init", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--have", type=click.Choice(_HAVE), help="What you have: a profile, logs of other tools, or nothing.")
@click.option("--path", metavar="PATH", help="Path of the profile or the log.")
@click.option(
    "--model", metavar="M", help="A model that paradl-bench models lists, config.json, or package.module:factory."
)
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="The most ranks to train on.")
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Global mini-batch, in samples.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Device to measure on."
)
@click.option("-o", "--output", metavar="FILE", default="-", help="Write the commands to a file. Default: print them.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(output: str, force: bool, **given: Any) -> None:
    """Ask what you have, which model and how many ranks; write the commands from there to an answer.

    \b
    predict init
    predict init --have nothing --model resnet50 --ranks 64 --batch 2048
    """
    from paradl_bench.core.terminal.command_line import refuse_overwrite, write_output

    refuse_overwrite(output, force=force)
    case = _asked(given)
    for name, text in (("--model", case.model), ("--path", case.path)):
        if not text.isprintable():
            raise UserError(f"{name} {text!r}: give printable characters on one line")
    if case.have == "profile":
        _check_profile(case)
    else:
        _check_model(case.model)
    write_output(output, "".join(f"{line}\n" for line in commands_for(case)).encode(), force=force)


def _asked(given: dict[str, Any]) -> Case:
    """The case, of options and answers; on no terminal all has to be given."""
    wanted = ["have", "model", "ranks", "batch"]
    if given["have"] in ("profile", "logs"):
        wanted.insert(1, "path")
    missing = [f"--{name}" for name in wanted if given[name] is None]
    if not missing:
        return Case(**{**given, "path": given["path"] or ""})
    if not _on_terminal():
        raise UserError(
            f"predict init asks its questions on a terminal, and this is not one: give {', '.join(missing)}, as"
            " --have nothing --model resnet50 --ranks 64 --batch 2048"
        )
    have = given["have"] or _answer("1. What do you have", click.Choice(_HAVE))
    path = given["path"] or (
        _answer(f"   Where (path of the {have.removesuffix('s')})", str) if have != "nothing" else ""
    )
    model = given["model"] or _answer("2. Which model (a name, config.json or package.module:factory)", str)
    ranks = given["ranks"] or _answer("3. On how many ranks at most", click.IntRange(1))
    batch = given["batch"] or _answer("   With how many samples in a global mini-batch", click.IntRange(1))
    return Case(have, path, model, ranks, batch, given["device"])


def _on_terminal() -> bool:
    return sys.stdin.isatty()


def _answer(question: str, kind: Any) -> Any:
    return click.prompt(question, type=kind, err=True)


def _check_profile(case: Case) -> None:
    """Raise a UserError where the profile cannot be read, or does not hold the model."""
    from calibrate.profile.profile import read_profile
    from predict.costs.files import choose_network

    choose_network(read_profile(case.path), case.model, None, Path(case.path))


def _check_model(model: str) -> None:
    """Raise a UserError where no command would know the model."""
    from paradl_bench.core.errors import unknown_choice
    from paradl_bench.core.terminal.command_line import say
    from paradl_bench.network.models.configurations import names_configuration, read_configuration

    if names_configuration(model):
        read_configuration(model)
        return
    if all(model.partition(":")) or _is_described(model):
        return
    try:
        # The names of torchvision's models; whoever gives another name waits for torch.
        from paradl_bench.network.models.catalog import model_names

        known = model_names()
    except (ModuleNotFoundError, UserError):
        say(f"predict: --model {model} cannot be checked, because torchvision is not installed")
        return
    if model not in known:
        unknown = unknown_choice("model", model, known, listed_by="paradl-bench models")
        raise UserError(f"--model: {unknown}; a model of your own is config.json or package.module:factory")


def _is_described(model: str) -> bool:
    """Whether predictions find the network of a model by themselves."""
    from paradl_bench.network.models.configurations import names_configuration
    from paradl_bench.network.models.language_sizes import language_model_names
    from paradl_bench.network.models.traced_networks import traced_models

    return names_configuration(model) or model in (*traced_models(), *language_model_names())


def commands_for(case: Case) -> Iterator[str]:
    """Lines of a shell script: what each step is for, and its command."""
    profile = case.path if case.have == "profile" else "profile.json"
    steps = [*_measuring(case, profile), *_predicting(case, profile)]
    batch = f"a batch of {case.batch}"
    yield f"# {case.model}, {batch}, on at most {case.ranks} rank{'s' if case.ranks > 1 else ''}"
    for number, (what, command) in enumerate(steps, 1):
        yield f"# {number}. {what}"
        yield shlex.join(command)


def _measuring(case: Case, profile: str) -> Iterator[tuple[str, list[str]]]:
    """From nothing, or from logs, to a profile."""
    if case.have == "profile":
        yield "What the profile holds, and where it is weak.", ["calibrate", "show", profile]
        return
    if case.have == "nothing":
        yield from _from_published(case)
    a_rank = max(case.batch // case.ranks, 1)
    on = ["--device", case.device] if case.device != "cpu" else []
    batches = f"{a_rank},{2 * a_rank}"
    yield (
        "Time every layer on one device, with the samples that a rank gets and with twice as many.",
        ["paradl-bench", "layers", case.model, "--batch", batches, *on, "-o", "layers"],
    )
    if case.have == "logs":
        files = ["import", _format_of(case.path), case.path]
        yield (
            "Import what the other tool measured. A log that lists no hosts also needs --ranks and --level.",
            ["paradl-bench", *files, "-o", "imported"],
        )
    elif case.ranks > 1:
        backend = "nccl" if case.device == "cuda" else "gloo"
        sweep = ["collectives", "--ranks", "2", "--backend", backend, "-o", "collectives"]
        yield "Sweep collectives. On a cluster, start this on more ranks by srun or torchrun.", ["paradl-bench", *sweep]
    folders = ["layers"] + ({"logs": ["imported"], "nothing": ["collectives"]}[case.have] if case.ranks > 1 else [])
    yield "Fit the measurements into a profile.", ["calibrate", "fit", *folders, "-o", profile]


def _from_published(case: Case) -> Iterator[tuple[str, list[str]]]:
    """A prediction before any measurement; of a model that the tool has no network of, its description first."""
    network = []
    if not _is_described(case.model):
        network = ["--network", _NETWORK]
        yield (
            "Describe the layers of the model. This measures nothing.",
            [*("paradl-bench", "describe", case.model, "-o", _NETWORK)],
        )
    yield (
        "Before any measurement: a prediction from published ones. predict profiles lists other GPUs.",
        ["predict", "search", "--from-profile", _SHIPPED, *_about(case), *network, "--ranks", str(case.ranks)],
    )


def _predicting(case: Case, profile: str) -> Iterator[tuple[str, list[str]]]:
    """From a profile to answers."""
    about = ["--from-profile", profile, *_about(case)]
    most = str(case.ranks)
    if case.ranks == 1:
        yield "How long an iteration takes.", ["predict", *about, "--strategy", "serial"]
        yield "What would help most.", ["predict", "what-if", *about, "--strategy", "serial"]
        return
    yield "Which strategy is the fastest.", ["predict", "search", *about, "--ranks", most]
    counts = [2**power for power in range(1, case.ranks.bit_length()) if 2**power < case.ranks]
    ranks = ",".join(map(str, [*counts, case.ranks]))
    sweep = ["--strategy", "data", "--ranks", ranks, "--scaling", "strong"]
    yield "How data parallelism scales, and up to how many ranks it pays.", ["predict", *about, *sweep]
    yield "What would help most.", ["predict", "what-if", *about, "--strategy", f"d{case.ranks}"]


def _about(case: Case) -> list[str]:
    return ["--model", case.model, "--batch", str(case.batch)]


def _format_of(path: str) -> str:
    """The format of a log by how it begins.

    Raises:
        UserError: it is unreadable, or begins as no log that is known.
    """
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as log:
            head = log.read(_HEAD_CHARACTERS)
    except OSError as error:
        raise UserError(f"--path {path}: {error.strerror or error}; give a log of another tool") from error
    for name, marks in _MARKS:
        if any(mark in head for mark in marks):
            return name
    known = ", ".join(name for name, _ in _MARKS)
    raise UserError(
        f"--path {path} does not begin like a log of {known}: see paradl-bench import --help for other formats"
    )
