"""What a training run shows at once: phases of each rank, and whether it issued what its plan holds."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paradl_bench.core.frames import print_rows
from paradl_bench.core.statistics import Summary, grouped, summarise
from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.measure.machine.node_findings import lines_of_nodes
from paradl_bench.measure.stragglers.pace import TrainingPace, training_pace
from paradl_bench.ranks.directories.directory import emulation_noted
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import read_records
from paradl_bench.records.training.call_times import PARTS, CallTimes, RankSpent, call_times, spent_by_rank
from paradl_bench.records.training.ghost_record import GhostRun
from paradl_bench.records.training.issued import as_planned, key_of, unevenness
from paradl_bench.records.training.training_record import (
    TRAINING_FILE,
    IssuedCollective,
    TrainingIterations,
    TrainingRun,
    read_run,
    without_timed_calls,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PHASES = {"iteration": "iteration_s", "FW": "fw_s", "BW": "bw_s", "exposed GE": "exposed_ge_s", "WU": "wu_s"}
_IDLE = {"pipeline idle": "pipeline_idle_s"}
"""Columns, and the field of :class:`TrainingIterations` that each summarises."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one rank's timed iterations, by phase.

    Attributes:
        communication: of layer-wise communication, by phase and kind (``FW halo``); these are parts of the phases.
    """

    rank: int
    core: int | None
    phases: dict[str, Summary]
    communication: dict[str, Summary] = {}


class PhaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one rank, or one kind of communication within a phase (``FW halo``)."""

    rank: int
    core: int | None
    phase: str
    part_of_phase: bool
    median_s: float
    iqr_s: float
    minimum_s: float
    samples: int


class CallSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one operation, size and group, each timed by itself.

    Attributes:
        count: in an iteration. wait: of each rank for the last one. transfer: from then on, until all are done.
    """

    operation: str
    message_bytes: int
    ranks: tuple[int, ...]
    count: int
    wait: Summary
    transfer: Summary


class TrainingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its statistics.

    Attributes:
        emulated: what was emulated, in a line; empty where nothing was. nodes: in what its nodes differ, a line each.
        calls: of every kind, where they were timed one by one. spent: what ranks spent with them.
    """

    run: TrainingRun
    ranks: tuple[RankSummary, ...]
    pace: TrainingPace
    emulated: str = ""
    nodes: tuple[str, ...] = ()
    calls: tuple[CallSummary, ...] = ()
    spent: tuple[RankSpent, ...] = ()


def summarise_training(directory: Path) -> TrainingSummary:
    """Statistics of a training run.

    Raises:
        UserError: the directory holds none, or a damaged one.
    """
    run = read_run(directory)
    all_records = read_records(directory, TRAINING_FILE, TrainingIterations)
    records, noted = without_timed_calls(all_records), read_host_records(directory)
    clocks = HostClocks(noted)
    summaries = []
    for rank in sorted({record.rank for record in records}):
        of_rank = [record for record in records if record.rank == rank]
        fields = PHASES | (_IDLE if of_rank[0].pipeline_idle_s else {})
        phases = {name: summarise([s for r in of_rank for s in getattr(r, field)]) for name, field in fields.items()}
        core = run.cores[rank] if rank < len(run.cores) else None
        communication = {name: summarise(values) for name, values in _communication(of_rank).items()}
        summaries.append(RankSummary(rank=rank, core=core, phases=phases, communication=communication))
    return TrainingSummary(
        run=run,
        ranks=tuple(summaries),
        pace=training_pace(run, records, noted),
        emulated=emulation_noted(directory),
        nodes=tuple(lines_of_nodes(directory)),
        calls=_calls(call_times(all_records, clocks)),
        spent=spent_by_rank(all_records, clocks),
    )


def _calls(calls: Iterable[CallTimes]) -> tuple[CallSummary, ...]:
    alike = grouped(calls, lambda call: (call.key.operation, call.key.message_bytes, call.ranks))
    return tuple(
        CallSummary(
            operation=operation,
            message_bytes=message_bytes,
            ranks=ranks,
            count=len(of_kind),
            wait=summarise(np.concatenate([call.waits_s for call in of_kind], axis=None)),
            transfer=summarise(np.concatenate([call.transfers_s for call in of_kind])),
        )
        for (operation, message_bytes, ranks), of_kind in alike.items()
    )


def _communication(records: Sequence[TrainingIterations]) -> dict[str, list[float]]:
    """Seconds of every iteration, by phase and kind."""
    seconds: dict[str, list[float]] = {}
    for record in records:
        for phase, kinds in (("FW", record.fw_communication_s), ("BW", record.bw_communication_s)):
            for kind, values in kinds.items():
                seconds.setdefault(f"{phase} {kind}", []).extend(values)
    return seconds


def _phase_rows(ranks: Iterable[RankSummary]) -> Iterator[PhaseRow]:
    for rank in ranks:
        for within, summaries in ((False, rank.phases), (True, rank.communication)):
            for phase, times in summaries.items():
                yield PhaseRow(
                    rank=rank.rank,
                    core=rank.core,
                    phase=phase,
                    part_of_phase=within,
                    median_s=times.median_s,
                    iqr_s=times.iqr_s,
                    minimum_s=times.minimum_s,
                    samples=times.samples,
                )


def print_training_summary(directory: Path, *, as_json: bool) -> None:
    """Print the summary to standard output, as a table or as asked for."""
    summary = summarise_training(directory)
    if print_rows(PhaseRow, _phase_rows(summary.ranks)):
        return
    if as_json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        _print_tables(summary)


def _print_tables(summary: TrainingSummary) -> None:
    console = open_console()
    if summary.emulated:
        console.print(f"emulated: {summary.emulated}", soft_wrap=True)
    console.print(_phase_table(summary))
    if any(rank.communication for rank in summary.ranks):
        console.print(_communication_table(summary.ranks))
    if summary.calls:
        console.print(_call_table(summary.calls))
        console.print(_spent_table(summary.spent))
    if summary.run.call_timing is not None:
        console.print(summary.run.call_timing.line(), soft_wrap=True)
    for line in (*summary.nodes, *summary.pace.lines()):
        console.print(line, style="yellow", soft_wrap=True)
    run = summary.run
    if run.ghost is not None:
        console.print(_ghost_line(run.ghost), soft_wrap=True)
    if run.losses:
        console.print(f"loss {run.losses[0]:.4g} in the first timed iteration, {run.losses[-1]:.4g} in the last")
    if run.issued:
        _print_collectives(console, run)
    if run.verified is not None:
        style = "yellow" if run.verified.mixes_samples else ""
        console.print(run.verified.line(), style=style, soft_wrap=True, markup=False)
    console.print(_verdict(run), style="bold red" if run.differences else "", soft_wrap=True)
    if run.compiled:
        console.print("memory was not tracked: torch's tracker sees no kernels of its compiler", soft_wrap=True)


def _phase_table(summary: TrainingSummary) -> Table:
    run = summary.run
    shape = "x".join(map(str, run.input_shape))
    title = (
        f"{run.model} {run.strategy}, batch {run.batch}, input {shape}, {run.optimizer}, {run.backend}: "
        "median (interquartile range) of an iteration"
    )
    rows = []
    for rank in summary.ranks:
        cells = [_cell(item) for item in rank.phases.values()]
        core = "-" if rank.core is None else str(rank.core)
        rows.append((str(rank.rank), core, str(rank.phases["iteration"].samples), *cells))
    return table(("rank", "core", "iterations", *summary.ranks[0].phases), rows, title=title)


_MUCH_OVERHEAD = 0.1
"""Of what layers sleep: more than the few per cent that lie beside a sleep and show in nothing else."""


def _ghost_line(ghost: GhostRun) -> str:
    framework, oversleep = (sum(phases.values()) for phases in (ghost.framework_s, ghost.oversleep_s))
    drawn = ""
    if ghost.drawn is not None:
        drawn = f"; each sleep drawn as {ghost.drawn.samples} measured iterations spread, seed {ghost.drawn.seed}"
    silent = "" if ghost.host_s is None else f"; where nothing is communicated either, {format_seconds(ghost.host_s)}"
    much = f". This is much compared with the sleep: give a larger --dilate (now {ghost.dilate:g})"
    return (
        f"layers slept {format_seconds(sum(ghost.slept_s.values()))} an iteration; the framework takes rank 0's host"
        f" {format_seconds(framework)} ({ghost.overhead:.1%} of that{much if ghost.overhead > _MUCH_OVERHEAD else ''}),"
        f" and {'-' if oversleep < 0 else ''}{format_seconds(abs(oversleep))} beside it; without sleep an iteration"
        f" takes {format_seconds(ghost.without_compute_s)}{silent}{drawn}"
    )


def _cell(item: Summary | None) -> str:
    return f"{format_seconds(item.median_s)} ({format_seconds(item.iqr_s)})" if item and item.median_s else "-"


def _communication_table(ranks: Sequence[RankSummary]) -> Table:
    columns = list(dict.fromkeys(name for rank in ranks for name in rank.communication))
    rows = [(str(rank.rank), *(_cell(rank.communication.get(name)) for name in columns)) for rank in ranks]
    title = "layer-wise communication within FW and BW, waiting for other ranks included"
    return table(("rank", *columns), rows, title=title)


def _call_table(calls: Sequence[CallSummary]) -> Table:
    rows = [
        (
            call.operation,
            format_bytes(call.message_bytes),
            ",".join(map(str, call.ranks)),
            str(call.count),
            _cell(call.wait),
            _cell(call.transfer),
        )
        for call in calls
    ]
    columns = ("operation", "bytes", "ranks", "calls", "wait for the last rank", "transfer")
    return table(columns, rows, title="calls timed one by one: median (interquartile range)")


def _spent_table(spent: Sequence[RankSpent]) -> Table:
    rows = [(str(one.rank), *(format_seconds(getattr(one, part)) for part in PARTS)) for one in spent]
    columns = ("rank", *(part.removesuffix("_s") for part in PARTS))
    return table(columns, rows, title="what ranks spent these iterations with")


def _print_collectives(console: Console, run: TrainingRun) -> None:
    console.print(_collective_table(as_planned(run.issued, run.planned), run.planned))
    shares = unevenness(run.issued, run.planned)
    if shares is not None and shares != (1.0, 1.0):
        console.print(
            f"rank 0 got {shares[0]:.2f} to {shares[1]:.2f} times an even share of what ranks send each other"
        )


def _collective_table(issued: Sequence[IssuedCollective], planned: Sequence[IssuedCollective]) -> Table:
    from rich.text import Text

    rows = []
    counts: dict[tuple[str, str, int, tuple[int, ...]], list[int]] = {}
    for side, items in enumerate((issued, planned)):
        for item in items:
            counts.setdefault(key_of(item), [0, 0])[side] += item.count
    for (when, operation, size, group), (have, want) in counts.items():
        style = "" if have == want else "bold red"
        row = (when, operation, f"{size:,}", format_bytes(size), str(len(group)), str(have), str(want))
        rows.append([Text(cell, style=style) for cell in row])
    columns = ("when", "operation", "bytes", "", "ranks", "issued", "planned")
    return table(columns, rows, title="collectives, as issued by rank 0 and as planned")


def _verdict(run: TrainingRun) -> str:
    if run.issued_equals_plan is None:
        return "collectives were not recorded"
    if run.differences:
        listed = "\n".join(f"  {line}" for line in run.differences)
        return (
            f"COLLECTIVES DIFFER FROM THE PLAN on which predictions rest: {len(run.differences)} differences:\n{listed}"
        )
    total = sum(item.count for item in run.issued if item.when == "iteration")
    if not total:
        return "no collectives were issued, and none are planned"
    size = math.fsum(item.count * item.message_bytes for item in run.issued if item.when == "iteration")
    return f"every collective agrees with the plan to the byte: {total} an iteration, {format_bytes(size)}"
