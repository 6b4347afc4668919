"""The summary of a calibration: what was measured, what is missing and what that costs, and how to go on."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_json
from paradl_bench.core.terminal.printed import in_markdown
from paradl_bench.core.units import counted, format_accuracy
from paradl_bench.measure.machine.node_findings import NODES_NAME, Difference, JobNodes, calendar_lines
from paradl_bench.slurm.attempts import Spent, spent_on
from paradl_bench.slurm.chain import NODES, PROFILE, REPORT
from paradl_bench.slurm.evenness import Evenness, evenness_lines, evenness_of
from paradl_bench.slurm.jobs.plan import Plan, PlannedJob
from paradl_bench.slurm.progress import TaskState, states

_REPORT_FILE = "report.json"
_LAST = "report"
"""The job that writes the summary says nothing of itself."""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """How predictions did against the runs, as ``predict validate`` found."""

    runs: int
    mean_accuracy: float
    interval_coverage: float


class _Scored(msgspec.Struct, frozen=True, kw_only=True):
    score: Accuracy


class _Overall(msgspec.Struct, frozen=True, kw_only=True):
    simulate: _Scored | None = None


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    overall: _Overall


class JobDifferences(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that a job ran on, and in what they differ, as ``doctor`` found.

    Attributes:
        calendars: a line for each node whose calendar is seconds off.
    """

    job: str
    hosts: tuple[str, ...]
    differences: tuple[Difference, ...]
    calendars: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Every command's state, and what follows.

    Attributes:
        done, commands: how many are done, of how many.
        missing: by job, what is not done and what the profile lacks without it.
        estimated_node_s: of all jobs that measure, where every command's time could be estimated.
        go_on: the command that continues.
    """

    done: int
    commands: int
    tasks: tuple[TaskState, ...]
    missing: dict[str, str]
    estimated_node_s: float | None
    spent: Spent
    accuracy: Accuracy | None
    nodes: tuple[JobDifferences, ...]
    evenness: tuple[Evenness, ...]
    go_on: str

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.done == self.commands


def summarise(output: Path, plan: Plan) -> Summary:
    """What became of a calibration's jobs, the report's own left out."""
    tasks = tuple(state for state in states(output, plan) if state.job != _LAST)
    measuring = [job for job in plan.jobs if job.use != "analysis"]
    estimates = [job.estimate_node_s for job in measuring]
    words = [*plan.command_line, *(() if "--submit" in plan.command_line else ("--submit",))]
    return Summary(
        done=sum(state.what == "done" for state in tasks),
        commands=len(tasks),
        tasks=tasks,
        missing={job.name: text for job in plan.jobs if (text := _lack(job, tasks))},
        estimated_node_s=None if None in estimates else sum(estimate for estimate in estimates if estimate is not None),
        spent=spent_on(output, plan),
        accuracy=_accuracy(output / REPORT / _REPORT_FILE),
        nodes=tuple(_nodes(output, tasks)),
        evenness=tuple(evenness_of(output, tasks)),
        go_on=f"cd {shlex.quote(plan.work)} && {shlex.join(words)}",
    )


def _lack(job: PlannedJob, tasks: tuple[TaskState, ...]) -> str:
    """What is not done of a job, and what it would give; empty where all is done."""
    lacking = [state.name for state in tasks if state.job == job.name and state.what != "done"]
    return f"{', '.join(lacking)}; it gives {job.adds}" if lacking else ""


def _accuracy(path: Path) -> Accuracy | None:
    try:
        simulated = read_json(path, _Report).overall.simulate
    except UserError:
        return None
    return simulated.score if simulated else None


def _nodes(output: Path, tasks: tuple[TaskState, ...]) -> Iterator[JobDifferences]:
    for state in tasks:
        if not state.name.startswith(f"{NODES}/"):
            continue
        with contextlib.suppress(UserError):
            job = read_json(output / state.name / NODES_NAME, JobNodes)
            hosts = tuple(node.host for node in job.nodes)
            calendars = tuple(calendar_lines(job.nodes))
            yield JobDifferences(job=state.job, hosts=hosts, differences=job.differences, calendars=calendars)


def markdown(output: Path, plan: Plan, summary: Summary) -> str:
    """The summary for a reader."""
    return "\n".join(_lines(output, plan, summary)) + "\n"


def _lines(output: Path, plan: Plan, summary: Summary) -> Iterator[str]:
    yield f"# Calibration of {', '.join(plan.request.models)}"
    yield ""
    yield f"{summary.done} of {summary.commands} commands are done. {_minutes(summary)}"
    yield ""
    if (output / PROFILE).exists():
        yield f"- profile: `{PROFILE}`; `calibrate show` explains it, and where it is weak"
    if summary.accuracy is not None:
        accuracy = summary.accuracy
        yield (
            f"- predictions against {counted(accuracy.runs, 'real run')}: mean accuracy"
            f" {format_accuracy(accuracy.mean_accuracy)}, the 90% interval"
            f" held {accuracy.interval_coverage:.0%} of them; `{REPORT}/report.md` has each"
        )
    yield ""
    yield "| job | command | what became of it | log |"
    yield "| --- | --- | --- | --- |"
    for state in summary.tasks:
        cells = (state.job, state.name, state.words, state.log or "")
        yield f"| {' | '.join(map(in_markdown, cells))} |"
    yield from _node_lines(summary)
    yield from evenness_lines(summary.evenness)
    if summary.complete:
        return
    yield ""
    yield "## Missing"
    yield ""
    for name, text in summary.missing.items():
        yield f"- **{in_markdown(name)}**: {in_markdown(text)}"
    yield ""
    yield "To go on, where nothing that is done is repeated:"
    yield ""
    yield f"    {summary.go_on}"


def _node_lines(summary: Summary) -> Iterator[str]:
    if not summary.nodes:
        return
    yield ""
    yield "## Nodes"
    yield ""
    for job in summary.nodes:
        yield f"- {_agreement(job)}"
        yield from (f"  - {difference.name}: {difference.sides}" for difference in job.differences)
        yield from (f"  - {line}" for line in job.calendars)


def _agreement(job: JobDifferences) -> str:
    if len(job.hosts) == 1:
        return f"{job.job} ran on {job.hosts[0]}"
    hosts = f"{len(job.hosts)} nodes of {job.job} ({', '.join(job.hosts)})"
    return f"{hosts} {'differ in what follows' if job.differences else 'agree in all that doctor compares'}"


def _minutes(summary: Summary) -> str:
    spent = summary.spent
    text = f"Measuring took {spent.node_s / 60:.1f} node-minutes"
    if spent.source == "sacct":
        text += " by Slurm's accounting"
    if spent.attempts:
        text += f", in {spent.attempts} attempts at its commands"
    if summary.estimated_node_s is not None:
        text += f"; {summary.estimated_node_s / 60:.1f} were estimated"
    if spent.cut_short and spent.source != "sacct":
        text += f". {spent.cut_short} attempts were killed, or run still: how long they took is not counted"
    return f"{text}."
