"""What lies in a calibration's folder beside its measurements: the plan, the scripts, and which jobs were submitted.

plan.json        what was asked for, and the jobs that do it
scripts/         one sbatch script a job; one that a user has edited is kept
submitted.json   the id of each job, written as soon as Slurm has given it
state/           what the scripts note of each command, its attempts before the last one included
logs/            what jobs print
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from paradl_bench.core.bounds import Count, Index, Ranks, SchemaVersion, Seconds, WholeSeconds
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import (
    encode_pretty,
    file_name,
    hash_of_file,
    read_json,
    write_bytes_atomically,
    write_text_atomically,
)
from paradl_bench.slurm.jobs.job import Job
from paradl_bench.slurm.jobs.request import CalibrationRequest
from paradl_bench.slurm.jobs.site import Site, Use

SCHEMA_VERSION = 1
PLAN, SUBMITTED = "plan.json", "submitted.json"


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command of a job: its result and mark, as in :class:`~paradl_bench.slurm.jobs.job.Task`."""

    name: str
    mark: str
    nodes: Ranks
    writes: bool
    measurement: bool
    estimate_s: Seconds | None


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as it was written; ``sha256`` of its script tells whether a user has edited that since."""

    name: str
    use: Use
    title: str
    adds: str
    array: bool
    array_limit: Count
    nodes: Ranks
    limit_s: WholeSeconds
    after_ok: tuple[str, ...]
    after_any: tuple[str, ...]
    sha256: str
    tasks: tuple[PlannedTask, ...]

    @property
    def bound_node_s(self) -> float:
        """Node-seconds at most, if all commands take their whole time limit."""
        return float(self.limit_s * self.nodes * (len(self.tasks) if self.array else 1))

    @property
    def estimate_node_s(self) -> float | None:
        """Node-seconds as estimated; None where a command's time is not known."""
        known = [task.estimate_s for task in self.tasks if task.estimate_s is not None]
        return sum(known) * self.nodes if len(known) == len(self.tasks) else None


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A calibration: what was asked for, by which command typed in which folder, and its jobs.

    Attributes:
        basis: of the estimates, in words.
        site: what the measurements share that the site file says.
    """

    schema_version: SchemaVersion
    request: CalibrationRequest
    command_line: tuple[str, ...]
    work: str
    basis: str
    site: dict[str, str] = {}
    jobs: tuple[PlannedJob, ...]


class Submitted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that Slurm has taken: its number, and the indices of an array's tasks."""

    job_id: Index
    tasks: tuple[Index, ...]
    submitted_utc: str


def plan_of(
    request: CalibrationRequest,
    site: Site,
    jobs: Sequence[Job],
    scripts: Mapping[str, str],
    *,
    work: Path,
    command_line: tuple[str, ...],
    basis: str,
    start_s: float,
) -> Plan:
    """The plan of jobs with their scripts, by the job's name; ``start_s``: what one that fits or predicts takes."""
    planned = (
        PlannedJob(
            name=job.name,
            use=job.use,
            title=job.title,
            adds=job.adds,
            array=job.array,
            array_limit=site.array_limit,
            nodes=job.nodes,
            limit_s=site.time_limits.seconds(job.use),
            after_ok=job.after_ok,
            after_any=job.after_any,
            sha256=_digest(scripts[job.name]),
            tasks=tuple(
                PlannedTask(
                    name=task.name,
                    mark=task.mark,
                    nodes=task.nodes,
                    writes=task.writes,
                    measurement=task.is_measurement,
                    estimate_s=task.estimate_s if job.measures else start_s,
                )
                for task in job.tasks
            ),
        )
        for job in jobs
    )
    return Plan(
        schema_version=SCHEMA_VERSION,
        request=request,
        command_line=command_line,
        work=str(work),
        basis=basis,
        site=site.of_measurements,
        jobs=tuple(planned),
    )


def write_plan(output: Path, plan: Plan, scripts: Mapping[str, str], *, force: bool) -> tuple[str, ...]:
    """Write the scripts and the plan; returns the names of jobs whose edited script is kept, unless ``force`` is given.

    Raises:
        UserError: the folder holds something else, or a calibration of another request; or it can't be made.
        WorkError: it can't be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {output}: {error.strerror or error}; give another with -o") from error
    known = read_plan(output) if (output / PLAN).exists() else None
    if known is None and any(output.iterdir()):
        raise UserError(f"{output} is not empty and holds no calibration; give an empty or new folder")
    if known is not None:
        _check_same(output, known, plan)
    written = {job.name: job.sha256 for job in known.jobs} if known else {}
    kept = []
    for name, text in scripts.items():
        path = script_path(output, name)
        ours = (written.get(name), _digest(text))
        if path.exists() and not force and hash_of_file(path) not in ours:
            kept.append(name)
            continue
        write_text_atomically(path, text)
    write_bytes_atomically(output / PLAN, encode_pretty(plan))
    for folder in ("logs", "state"):
        (output / folder).mkdir(exist_ok=True)
    return tuple(kept)


def script_path(output: Path, job: str) -> Path:
    """Where a job's script lies."""
    return output / "scripts" / f"{file_name(job)}.sbatch"


def read_plan(output: Path) -> Plan:
    """The plan in a calibration's folder.

    Raises:
        UserError: there is none, or it can't be read.
    """
    if not (output / PLAN).exists():
        raise UserError(f"{output} holds no calibration: paradl-bench slurm -o DIR writes one")
    plan = read_json(output / PLAN, Plan)
    if plan.schema_version != SCHEMA_VERSION:
        known = f"format {plan.schema_version}, this program reads {SCHEMA_VERSION}"
        raise UserError(f"{output / PLAN} is of {known}; give another folder")
    return plan


def read_submitted(output: Path) -> dict[str, Submitted]:
    """Jobs that were submitted last, by name."""
    path = output / SUBMITTED
    return read_json(path, dict[str, Submitted]) if path.exists() else {}


def write_submitted(output: Path, jobs: Mapping[str, Submitted]) -> None:
    """Replace what is known of submitted jobs."""
    write_bytes_atomically(output / SUBMITTED, encode_pretty(dict(jobs)))


def _check_same(output: Path, known: Plan, asked: Plan) -> None:
    for name in known.request.__struct_fields__:
        was, now = getattr(known.request, name), getattr(asked.request, name)
        if was != now:
            was, now = (",".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in (was, now))
            raise UserError(f"{output} is a calibration with {name} {was}, not {now}; give another folder")
    begun = (output / SUBMITTED).exists() or any((output / "state").glob("*.json"))
    for name, was in known.site.items() if begun else ():
        now = asked.site.get(name, "")
        if was != now:
            raise UserError(
                f"{output} is a calibration with {name} {was or 'none'}, not {now or 'none'} as the site file says;"
                " give another folder"
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
