"""Fuzz targets that use what they read: the commands that show, compare, fit, predict, search and validate it."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from field_changes import field_change
from parser_seeds import longer
from parser_targets import DATA, FOLDER, Target

from calibrate.cli import group as calibrate
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import ParadlError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.records.cluster import ClusterFile
from paradl_bench.records.contexts.older import OLDER
from paradl_bench.records.measurement import (
    COLLECTIVES_FILE,
    COPIES_FILE,
    ITERATIONS_FILE,
    LAYERS_FILE,
    MANIFEST_NAME,
    Manifest,
)
from paradl_bench.records.samples import (
    CollectiveSamples,
    CopySamples,
    IterationSamples,
    LayerSamples,
)
from paradl_bench.records.training.training_record import RUN_NAME, TRAINING_FILE, TrainingIterations, TrainingRun
from predict.cli import group as predict

Change = Callable[[random.Random, Sequence[bytes]], bytes]


def _fuller() -> Path:
    """The newest profile with fits of further collectives, so that every strategy can be predicted."""
    document = json.loads((DATA / "profile-v5.json").read_bytes())
    first = document["communication"][0]
    document["communication"] += [
        {**first, "operation": operation, "algorithm": algorithm}
        for operation, algorithm in (("all_gather", "ring"), ("reduce_scatter", "ring"), ("send_recv", "direct"))
    ]
    path = FOLDER.path / "fuller.json"
    path.write_text(json.dumps(document))
    return path


PROFILE = _fuller()
_SETTINGS = "--no-channels-last"
_TOY = f"--model toy --batch 16 {_SETTINGS}"
EVALUATORS = ("csf", "dag", "flops", "osf", "paradl", "proportional", "simulate")
_REPLACED = "--replace relu*=none --replace fc=linear(*,20)+gelu+linear(20,10) --json"
_REPORT = "-o {report} --html {report}/page.html --force --json"
_USES = (
    "calibrate show {profile}",
    "calibrate show {profile} --json",
    f"calibrate diff {{profile}} {PROFILE}",
    f"calibrate diff {PROFILE} {{profile}}",
    *(f"predict --from-profile {{profile}} {_TOY} --strategy d2 --evaluator {name} --json" for name in EVALUATORS),
    f"predict --from-profile {{profile}} {_TOY} --strategy z3d2",
    f"predict --from-profile {{profile}} {_TOY} --strategy f2",
    f"predict --from-profile {{profile}} {_TOY} --strategy d2 --export megatron --export-to -",
    f"predict --from-profile {{profile}} {_TOY} --strategy p2",
    f"predict --from-profile {{profile}} {_TOY} --strategy serial --layers roofline",
    "predict validate-layers --from-profile {profile} --model toy --json",
    f"predict --from-profile {{profile}} {_TOY} --strategy serial --evaluator simulate",
    f"predict search --from-profile {{profile}} {_TOY} --ranks 2",
    f"predict what-if --from-profile {{profile}} {_TOY} --strategy d2 --vary bandwidth=0.5,1,2 --vary ranks=2,4",
    f"predict what-if --from-profile {{profile}} {_TOY} --strategy d2 {_REPLACED}",
    f"predict buckets --from-profile {{profile}} {_TOY} --strategy d2",
    f"predict diagnose --from-profile {{profile}} {_TOY} --strategy d2",
    "predict diagnose --from-profile {profile} --run {training} --force --json --no-remedies",
    f"predict timeline --from-profile {{profile}} {_TOY} --strategy d2",
    f"predict report --from-profile {{profile}} {_TOY} --strategy d2 -o -",
    f"predict validate --from-profile {{profile}} {{training}} {_REPORT}",
)
_OF_CLUSTER = tuple(
    f"predict --from-profile {PROFILE} {_TOY} --strategy {strategy} --cluster {{cluster}} --evaluator {name}"
    for strategy, name in (("d2", "simulate"), ("f2", "paradl"), ("z2d4", "simulate"), ("d2", "csf"))
)
_OF_NETWORK = tuple(
    f"predict --from-profile {PROFILE} --network {{network}} --model toy --batch 16 {_SETTINGS} --strategy {each}"
    for each in ("d2", "f2", "p2", "s2x1", "z3d2", "c2", "d2 --evaluator paradl")
) + tuple(
    f"predict what-if --from-profile {PROFILE} --network {{network}} {_TOY} --strategy {each}"
    for each in (f"d2 {_REPLACED}", "p2 --replace conv=conv2d(3,8,5,2,2)", "serial --replace *1=flatten --csv")
)


class Outcome:
    """What a command gave: its output, or the line of its refusal."""

    def __init__(self, output: str, refusal: str) -> None:
        self.output = output
        self.refusal = refusal


def run(arguments: Sequence[str]) -> Outcome:
    """A command in this process.

    Raises:
        Exception: whatever is none of the project's own errors or click's.
    """
    import click

    group: Any = {"calibrate": calibrate, "predict": predict}[arguments[0]]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    refusal = ""
    with mock.patch.object(sys, "stdout", out), contextlib.redirect_stderr(io.StringIO()):
        try:
            group.main(args=list(arguments[1:]), prog_name=arguments[0], standalone_mode=False)
        except (ParadlError, click.ClickException) as error:
            refusal = str(error) or type(error).__name__
    out.flush()
    return Outcome(out.buffer.getvalue().decode(), refusal)  # type: ignore[attr-defined]


def _using(name: str, commands: Sequence[str]) -> Target:
    """A target that writes one file and gives it to one command, told by the input so that a finding repeats."""
    folder = FOLDER.path / f"used-{name}"
    folder.mkdir(exist_ok=True)
    path = folder / ("file.yaml" if name == "cluster" else "file.json")

    def use(content: bytes) -> bool:
        path.write_bytes(content)
        words = commands[zlib.crc32(content) % len(commands)]
        beside = {"training": str(DATA / "training-v1"), "report": str(folder / "report")}
        return bool(run(words.format(**{name: path}, **beside).split()).refusal)

    return use


def _of_directory(source: str, file: str, commands: Sequence[str]) -> Target:
    folder = FOLDER.path / f"used-{source}-{file}"
    folder.mkdir(exist_ok=True)
    for other in (DATA / source).iterdir():
        content = other.read_bytes()
        (folder / other.name).write_bytes(longer(content) if other.name == TRAINING_FILE else content)
    whole = (folder / file).read_bytes()

    def use(content: bytes) -> bool:
        # One line of a file is changed; the others stay, or nothing could be fitted.
        lines = [content, *whole.splitlines()[1:]] if file.endswith(".jsonl") else [content]
        (folder / file).write_bytes(b"\n".join(lines) + b"\n")
        words = commands[zlib.crc32(content) % len(commands)]
        return bool(run(words.format(folder=folder, report=FOLDER.path / "report").split()).refusal)

    return use


_FIT = ("calibrate fit {folder} -o - --force",)
_VALIDATE = (f"predict validate --from-profile {PROFILE} {{folder}} {_REPORT}",)
_DIRECTORIES: tuple[tuple[str, str, type[msgspec.Struct], Sequence[str]], ...] = (
    ("layers-v1", LAYERS_FILE, LayerSamples, _FIT),
    ("layers-v1", ITERATIONS_FILE, IterationSamples, _FIT),
    ("layers-v1", COPIES_FILE, CopySamples, _FIT),
    ("layers-v1", MANIFEST_NAME, Manifest, _FIT),
    ("layers-v1", "network-toy.json", ModelGraph, _FIT),
    ("collectives-v1", COLLECTIVES_FILE, CollectiveSamples, _FIT),
    ("collectives-v1", "interference.jsonl", OLDER["interference.jsonl"], _FIT),
    ("training-v1", RUN_NAME, TrainingRun, _VALIDATE),
    ("training-v1", TRAINING_FILE, TrainingIterations, _VALIDATE),
)


def use_targets() -> dict[str, Target]:
    """Every target that uses what it reads, by name."""
    found = {
        "used profile": _using("profile", _USES),
        "used network": _using("network", _OF_NETWORK),
        "used cluster": _using("cluster", _OF_CLUSTER),
    }
    return found | {
        f"used {source} {file}": _of_directory(source, file, commands) for source, file, _, commands in _DIRECTORIES
    }


def use_changes() -> dict[str, Change]:
    """How inputs of these targets are changed: by their fields."""
    found = {
        "used profile": field_change(Profile),
        "used network": field_change(ModelGraph),
        "used cluster": field_change(ClusterFile),
    }
    return found | {f"used {source} {file}": field_change(kind) for source, file, kind, _ in _DIRECTORIES}


def use_seeds(name: str) -> list[bytes]:
    """What a target uses well."""
    network = json.loads(PROFILE.read_bytes())["network"]["toy"]
    special = {
        "used profile": [PROFILE.read_bytes()],
        "used network": [json.dumps(network).encode()],
        "used cluster": [
            json.dumps({"name": "c", "memory_bytes_per_rank": 16e9, "levels": [{"name": "node", "ranks": 4}]}).encode(),
            json.dumps(
                {
                    "name": "c",
                    "levels": [
                        {"name": "node", "ranks": 2, "alpha_s": 1e-5, "beta_s_per_byte": 1e-9, "contention": 2},
                        {"name": "system", "ranks": 64, "alpha_s": 1e-4, "beta_s_per_byte": 1e-8},
                    ],
                }
            ).encode(),
        ],
    }
    if name in special:
        return special[name]
    _, source, file = name.split(" ")
    content = (DATA / source / file).read_bytes()
    content = longer(content) if file == TRAINING_FILE else content
    return [content.splitlines()[0]] if file.endswith(".jsonl") else [content]
