"""Every attempt at a command, as the scripts note them, and what all attempts have cost.

A command's last note says what became of it. What was spent counts its attempts before too: those that a time limit or
a requeue ended, and those whose results were made anew. One that was killed could not note its end: how long it took is
known to Slurm's accounting alone, where that is kept.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_whole
from paradl_bench.slurm.jobs.plan import Plan
from paradl_bench.slurm.progress import Note

_ANSWER_S = 60.0


class Attempt(NamedTuple):
    """One start of a command.

    Attributes:
        seconds: None where its end was not noted: it was killed, or runs still.
    """

    job: str
    nodes: int
    begun_utc: str
    seconds: int | None


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What measuring has cost so far.

    Attributes:
        attempts: at all commands. cut_short: of these, those whose end nobody noted.
        source: ``sacct`` (all of the jobs), ``notes`` (of the attempts that ended).
    """

    node_s: float = 0.0
    attempts: int = 0
    cut_short: int = 0
    source: str = "notes"


def read_attempts(output: Path, mark: str) -> tuple[Attempt, ...]:
    """Attempts at a command, the first one first; none where nothing is noted. A line that was torn is passed over."""
    try:
        lines = read_whole(output / "state" / f"{mark}.attempts").split(b"\n")
    except UserError:
        return ()
    attempts: list[Attempt] = []
    for line in filter(None, lines):
        try:
            note = msgspec.json.decode(line, type=Note)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if note.exit_code is None:
            attempts.append(Attempt(note.job, note.nodes, note.noted_utc, None))
        elif attempts and attempts[-1].job == note.job and attempts[-1].seconds is None:
            attempts[-1] = attempts[-1]._replace(seconds=note.seconds)
    return tuple(attempts)


def spent_on(output: Path, plan: Plan) -> Spent:
    """Node-seconds of all attempts at commands that measure: by Slurm's accounting where it knows all their jobs."""
    marks = [task.mark for job in plan.jobs if job.use != "analysis" for task in job.tasks]
    attempts = [attempt for mark in marks for attempt in read_attempts(output, mark)]
    noted = float(sum((attempt.seconds or 0) * attempt.nodes for attempt in attempts))
    cut_short = sum(attempt.seconds is None for attempt in attempts)
    accounted = _accounted_node_s({attempt.job for attempt in attempts})
    node_s, source = (noted, "notes") if accounted is None else (accounted, "sacct")
    return Spent(node_s=node_s, attempts=len(attempts), cut_short=cut_short, source=source)


def _accounted_node_s(jobs: Iterable[str]) -> float | None:
    """What sacct says of jobs, each start of one that was requeued included; None where it does not know them all."""
    asked, program = sorted(jobs), shutil.which("sacct")
    if not asked or program is None:
        return None
    command = [program, "--noheader", "--parsable2", "--allocations", "--duplicates"]
    command += ["--format=JobID,ElapsedRaw,NNodes", f"--jobs={','.join(asked)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.split("|") for line in done.stdout.splitlines()]
    if {row[0] for row in rows} < set(asked):
        return None
    if not all(len(row) == 3 and row[1].isdigit() and row[2].isdigit() for row in rows):
        return None
    return float(sum(int(seconds) * int(nodes) for job, seconds, nodes in rows if job in asked))
