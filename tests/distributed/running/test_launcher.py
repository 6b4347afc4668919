"""Ranks that join: through this program's launcher, torchrun and srun's variables; and what ends them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.ranks.environment import ALLOCATOR_VARIABLES
from paradl_bench.ranks.launcher import launch_ranks

pytestmark = pytest.mark.distributed

# A program as a user's command is one: errors are one line on stderr, and the exit code says whose they are.
PROGRAM = """
import json, os, time
import click
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.core.terminal.command_line import run_command

@click.command()
@click.argument("what")
@click.argument("directory")
@click.option("--backend", default="gloo")
@click.option("--device", default="cpu")
@click.option("--launcher")
@click.option("--timeout", default=60.0)
def main(what, directory, backend, device, launcher, timeout):
    with join_ranks(backend, device, timeout_s=timeout, launcher=launcher) as context:
        import torch, torch.distributed as dist
        total = torch.tensor([float(context.rank)])
        if backend != "none":
            dist.all_reduce(total)
        ranks, first = context.gather(context.rank, int), context.share(f"from {context.rank}", str)
        if what == "group":
            own = context.first(2)
            if context.rank == 0:
                dist.all_reduce(total, group=own.group)
            time.sleep(600)
        if what == "hang" and context.rank == 1:
            time.sleep(600)
        if what == "raise" and context.rank == 1:
            raise ValueError("no such thing")
        context.barrier()
        found = dict(rank=context.rank, ranks=context.ranks, launcher=context.launcher, total=total.item(),
            gathered=ranks, first=first, core=context.core, cores=sorted(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(), settings=context.settings, backend=context.backend,
            trim=os.environ["MALLOC_TRIM_THRESHOLD_"])
        open(f"{directory}/{context.rank}.json", "w").write(json.dumps(found))

if __name__ == "__main__":
    run_command(main, "paradl-bench")
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "ranks_of_test.py"
    path.write_text(PROGRAM)
    return str(path)


def launch(program: str, what: str, *options: str, ranks: int = 2, timeout_s: float = 120) -> list[dict[str, object]]:
    where = Path(program).parent
    launch_ranks([sys.executable, program, what, str(where), *options], ranks=ranks, device="cpu", timeout_s=timeout_s)
    return read(where, ranks)


def read(where: Path, ranks: int) -> list[dict[str, object]]:
    return [json.loads((where / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.own_interpreters
def test_ranks_join_with_a_core_and_a_thread_each(program: str) -> None:
    found = launch(program, "join")
    cores = sorted(os.sched_getaffinity(0))
    for rank, own in enumerate(found):
        assert (own["rank"], own["ranks"], own["launcher"], own["backend"]) == (rank, 2, "own", "gloo")
        assert (own["total"], own["gathered"], own["first"]) == (1.0, [0, 1], "from 0")
        assert own["core"] == cores[rank % len(cores)]
        assert (own["cores"], own["threads"]) == ([own["core"]], 1)
        policy = "SCHED_BATCH" if len(found) <= len(cores) else "SCHED_OTHER"
        assert own["settings"] == {"pinned": "one core a rank", "scheduling": policy}


def test_ranks_that_share_cores_may_take_them_from_each_other(program: str) -> None:
    ranks = len(os.sched_getaffinity(0)) + 1
    assert {own["settings"]["scheduling"] for own in launch(program, "join", ranks=ranks)} == {"SCHED_OTHER"}


def test_one_rank_needs_no_process_group(program: str) -> None:
    (found,) = launch(program, "join", "--backend", "none", ranks=1)
    assert (found["gathered"], found["first"], found["threads"]) == ([0], "from 0", 1)
    with pytest.raises(UserError, match="2 ranks were started, but this run takes one"):
        launch(program, "join", "--backend", "none")


def test_a_lost_connection_is_not_blamed_for_an_exception(program: str) -> None:
    with pytest.raises(WorkError, match=r"rank 1 ended with exit code 1.*ValueError: no such thing$"):
        launch(program, "raise")


def test_a_rank_that_hangs_is_noticed_by_its_peers_collective(program: str) -> None:
    with pytest.raises(WorkError, match=r"rank 0 ended with exit code 3.*lost the connection to another rank"):
        launch(program, "hang", "--timeout", "2")


@pytest.mark.slow
def test_a_subgroup_waits_no_longer_than_the_whole_group(program: str) -> None:
    """torch's own limit for such a group is half an hour."""
    with pytest.raises(WorkError, match=r"rank 0 ended with exit code 3.*lost the connection.*4000ms"):
        launch(program, "group", "--timeout", "4", ranks=3)


def test_ranks_still_running_at_the_limit_show_their_stacks(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    # Enough to load torch with other work beside it; the ranks would sleep for ten minutes.
    with pytest.raises(WorkError, match=r"rank 0, 1 did not end within 30 s .*rank 0 is in .*, rank 1 is in main \("):
        launch(program, "hang", "--timeout", "600", timeout_s=30)
    assert "rank 1 did not end in time; stacks of its threads:" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "mpi"], "backend mpi is not built into this torch; present are gloo"),
        (["--device", "cuda"], "device cuda: torch sees no GPU here"),
    ],
)
def test_what_a_rank_cannot_have_is_a_users_mistake(program: str, options: list[str], message: str) -> None:
    import torch

    if "mpi" in options and torch.distributed.is_mpi_available():
        pytest.skip("this torch has mpi")
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=message):
        launch(program, "join", *options, ranks=1)


def test_torchrun(program: str) -> None:
    where = Path(program).parent
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, program, "join", str(where)], check=True, capture_output=True, timeout=120)
    for rank, own in enumerate(read(where, 2)):
        assert (own["rank"], own["ranks"], own["launcher"], own["total"]) == (rank, 2, "torchrun", 1.0)
        assert (own["threads"], own["trim"]) == (1, ALLOCATOR_VARIABLES["MALLOC_TRIM_THRESHOLD_"])


def srun(program: str, port: int | None, *, tasks: int = 2) -> list[subprocess.Popen[str]]:
    """Start tasks as srun does, beside an scontrol that names this host first."""
    where = Path(program).parent
    (where / "bin").mkdir(exist_ok=True)
    scontrol = where / "bin" / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "127.0.0.1\\nnode2\\n"\n')
    scontrol.chmod(0o755)
    shared = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    shared |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(tasks)}
    shared |= {"SLURM_JOB_NODELIST": "node[1-2]", "PATH": f"{where / 'bin'}:{os.environ['PATH']}"}
    if port is not None:
        shared["MASTER_PORT"] = str(port)
    command = [sys.executable, program, "join", str(where), "--launcher", "srun"]
    return [
        subprocess.Popen(
            command,
            env=shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(tasks)
    ]


def test_srun(program: str) -> None:
    tasks = srun(program, None)
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], errors
    for rank, own in enumerate(read(Path(program).parent, 2)):
        assert (own["rank"], own["ranks"], own["launcher"], own["total"]) == (rank, 2, "srun", 1.0)
        assert own["trim"] == ALLOCATOR_VARIABLES["MALLOC_TRIM_THRESHOLD_"]


def test_a_port_in_use_is_a_users_mistake(program: str) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (task,) = srun(program, port, tasks=1)
        _, errors = task.communicate(timeout=120)
    assert task.returncode == 2
    assert f"error: port {port} cannot be used (address already in use); unset MASTER_PORT" in errors.splitlines()[-1]
