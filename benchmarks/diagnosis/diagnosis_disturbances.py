"""What runs beside a training on purpose: processes on the cores of its ranks, and traffic on a link of its nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from diagnosis_cases import Beside

from paradl_bench.ranks.emulated_nodes.layout import NodeLayout

_BUSY = "while True: pass"
_TRAFFIC = """
import socket, sys, time
address, burst_bytes, period_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
# SO_SNDBUFFORCE, in bytes: a burst waits in the link's queue, not here.
sender.setsockopt(socket.SOL_SOCKET, 32, 4 * burst_bytes)
while True:
    begin = time.monotonic()
    for _ in range(burst_bytes // 8000):
        sender.sendto(bytes(8000), (address, 9))
    time.sleep(max(0.0, begin + period_s - time.monotonic()))
"""
"""Bursts of datagrams to a port that nobody reads."""
BURST_BYTES, PERIOD_S = 60_000_000, 1.5


@contextlib.contextmanager
def disturbed(training: subprocess.Popen[bytes], kind: Beside) -> Iterator[None]:
    """Disturb a training of two ranks for as long as the body lasts, from when they have taken their cores."""
    commands: list[tuple[list[str], set[int]]] = []
    ranks = _pinned_ranks(training) if kind else {}
    if kind == "traffic" and ranks:
        address = NodeLayout(nodes=2, ranks_per_node=1, link_bytes_per_s=1.0).address(1)
        entered = [str(shutil.which("nsenter")), "--net", "--target", str(ranks[0]), sys.executable, "-c", _TRAFFIC]
        commands.append(([*entered, address, str(BURST_BYTES), str(PERIOD_S)], os.sched_getaffinity(0)))
    elif kind:
        slowed = [pid for rank, pid in ranks.items() if rank == 1 or kind == "processes beside all ranks"]
        commands += [([sys.executable, "-c", _BUSY], os.sched_getaffinity(pid)) for pid in slowed]
    processes = []
    try:
        for command, cores in commands:
            processes.append(subprocess.Popen(command))
            os.sched_setaffinity(processes[-1].pid, cores)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _pinned_ranks(training: subprocess.Popen[bytes]) -> dict[int, int]:
    """Processes by rank, once each has taken its core; none where the training ended before."""
    while training.poll() is None:
        with contextlib.suppress(OSError):
            found = _ranks(training.pid)
            if len(found) == 2 and all(len(os.sched_getaffinity(pid)) == 1 for pid in found.values()):
                return found
        time.sleep(0.05)
    return {}


def _ranks(launcher: int) -> dict[int, int]:
    found = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        variables = dict(
            entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
        )
        if "RANK" in variables:
            found[int(variables["RANK"])] = pid
    return found
