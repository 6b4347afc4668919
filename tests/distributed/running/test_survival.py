"""What ends a measurement from outside: time limits, ranks that are killed or hang, two writers, a full disk."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from survival_program import children, signal_all, start, wait_for, write_networks

from paradl_bench.records.measurement import COLLECTIVES_FILE, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations

pytestmark = [pytest.mark.distributed, pytest.mark.own_interpreters, pytest.mark.long(minutes=3)]

SWEEP = ("collectives", "--ranks", "2", "--ops", "all_reduce", "--sizes", "1K,64K", "--point-seconds", "0.005")


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    return write_networks(tmp_path)


def train(model: str, *options: str) -> tuple[str, ...]:
    return ("train", f"survivors:{model}", "--strategy", "d2", "--batch", "4", "--no-verify", *options, "-o", "run")


def holds_rows(path: Path) -> bool:
    return path.exists() and path.read_bytes().endswith(b"\n")


def points(directory: Path) -> Counter[tuple[str, int, int]]:
    found = read_records(directory, COLLECTIVES_FILE, CollectiveSamples)
    return Counter((record.operation, record.message_bytes, record.block) for record in found)


def test_a_time_limit_keeps_measurements_and_says_how_to_resume(workplace: Path) -> None:
    """SIGTERM to every process of a step, as Slurm sends it; SIGKILL would follow."""
    command = (*SWEEP, "--blocks", "3000", "-o", "sweep")
    process = start(workplace, *command)
    wait_for(lambda: holds_rows(workplace / "sweep" / COLLECTIVES_FILE))
    # Two seconds lie between two writes: what comes now is in rank 0's memory alone.
    written = points(workplace / "sweep").total()
    time.sleep(1)
    signal_all(process, signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3, errors
    last = errors.strip().splitlines()[-1]
    assert last == (
        "paradl-bench: error: ended by SIGTERM (time limit?); what was measured is kept: run the same command"
        f" again to go on: paradl-bench {' '.join(command)}"
    )
    kept = points(workplace / "sweep")
    assert set(kept.values()) == {1}
    assert kept.total() > written
    assert not read_manifest(workplace / "sweep").complete


def test_after_a_kill_of_everything_nothing_finished_is_repeated(workplace: Path) -> None:
    command = train("Plain", "--iterations", "3000")
    process = start(workplace, *command)
    wait_for(lambda: holds_rows(workplace / "run" / TRAINING_FILE))
    signal_all(process, signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    before = (workplace / "run" / TRAINING_FILE).read_bytes()
    again = start(workplace, *command)
    wait_for(lambda: len((workplace / "run" / TRAINING_FILE).read_bytes()) > len(before))
    again.terminate()
    _, errors = again.communicate(timeout=30)
    assert again.returncode == 3, errors
    assert "iterations measured before" in errors
    assert (workplace / "run" / TRAINING_FILE).read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    records = read_records(workplace / "run", TRAINING_FILE, TrainingIterations)
    assert set(Counter((record.rank, record.first_iteration) for record in records).values()) == {1}


def test_a_rank_killed_in_a_collective_ends_the_run_named(workplace: Path) -> None:
    command = (*SWEEP, "--blocks", "3000", "-o", "sweep")
    process = start(workplace, *command)
    wait_for(lambda: holds_rows(workplace / "sweep" / COLLECTIVES_FILE))
    first, second = children(process.pid)
    os.kill(second, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert re.match(
        r"paradl-bench: error: rank 1 was killed by signal 9 \(SIGKILL\); the other ranks were ended.*"
        r"; to go on: paradl-bench collectives --ranks 2 ",
        errors.strip().splitlines()[-1],
    )
    assert not Path(f"/proc/{first}").exists()
    assert set(points(workplace / "sweep").values()) == {1}


def test_a_hanging_rank_is_ended_with_every_ranks_stack(workplace: Path) -> None:
    result = run_in_process(workplace, *train("Sleeps", "--hang-timeout", "8"))
    assert result.returncode == 3
    last = result.stderr.strip().splitlines()[-1]
    assert "no progress for 8 s (--hang-timeout): rank 0 is in " in last
    assert "rank 1 is in misbehave (survivors.py:" in last
    assert "to go on: paradl-bench train survivors:Sleeps" in last
    for rank in (0, 1):
        assert f"rank {rank} made no progress; stacks of its threads:\nCurrent thread" in result.stderr
    assert len(read_records(workplace / "run", TRAINING_FILE, TrainingIterations)) == 2


def test_a_rank_that_is_stopped_is_named_as_such(workplace: Path) -> None:
    result = run_in_process(workplace, *train("Stops", "--hang-timeout", "8"))
    assert result.returncode == 3
    assert "rank 1 is stopped (SIGSTOP): it cannot show its stack" in result.stderr.strip().splitlines()[-1]
    assert "rank 0 made no progress; stacks of its threads:\nCurrent thread" in result.stderr


@pytest.mark.slow
def test_under_torchrun_a_rank_watches_over_itself(workplace: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "paradl_bench", *train("Sleeps", "--hang-timeout", "8")]
    result = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 1  # torchrun's own
    for rank in (0, 1):
        assert re.search(rf"rank {rank} of 2 on \S+: no progress for 8 s; stacks of its threads:", result.stderr)
    assert "in misbehave" in result.stderr
    assert "(--hang-timeout); a rank that shows no stack is stopped or gone" in result.stderr


def test_of_two_writers_one_is_refused_and_names_the_other(workplace: Path) -> None:
    command = (*SWEEP, "--blocks", "3000", "-o", "sweep")
    first = start(workplace, *command)
    wait_for(lambda: (workplace / "sweep" / "manifest.json").exists())
    second = run_in_process(workplace, *command)
    assert second.returncode == 2
    assert re.search(r"sweep is being written by process \d+ on \S+: wait for it, or give another", second.stderr)
    first.terminate()
    first.communicate(timeout=30)
    assert set(points(workplace / "sweep").values()) <= {1}


def test_of_two_array_tasks_that_start_together_one_writes(workplace: Path) -> None:
    """Neither finds a directory: the ranks themselves have to settle it."""
    tasks = [start(workplace, *SWEEP, "--blocks", "2", "-o", "sweep") for _ in range(2)]
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    codes = sorted(task.returncode for task in tasks)
    # The second may come when the first has finished: then it finds all measured.
    assert codes in ([0, 2], [0, 0]), errors
    assert points(workplace / "sweep") == Counter({("all_reduce", s, b): 1 for s in (1024, 65536) for b in (0, 1)})
    assert read_manifest(workplace / "sweep").complete
    assert not (workplace / "sweep" / ".lock").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(where)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting takes a privileged user; a limit on the file's size stands in for it in another test")
    yield where
    subprocess.run(["umount", str(where)], check=True)


FILE_LIMIT = r"File too large; raise the limit on the size of a file \(ulimit -f\)"


def check_full(result: subprocess.CompletedProcess[str], directory: Path, why: str) -> None:
    assert result.returncode == 3, result.stderr
    lines = result.stderr.strip().splitlines()
    assert re.search(
        rf"error: rank 0 ended with exit code 3; .*cannot (append to|write) .*: {why}; to go on: ", lines[-1]
    )
    records = read_records(directory, TRAINING_FILE, TrainingIterations)
    assert (directory / TRAINING_FILE).read_bytes().endswith(b"\n")
    assert records


def test_a_full_disk_is_one_line_and_keeps_measurements(workplace: Path, small_disk: Path) -> None:
    result = run_in_process(workplace, *train("Plain", "--iterations", "3000")[:-1], str(small_disk / "run"))
    check_full(
        result,
        small_disk / "run",
        "No space left on device; free some there, or give a place on another disk with -o",
    )


def test_a_file_size_limit_acts_like_a_full_disk(workplace: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "paradl_bench", *train("Plain", "--iterations", "3000")],
        cwd=workplace,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard)),
    )
    _, errors = process.communicate(timeout=120)
    check_full(subprocess.CompletedProcess([], process.returncode, "", errors), workplace / "run", FILE_LIMIT)
