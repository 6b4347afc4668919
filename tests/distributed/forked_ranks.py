"""Ranks that are forked from a process which has imported torch: importing it takes a core four seconds, each time.

Two processes serve them, even ranks and odd ones: the order of a set differs between two interpreters, and ranks that
took it for an order of their own would wait for each other. Run as a program, this is such a process.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any
from unittest import mock

from paradl_bench.network.models.torchvision_import import fit_torchvision
from paradl_bench.ranks import launcher
from paradl_bench.ranks.environment import ALLOCATOR_VARIABLES
from paradl_bench.ranks.rank_place import LAUNCHER_PID

IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "paradl_bench.cli",
    "paradl_bench.commands.train",
    "paradl_bench.commands.layers",
    "paradl_bench.commands.collectives",
    "paradl_bench.measure.training.trainer",
    "paradl_bench.measure.proof.proving",
    "paradl_bench.network.models.transformer_families",
    "paradl_bench.strategies.nesting.parallel",
    "hypothesis",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("bert", "gpt2", "t5", "llama", "mixtral")),
)
FREE = 500
"""Descriptors from here on are in nobody's way."""
MESSAGE_BYTES, MOST_DESCRIPTORS = 1 << 18, 64
_own_start = launcher._start


class ForkedRank:
    """A rank as :class:`subprocess.Popen` has it. Its server collects it: until then its number stays its own."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class RankServer:
    """A process that forks ranks, and the connection to it; it ends with that."""

    def __init__(self) -> None:
        self.channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(other.fileno())],
                env={**os.environ, **ALLOCATOR_VARIABLES, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        socket.send_fds(self.channel, [json.dumps(request).encode()], descriptors)
        answer: dict[str, Any] = json.loads(self.channel.recv(MESSAGE_BYTES))
        return answer

    def start(
        self, command: Sequence[str], variables: dict[str, str], descriptors: Sequence[int], out: int, err: int
    ) -> ForkedRank:
        request = {
            "words": list(command[1:]),
            "variables": {**variables, LAUNCHER_PID: str(self.process.pid)},
            "where": os.getcwd(),
            "targets": [1, 2, *descriptors],
        }
        return ForkedRank(self, self.ask(request, [out, err, *descriptors])["pid"])

    def close(self) -> None:
        self.channel.close()
        self.process.wait()


class RankServers:
    """Two servers, begun when the first rank is asked for."""

    def __init__(self) -> None:
        self.servers: list[RankServer] = []

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, ranks of :func:`~paradl_bench.ranks.launcher.launch_ranks` are forked, unless nodes are emulated."""
        with mock.patch.object(launcher, "_start", self._start):
            yield

    @contextlib.contextmanager
    def out_of_use(self) -> Iterator[None]:
        """Inside of that, ranks are started as a user's are."""
        with mock.patch.object(launcher, "_start", _own_start):
            yield

    def _start(
        self,
        command: Sequence[str],
        rank: int,
        variables: dict[str, str],
        descriptors: tuple[int, ...],
        stderr: IO[bytes],
    ) -> Any:
        # A rank of an emulated node is started within its network, where the servers are not.
        if launcher.NODE_NAME in variables or command[0] != sys.executable or command[1] == "-c":
            return _own_start(command, rank, variables, descriptors, stderr)
        while len(self.servers) < 2:
            self.servers.append(RankServer())
        out = sys.stdout.fileno() if rank == 0 else stderr.fileno()
        forked = self.servers[rank % 2].start(command, variables, descriptors, out, stderr.fileno())
        return launcher._Started(rank, forked, stderr)  # type: ignore[arg-type]

    def close(self) -> None:
        for server in self.servers:
            server.close()


def serve(channel: socket.socket) -> dict[str, Any]:
    """Fork ranks until the connection ends; returns, on each of them, what it was asked to run."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        request: dict[str, Any] = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if not pid:
                channel.close()
                become(request, descriptors)
                return request
            answer = {"pid": pid}
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(json.dumps(answer).encode())


def become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Take the descriptors, variables and directory of the rank that was asked for."""
    os.setpgid(0, 0)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for source, target in zip(moved, request["targets"], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["where"])


def run(words: Sequence[str]) -> None:
    """A program as ``python WORDS`` runs it."""
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    words = [word for word in words if word != "-P"]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fit_torchvision()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    run(asked["words"])
