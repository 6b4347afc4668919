"""The three commands as a user runs them, and S-SGD traces to bring an iteration in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
PUBLISHED = Path(__file__).parents[1]


class TraceLayer(NamedTuple):
    """A line of an S-SGD trace: seconds of forward, backward and exchange, and the bytes of its gradient."""

    name: str
    forward_s: float
    backward_s: float
    exchange_s: float
    gradient_bytes: int


class Told(NamedTuple):
    """What ``predict`` printed of one point; seconds."""

    iteration_s: float
    low_s: float
    high_s: float


def run(module: str, *arguments: str) -> str:
    """Standard output of one of the three commands.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PUBLISHED), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr.strip()}")
    return done.stdout


def predict(profile: Path, model: str, ranks: int, batch: int, *options: str) -> Told:
    """Data parallelism over ``ranks`` with a global mini-batch, from a profile."""
    about = ("--from-profile", str(profile), "--model", model, "--strategy", f"d{ranks}", "--batch", str(batch))
    found: dict[str, Any] = json.loads(run("predict", *about, *options, "--json"))[0]
    return Told(found["iteration_s"], *found["interval_s"])


def write_trace(path: Path, iterations: Sequence[Sequence[TraceLayer]]) -> None:
    """An S-SGD trace, a block an iteration."""
    lines = []
    for layers in iterations:
        lines.append("0 data 0 0 0 0")
        for number, layer in enumerate(layers, start=1):
            times = " ".join(f"{1e6 * time:.9g}" for time in (layer.forward_s, layer.backward_s, layer.exchange_s))
            lines.append(f"{number} {layer.name} {times} {layer.gradient_bytes}")
        lines.append("")
    path.write_text("\n".join(lines))
