"""Models that misbehave on one rank, and the command in a process of its own, for what ends runs from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

NETWORKS = """
import os, signal, time
from torch import nn

class Plain(nn.Module):
    input_shape = (6,)
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 10)
    def forward(self, x):
        return self.head(self.body(x))

class Odd(Plain):
    "Does something on rank 1 from its 20th iteration on."
    calls = 0
    def forward(self, x):
        Odd.calls += x.device.type != "meta"
        if Odd.calls >= 20 and os.environ.get("RANK") == "1":
            self.misbehave()
        return super().forward(x)

class Sleeps(Odd):
    def misbehave(self):
        time.sleep(600)

class Stops(Odd):
    def misbehave(self):
        os.kill(os.getpid(), signal.SIGSTOP)

class Slow(Odd):
    def misbehave(self):
        time.sleep(0.02)
"""


def write_networks(where: Path) -> Path:
    """The module ``survivors`` of those models."""
    (where / "survivors.py").write_text(NETWORKS)
    return where


def start(where: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """``paradl-bench ARGUMENTS`` in a process group of its own, as a job step is."""
    return subprocess.Popen(
        [sys.executable, "-m", "paradl_bench", *arguments],
        cwd=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(variables or {})},
    )


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def signal_all(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal a command and its ranks, which are groups of their own: what Slurm does to a job step's processes."""
    for pid in (*children(process.pid), process.pid):
        os.kill(pid, number)


def wait_for(condition: Callable[[], bool], limit_s: float = 120) -> None:
    """Wait until something holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
