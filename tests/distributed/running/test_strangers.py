"""Another user of the host, who tries to join a run, to read where its ranks meet, and to talk to its sockets."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from host_network import free_ports
from strangers import JOINS_AS_RANK_1, PRIES, WRITES_KEYS, network_of_its_own, stranger

from paradl_bench.core.errors import WorkError
from paradl_bench.ranks.launcher import launch_ranks

pytestmark = pytest.mark.distributed

TRAIN = ["train", "squeezenet1_0", "--strategy", "d2", "--batch", "8", "--input-shape", "3x64x64", "--iterations", "4"]


def command(output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "paradl_bench", *TRAIN, "-o", str(output), *options]


def task(output: Path, rank: int, port: int, secret: str = "a secret of these tests alone") -> subprocess.Popen[str]:
    """A rank as srun starts it."""
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PARADL_SECRET": secret}
    return subprocess.Popen(
        command(output, "--launcher", "srun"),
        env=os.environ | place | where,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_to_fail(ranks: list[subprocess.Popen[str]], limit_s: float = 240) -> subprocess.Popen[str] | None:
    """Wait for all ranks; as ``srun --kill-on-bad-exit``, end the others with the first that fails."""
    end = time.monotonic() + limit_s
    while (failed := next((rank for rank in ranks if rank.poll()), None)) is None:
        if all(rank.poll() == 0 for rank in ranks):
            return None
        assert time.monotonic() < end
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
    return failed


def until_it_listens(port: int) -> None:
    while True:
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


def test_a_stranger_that_joins_as_rank_1_runs_nothing(tmp_path: Path) -> None:
    """torch's own way to join: it gets in where ranks meet without a secret, and has rank 0 unpickle what it sends."""
    (port,), marker = free_ports(1), Path("/tmp") / f"paradl-stranger-{os.getpid()}"
    first = task(tmp_path / "out", 0, port)
    until_it_listens(port)
    with stranger(JOINS_AS_RANK_1, port, marker):
        time.sleep(3)
        second = task(tmp_path / "out", 1, port)
        failed = first_to_fail([first, second])
    assert not marker.exists()
    # The real rank 1 comes in, or what the stranger did in its place ends the run: rank 0 sees that it is not of the
    # run or loses its connection, or rank 1 finds its place taken. Which is first depends on the machine.
    if failed is not None:
        errors = failed.communicate()[1]
        assert failed.returncode == 3, errors
        assert "Traceback" not in errors
        assert errors.splitlines()[-1].startswith("paradl-bench: error: "), errors


def test_foreign_keys_in_the_store_end_the_run(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    first = task(tmp_path / "out", 0, port)
    until_it_listens(port)
    with stranger(WRITES_KEYS, port):
        _, errors = first.communicate(timeout=240)
    assert first.returncode == 3
    assert "error: a process that is not of this run wrote where its ranks meet" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_ranks_with_different_secrets_do_not_meet(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    both = [task(tmp_path / "out", rank, port, f"the secret of rank {rank}") for rank in range(2)]
    errors = [started.communicate(timeout=240)[1] for started in both]
    assert {started.returncode for started in both} == {3}
    assert any("export the same PARADL_SECRET for all of them" in error for error in errors)


@pytest.mark.slow
def test_a_stranger_cannot_enter_ranks_of_our_own_launcher(tmp_path: Path) -> None:
    with network_of_its_own(), stranger(PRIES, 30) as prying:
        run = subprocess.run(command(tmp_path / "out"), capture_output=True, text=True, timeout=240)
        assert prying.stdout is not None
        assert json.loads(prying.stdout.readline()) == []
    # Its calls are not taken for a rank's; one that comes first and in a rank's place ends the run in a line. Whether
    # gloo loses it first or ranks see what it says depends on the machine; both lines name a foreign process.
    if run.returncode:
        assert run.returncode == 3, run.stderr
        assert re.search("process (that is not|outside) of this run", run.stderr.splitlines()[-1]), run.stderr


PROGRAM = """
import os, pickle, sys
import click
from paradl_bench.ranks.groups.proof import prove_ranks, use_run_key
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.core.terminal.command_line import run_command

@click.command()
@click.argument("what")
def main(what):
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        import torch.distributed as dist
        if what == "key" and context.rank == 1:
            use_run_key(bytes(32))
        context.first(2) if context.ranks > 2 else prove_ranks(dist.group.WORLD)
        if what == "pickle":
            dist.all_gather_object([None] * 2, ["plain", 1, {"a": 2.5}])
            dist.all_gather_object([None] * 2, os.getpid)
        if what == "type":
            context.gather("text", int)

if __name__ == "__main__":
    run_command(main, "paradl-bench")
"""


@pytest.mark.parametrize(
    ("what", "ranks", "message"),
    [
        ("key", 2, "a process outside of this run answered instead of rank"),
        ("key", 3, "a process outside of this run answered instead of rank"),
        ("pickle", 2, "another rank sent torch posix.getpid, and this program unpickles plain values alone"),
        ("type", 2, "a rank sent what is no <class 'int'>"),
    ],
)
def test_ranks_prove_themselves_and_send_no_code(tmp_path: Path, what: str, ranks: int, message: str) -> None:
    program = tmp_path / "ranks_of_test.py"
    program.write_text(PROGRAM)
    with pytest.raises(WorkError, match=message):
        launch_ranks([sys.executable, str(program), what], ranks=ranks, device="cpu", timeout_s=120)
