"""Fuzz targets for what is typed and set: values of every option of every command, and variables of the environment.

No ranks are started and no program is run: where a command would, it ends as one that an interrupted launch ended.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import click
import matplotlib.figure
from parser_targets import DATA, FOLDER, Target
from use_targets import PROFILE, Change

from calibrate.cli import group as calibrate
from paradl_bench.cli import group as bench
from paradl_bench.core.errors import ParadlError, WorkError, shown
from paradl_bench.ranks import environment, launcher, rank_place
from paradl_bench.ranks.directories import host_watch
from paradl_bench.ranks.groups import meeting, process_groups
from paradl_bench.tools import request
from predict.cli import group as predict
from predict.validation.report.explore import server

_GROUPS: dict[str, Any] = {"calibrate": calibrate, "paradl-bench": bench, "predict": predict}
_PASSED_OVER = {("paradl-bench", "quickstart"), ("paradl-bench", "models")}
"""A run of other commands; a list without options."""
VALUES = (
    *("", "0", "-1", "1", "2", "3", "1e308", "-1e308", "1e-308", "nan", "inf", "9223372036854775808", "9" * 40, "1,2"),
    *(
        "x",
        "d2",
        "d4f2",
        "d99999999",
        "s2x2",
        "z3d4",
        "p2",
        "serial",
        "all",
        "none",
        ",",
        ":",
        "1:2",
        "1:9:x2",
        "1:9:2",
    ),
    *("1:1e18:x1.0000001", "0:0", "9:1", "64K", "1K:64M:2", "1K:1e300:1.1", "3x224x224", "0x0", "1x", "9" * 30 + "x1"),
    *("1@0", "1.5@3", "1e9@1", "a=b", "bandwidth=1", "ranks=1:1e6:x2", "bandwidth=0.1:10:log:99999999", "batch=0"),
    *(
        "node",
        "system",
        "gloo",
        "nccl",
        "cntk",
        "synthetic",
        "fp32",
        "bf16",
        "bf16-weights",
        "adam",
        "simulate",
        "paradl",
        "regressed",
        "regressed:mlp",
        "csv",
        "parquet",
        "markdown",
        "roofline",
        "1h",
        "1e300h",
        "-5m",
        "16GB",
        "megatron",
        "llm-foundry",
        "accelerate",
        "@/dev/null",
    ),
    *("features.*", "[", "*", "layer1.0:99999999999", "/dev/null", "\x1b[31m", "\u0661", "\xb2", "é", "[/]"),
)
_SITE = str(DATA.parents[1] / "slurm" / "site-cpu.yaml")
_PREDICT = ("--from-profile", str(PROFILE), "--model", "toy", "--batch", "16", "--no-channels-last")
_OPTIONS = (*_PREDICT, "--strategy", "d2")
_SHIPPED = ("--from-profile", "h100-sxm", "--model", "bert-base", "--batch", "16")
LINES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("predict",): _OPTIONS,
    ("predict", "what-if"): (*_OPTIONS, "--vary", "bandwidth=1,2"),
    ("predict", "devices"): (),
    ("predict", "profiles"): (),
    ("predict", "init"): ("--have", "profile", "--path", str(PROFILE), *_PREDICT[2:4], "--ranks", "4", "--batch", "8"),
    ("predict", "diagnose"): (*_OPTIONS, "--no-remedies"),
    ("predict", "validate-layers"): (*_PREDICT[:4], "--layers", "roofline"),
    # A search predicts 60 candidates unless told otherwise, and each input has two seconds.
    ("predict", "search"): (*_PREDICT, "--ranks", "2", "--predictions", "8"),
    # A profile that comes with the tool holds no iterations, so other code prices layers.
    ("predict", "timeline"): (*_SHIPPED, "--strategy", "t2"),
    ("predict", "report"): (*_OPTIONS, "-o", "-"),
    ("predict", "explore"): (str(PROFILE), "--no-browser"),
    ("predict", "buckets"): _OPTIONS,
    ("predict", "ghost"): (*_OPTIONS, "-o", "-"),
    ("predict", "validate"): ("--from-profile", str(PROFILE), str(DATA / "training-v1"), "-o", "report", "--force"),
    ("calibrate", "show"): (str(PROFILE),),
    ("calibrate", "diff"): (str(PROFILE), str(PROFILE)),
    ("calibrate", "merge"): (str(PROFILE), str(PROFILE), "-o", "-"),
    ("calibrate", "fit"): (str(DATA / "collectives-v1"), "-o", "-"),
    ("calibrate", "schema"): ("profile",),
    ("paradl-bench", "train"): ("vgg11", "--strategy", "d2", "--batch", "2", "-o", "out"),
    ("paradl-bench", "layers"): ("vgg11", "--batch", "2", "-o", "out"),
    ("paradl-bench", "collectives"): ("--ranks", "2", "-o", "out"),
    ("paradl-bench", "io"): ("--synthetic", "--batch", "2", "-o", "out"),
    ("paradl-bench", "kernels"): ("-o", "out"),
    ("paradl-bench", "describe"): ("tests-have-no-such-model",),
    ("paradl-bench", "import"): (
        "osu",
        str(DATA / "imports" / "osu-7.4.log"),
        "--ranks",
        "4",
        "--level",
        "node",
        "-o",
        "out",
    ),
    ("paradl-bench", "export"): (str(DATA / "layers-v1"), "-o", "out"),
    ("paradl-bench", "doctor"): (),
    ("paradl-bench", "slurm"): (
        "--site",
        str(DATA.parents[1] / "slurm" / "site-cpu.yaml"),
        "--models",
        "vgg11",
        "-o",
        "out",
    ),
    ("paradl-bench", "slurm-status"): ("out",),
}
"""A line that each command takes, from which options are changed."""


def commands() -> dict[tuple[str, ...], click.Command]:
    """Every command of the three programs, by its words."""
    found: dict[tuple[str, ...], click.Command] = {}
    for program, group in _GROUPS.items():
        context = click.Context(group)
        if group.invoke_without_command:
            found[program,] = group
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if (program, name) not in _PASSED_OVER and command is not None:
                found[program, name] = command
    return found


def _not_started(*arguments: Any, **settings: Any) -> NoReturn:
    raise WorkError("nothing is started here")


def _not_drawn(*arguments: Any, **settings: Any) -> None:
    """In the place of a picture."""


def _no_program(*arguments: Any, **settings: Any) -> NoReturn:
    raise OSError("no program is run here")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nothing is started, and what is written goes to the folder."""
    before = Path.cwd()
    os.chdir(folder)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with (
            mock.patch.object(launcher, "launch_ranks", _not_started),
            mock.patch.object(process_groups, "join_ranks", _not_started),
            mock.patch.object(os, "execve", _not_started),
            mock.patch.object(server, "listening", _not_started),
            mock.patch.object(subprocess, "run", _no_program),
            mock.patch.object(subprocess, "Popen", _no_program),
            mock.patch.object(sys, "stdout", out),
            # Pictures take a second of matplotlib's time, whatever the input.
            mock.patch.object(matplotlib.figure.Figure, "savefig", _not_drawn),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        os.chdir(before)


def _typed(program: str) -> Target:
    folder = FOLDER.path / f"typed-{program}"
    folder.mkdir(exist_ok=True)

    def run(content: bytes) -> bool:
        arguments = content.decode("utf-8", "surrogateescape").split("\0")
        with _alone(folder):
            try:
                _GROUPS[program].main(args=arguments, prog_name=program, standalone_mode=False)
            except (ParadlError, click.ClickException, click.exceptions.Exit) as error:
                line = shown(str(error)) or type(error).__name__
                line.encode()
                return True
        return False

    return run


def option_change(program: str) -> Change:
    """A change of one or two options of a command: what is set anew may be an option that the line has."""
    of_program = {words: command for words, command in commands().items() if words[0] == program}

    def change(generator: random.Random, corpus: Sequence[bytes]) -> bytes:
        words, command = generator.choice(sorted(of_program.items(), key=lambda each: each[0]))
        line = [*words[1:], *LINES.get(words, ())]
        for _ in range(generator.choice((1, 1, 2, 3))):
            parameter = generator.choice(command.params)
            if not isinstance(parameter, click.Option):
                line.append(generator.choice(VALUES))
                continue
            name = generator.choice((*parameter.opts, *parameter.secondary_opts))
            if parameter.is_flag:
                line.append(name)
                continue
            choices = getattr(parameter.type, "choices", ())
            pool = (*VALUES, *(choices * 8)) if choices else VALUES
            line += [name, generator.choice(pool)]
        return "\0".join(line).encode("utf-8", "surrogateescape")

    return change


NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"),
    *("SLURM_NNODES", "SLURMD_NODENAME", "PARADL_LAUNCHER", "PARADL_LAUNCHER_PID", "PARADL_HOST_CORES"),
    *("PARADL_CLUSTER", "PARADL_PROGRESS", "PARADL_NODE", "OMP_NUM_THREADS", "NCCL_DEBUG", "COLUMNS", "CXX"),
    *("MALLOC_ARENA_MAX", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)
_SET = (*VALUES, "own", "torchrun", "srun", "2(x3)", "2(x", "1,2(x2)", "65536", "localhost", "0", "1", "2", "3", "4")
_READERS: tuple[Callable[[str | None], object], ...] = (
    lambda choice: rank_place.launcher_of_environment(choice),
    lambda choice: rank_place.ranks_of_node(choice, 4),
    lambda choice: (rank_place.node_name(), rank_place.cluster_or_host(), environment.recorded_variables()),
    lambda choice: environment.host_cores(),
    lambda choice: host_watch.first_process(),
    lambda choice: request.level_of_job(),
    lambda choice: meeting._meeting_point(),
)


def _environment(content: bytes) -> bool:
    """Lines of NAME=VALUE; every reader is asked, as each launcher."""
    pairs = [line.partition("=") for line in content.decode("utf-8", "surrogateescape").split("\n") if "=" in line]
    wanted = {name: value.replace("\0", "") for name, _, value in pairs if name and "\0" not in name}
    refused = False
    with mock.patch.dict(os.environ, wanted), mock.patch.object(subprocess, "run", _no_program):
        for choice in (None, "own", "torchrun", "srun"):
            for read in _READERS:
                try:
                    read(choice)
                except ParadlError as error:
                    shown(str(error)).encode()
                    refused = True
    return refused


def environment_change(generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Some variables set to some values."""
    names = generator.sample(NAMES, generator.randrange(1, 12))
    return "\n".join(f"{name}={generator.choice(_SET)}" for name in names).encode("utf-8", "surrogateescape")


def option_targets() -> dict[str, Target]:
    """What is typed for each program, and the environment."""
    return {**{f"typed {program}": _typed(program) for program in _GROUPS}, "environment": _environment}


def option_changes() -> dict[str, Change]:
    """How inputs of these targets are changed."""
    return {**{f"typed {program}": option_change(program) for program in _GROUPS}, "environment": environment_change}


def option_seeds(name: str) -> list[bytes]:
    """What a target takes well."""
    if name == "environment":
        return [b"RANK=0\nLOCAL_RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=localhost\nMASTER_PORT=29500\nTORCHELASTIC_RUN_ID=x"]
    program = name.split(" ")[1]
    return ["\0".join((*words[1:], *line)).encode() for words, line in LINES.items() if words[0] == program]
