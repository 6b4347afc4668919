"""Handing the chain to Slurm: sbatch with dependencies, each number kept as soon as it is known.

Submitting again goes on: what is done is left alone, what waits or runs in the queue is waited for, and of an array
only the tasks that are not done are started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.slurm.jobs.plan import Plan, PlannedJob, Submitted, read_submitted, script_path, write_submitted
from paradl_bench.slurm.progress import unfinished

_ANSWER_S = 120.0
_POLL_S = 5.0
_UNREACHABLE = ("unable to contact", "communication", "timed out", "connection", "configuration source", "try again")
"""In sbatch's messages: Slurm is at fault, and not who asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was done with a job: submitted now, in the queue already, or needless since all is done."""

    job: str
    job_id: int | None
    words: str


def submit(output: Path, plan: Plan, *, now_utc: str, wait: bool) -> Iterator[Step]:
    """Submit what is not done, job by job.

    Args:
        output: absolute; holds the plan's scripts.
        wait: until the last job has ended.

    Raises:
        UserError: Slurm refuses a job (its message in one line), or another submission of this calibration runs.
        WorkError: Slurm is not here or does not answer; or, with ``wait``, the last job did not end well.
    """
    _program("sbatch")
    with _alone(output):
        known, queued = read_submitted(output), _queue(output)
        going: dict[str, int] = {}
        for job in plan.jobs:
            pending, waits_for = unfinished(output, job), [*job.after_ok, *job.after_any]
            if job.name in queued:
                going[job.name] = queued[job.name]
                yield Step(job=job.name, job_id=queued[job.name], words="is in the queue already")
                if wait and job is plan.jobs[-1]:
                    _wait_for_end(output, job)
                continue
            if not pending and not any(name in going for name in waits_for):
                yield Step(job=job.name, job_id=None, words="is done")
                continue
            # What was measured anew is fitted anew, all of it.
            tasks = pending if job.array else tuple(range(len(job.tasks)))
            command = [*_options(job, tasks, going), str(script_path(output, job.name))]
            last = wait and job is plan.jobs[-1]
            with _sbatch(command, wait=last) as job_id:
                going[job.name] = job_id
                known[job.name] = Submitted(job_id=job_id, tasks=tasks, submitted_utc=now_utc)
                write_submitted(output, known)
                part = f", {len(tasks)} of {len(job.tasks)} tasks" if len(tasks) < len(job.tasks) else ""
                yield Step(job=job.name, job_id=job_id, words=f"is submitted{part}")


def _wait_for_end(output: Path, job: PlannedJob) -> None:
    """Wait for a job that an earlier submission has left in the queue."""
    while job.name in _queue(output):
        time.sleep(_POLL_S)
    if unfinished(output, job):
        raise WorkError(f"job {job.name} has left the queue and failed; the summary says what is missing")


def _options(job: PlannedJob, tasks: tuple[int, ...], going: dict[str, int]) -> list[str]:
    options = []
    if job.array and len(tasks) < len(job.tasks):
        limit = f"%{job.array_limit}" if job.array_limit else ""
        options.append(f"--array={','.join(map(str, tasks))}{limit}")
    waits = [
        ":".join((kind, *(str(going[name]) for name in names if name in going)))
        for kind, names in (("afterok", job.after_ok), ("afterany", job.after_any))
        if any(name in going for name in names)
    ]
    return [*options, f"--dependency={','.join(waits)}"] if waits else options


@contextlib.contextmanager
def _sbatch(arguments: list[str], *, wait: bool) -> Iterator[int]:
    """Submit; the number is there while the job may wait or run, and with ``wait`` the context ends with the job."""
    command = [_program("sbatch"), "--parsable", *(["--wait"] if wait else []), *arguments]
    try:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise _not_started(command[0], error) from error
    with started as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # As "123" or "123;cluster"; with --wait it is printed long before sbatch ends.
        number = process.stdout.readline().strip().partition(";")[0]
        if not number.isdigit():
            raise _refusal(arguments[-1], process.stderr.read())
        try:
            yield int(number)
            code = process.wait()
        except BaseException:
            # Who waits for sbatch would be kept from ending until the whole chain has; the job goes on.
            process.kill()
            raise
    if code:
        raise WorkError(f"job {number} ended with exit code {code}; the summary says what is missing")


def _not_started(program: str, error: OSError) -> WorkError:
    return WorkError(f"{program} could not be started: {error}; what was submitted before is kept")


def _refusal(script: str, message: str) -> UserError | WorkError:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in message.splitlines()]
    said = "; ".join(dict.fromkeys(line for line in lines if line)) or "nothing"
    if any(mark in said.lower() for mark in _UNREACHABLE):
        return WorkError(f"sbatch {script}: Slurm does not answer: {said}; what was submitted before is kept")
    return UserError(
        f"sbatch refuses {script}: {said}; correct the site file and submit again: what was submitted before is kept"
    )


def _queue(output: Path) -> dict[str, int]:
    """Numbers of this calibration's jobs that wait or run, by the job's name; told by the scripts' comment."""
    command = [_program("squeue"), "--noheader", "--user", str(os.getuid()), "--format=%F|%j|%k"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise WorkError(f"squeue did not answer within {_ANSWER_S:g} s") from error
    except OSError as error:
        raise _not_started(command[0], error) from error
    if done.returncode:
        raise WorkError(f"squeue failed: {' '.join(done.stderr.split())}")
    rows = (line.split("|", 2) for line in done.stdout.splitlines())
    return {row[1].removeprefix("paradl-"): int(row[0]) for row in rows if row[2].strip() == str(output)}


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise WorkError(f"{name} is not on PATH: submit where Slurm is, with the same command")
    return path


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Keep a second submission of the same calibration out: it would start everything twice."""
    folder = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{output} is being submitted by another command; wait for it") from None
        yield
    finally:
        os.close(folder)
