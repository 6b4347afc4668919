"""How far a calibration has come: of every command whether it is done, and of the rest what became of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Literal

import msgspec

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.storage import read_whole
from paradl_bench.records.measurement import is_complete
from paradl_bench.slurm.jobs.plan import Plan, PlannedJob, PlannedTask

What = Literal["done", "failed", "unfinished", "not started"]
_SIGNALLED = 128
"""What the shell adds to the number of the signal that ended a command."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a script notes of a command; exit code None while it runs, and for good where it was killed."""

    exit_code: int | None
    seconds: int
    nodes: int
    node_list: str
    job: str
    noted_utc: str

    @property
    def ended_by(self) -> str:
        """Name of the signal that ended the command, before it could say so itself; empty where none did."""
        number = (self.exit_code or 0) - _SIGNALLED
        return signal.Signals(number).name if number in set(signal.Signals) else ""


class TaskState(msgspec.Struct, frozen=True, kw_only=True):
    """A command of a job, and what became of it.

    Attributes:
        what: ``unfinished`` where it runs still or was cut short, by a signal too: what it measured is kept.
        log: of the job that ran it last, below the calibration's folder.
    """

    job: str
    index: int
    name: str
    measurement: bool
    what: What
    note: Note | None
    log: str | None

    @property
    def words(self) -> str:
        """What became of it, in words."""
        note = self.note
        if note is None or self.what == "not started":
            return "not started"
        where = f"job {note.job} on {note.node_list}"
        if self.what == "done":
            return f"done in {note.seconds} s ({where})"
        if note.ended_by and self.what == "unfinished":
            return f"ended by {note.ended_by} after {note.seconds} s ({where}); what it measured is kept"
        if self.what == "failed":
            kept = "; what it measured is kept" if self.measurement and note.exit_code == WorkError.exit_code else ""
            return f"failed with exit code {note.exit_code} after {note.seconds} s ({where}){kept}"
        return f"begun and not ended ({where}): it still runs, or was cut short; its measurements are kept"


def states(output: Path, plan: Plan) -> tuple[TaskState, ...]:
    """Every command of every job, in the order of the chain."""
    return tuple(_state(output, job, index, task) for job in plan.jobs for index, task in enumerate(job.tasks))


def unfinished(output: Path, job: PlannedJob) -> tuple[int, ...]:
    """Indices of a job's commands that are not done."""
    states = (_state(output, job, index, task) for index, task in enumerate(job.tasks))
    return tuple(state.index for state in states if state.what != "done")


def _state(output: Path, job: PlannedJob, index: int, task: PlannedTask) -> TaskState:
    note = _note(output / "state" / f"{task.mark}.json")
    what: What = "not started"
    if note is not None:
        cut_short = note.exit_code is None or note.ended_by
        what = "unfinished" if cut_short else "failed" if note.exit_code else "done"
    if what == "done" and not _result_is_there(output, task):
        # Taken away since, or a directory that another command has begun anew.
        what = "unfinished" if task.writes and (output / task.name).exists() else "not started"
    log = None if note is None else f"logs/{job.name}-{note.job}.out"
    return TaskState(
        job=job.name, index=index, name=task.name, measurement=task.measurement, what=what, note=note, log=log
    )


def _note(path: Path) -> Note | None:
    """What is noted; None where nothing is, or where it can't be read, which a rerun mends."""
    try:
        return msgspec.json.decode(read_whole(path), type=Note)
    except (UserError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _result_is_there(output: Path, task: PlannedTask) -> bool:
    path = output / task.name
    if not task.writes:
        return True
    return is_complete(path) if task.measurement else path.exists()
