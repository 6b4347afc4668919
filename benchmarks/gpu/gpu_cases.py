"""What is measured on a lent GPU, network by network, and what measuring and analysing share."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

MISTAKE, FAILED = 2, 3
PRECISIONS = ("fp32", "bf16")
RAW, SECONDS, SHARDS = "raw", "seconds.json", "shards-fp32"


class Case(NamedTuple):
    """A network as it is measured; ``shards`` are strategies of which one rank's layers are measured in fp32."""

    name: str
    model: str
    batch: int
    sample: tuple[str, ...]
    shards: str
    optimizer: str = "sgd"


CASES: dict[str, tuple[Case, ...]] = {
    "cuda": (
        Case("resnet50", "resnet50", 64, (), "f2,c2,s2"),
        Case("gpt2-345m", "gpt2-345m", 4, ("--sequence", "1024"), "t2,t4", "adam"),
        Case("bert-large", "bert-large", 8, ("--sequence", "512"), "t2,t4", "adam"),
        Case("gpt2-large", "gpt2-large", 1, ("--sequence", "1024"), "t2,t4", "adam"),
        Case("vgg16", "vgg16", 32, (), "f2,c2,s2"),
        Case("cosmoflow-128", "cosmoflow", 8, ("--input-shape", "4x128x128x128"), "s2,f2"),
        Case("resnet152", "resnet152", 32, (), "f2,c2,s2"),
        Case("cosmoflow-256", "cosmoflow", 1, ("--input-shape", "4x256x256x256"), "s2,f2"),
    ),
    "cpu": (
        Case("resnet18", "resnet18", 2, ("--input-shape", "3x32x32"), "f2"),
        Case("cosmoflow", "cosmoflow", 2, ("--input-shape", "4x8x8x8"), "s2"),
    ),
}
"""By device, in the order of measuring; those of a CPU rehearse. BERT and GPT-2 large are as NeuSight trained them."""


def of_case(case: Case) -> list[str]:
    """What names a network, its batch and its optimizer to a command."""
    return [case.model, "--batch", str(case.batch), *case.sample, "--optimizer", case.optimizer]


def chosen(options: argparse.Namespace) -> list[Case]:
    """The networks that were asked for."""
    known = {case.name: case for case in CASES[options.device]}
    names = options.networks.split(",") if options.networks else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"gpu-results: unknown network {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        sys.exit(MISTAKE)
    return [known[name] for name in names]


def timed(command: list[str]) -> tuple[int, float]:
    """Exit code and seconds of a command, whose tables are dropped."""
    print("$", *command, flush=True)
    begin = time.perf_counter()
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    return code, time.perf_counter() - begin


def seconds_so_far(output: Path) -> dict[str, float]:
    """Seconds of all attempts, by measurement."""
    path = output / SECONDS
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found
