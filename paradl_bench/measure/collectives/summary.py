"""What a collectives directory shows at once: times, bandwidths, and what was measured beside; torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.frames import print_rows
from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import sorted_groups, summarise
from paradl_bench.core.terminal.command_line import open_console, write_output
from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.measure.collectives.context_summary import CAPTION, ContextRow, context_rows, context_table
from paradl_bench.measure.machine.node_findings import lines_of_nodes
from paradl_bench.measure.stragglers.pace import SweepPace, sweep_pace
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.ranks.directories.directory import emulation_noted
from paradl_bench.records.contexts.older import read_contexts
from paradl_bench.records.contexts.swept_groups import swept_groups
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import COLLECTIVES_FILE, read_records
from paradl_bench.records.samples import CollectiveSamples

_COMPARES_ALL = frozenset({"torch", "mpi4py"})


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation and size over all blocks; a call lasts as long as its slowest rank, a message as its receiver.

    Attributes:
        message_bytes: as the operation defines it. size_bytes: as nccl-tests does, its largest buffer.
        algbw_bytes_per_s, busbw_bytes_per_s: nccl-tests' algorithm and bus bandwidth at the median.
    """

    library: str
    tool: str
    operation: str
    level: str
    ranks: int
    message_bytes: int
    size_bytes: int
    median_s: float
    iqr_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    calls: int
    verified: bool


class CollectivesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints, in what nodes differ and what was emulated in lines."""

    collectives: tuple[SweepRow, ...]
    contexts: tuple[ContextRow, ...] = ()
    pace: SweepPace = SweepPace()
    nodes: tuple[str, ...] = ()
    emulated: str = ""


def summarise_collectives(directory: Path) -> CollectivesSummary:
    """Summary of a measurement directory; raises UserError where a record is not valid."""
    sweeps = read_records(directory, COLLECTIVES_FILE, CollectiveSamples)
    noted = read_host_records(directory)
    clocks = HostClocks(noted)
    contexts = [record.aligned(clocks) for record in read_contexts(directory)]
    contexts += [record for _, record in swept_groups((0, swept) for swept in sweeps)]
    return CollectivesSummary(
        collectives=sweep_rows(record for record in sweeps if record.concurrent == 1),
        contexts=context_rows(contexts),
        pace=sweep_pace(sweeps, noted, contexts),
        nodes=tuple(lines_of_nodes(directory)),
        emulated=emulation_noted(directory),
    )


def sweep_rows(records: Iterable[CollectiveSamples]) -> tuple[SweepRow, ...]:
    """One row an operation and size, in the order of operations and sizes."""
    return tuple(map(_sweep_row, sorted_groups(records, lambda r: (r.operation, r.message_bytes)).values()))


def _sweep_row(records: list[CollectiveSamples]) -> SweepRow:
    first = records[0]
    operation = lookup(operations(), first.operation, "collective")
    times = summarise(np.concatenate([operation.call_seconds(record.samples_s) for record in records]))
    size, seconds = first.message_bytes, times.median_s
    return SweepRow(
        library=first.library,
        tool=first.tool,
        operation=first.operation,
        level=first.level,
        ranks=first.ranks,
        message_bytes=size,
        size_bytes=round(size * operation.size_factor(first.ranks)),
        median_s=seconds,
        iqr_s=times.iqr_s,
        algbw_bytes_per_s=operation.algorithm_bandwidth(first.ranks, size, seconds),
        busbw_bytes_per_s=operation.bus_bandwidth(first.ranks, size, seconds),
        calls=times.samples,
        verified=all(record.verified for record in records),
    )


def print_collectives(directory: Path, *, as_json: bool) -> None:
    """Print the summary on standard output: a table, or what was asked for."""
    summary = summarise_collectives(directory)
    if print_rows(SweepRow, summary.collectives):
        return
    if as_json:
        write_output("-", encode_pretty(summary))
        return

    # A file or a pipe has no width of its own: the table takes what it needs.
    console = open_console(width=120)
    if summary.emulated:
        console.print(f"emulated: {summary.emulated}", soft_wrap=True)
    console.print(_sweep_table(summary.collectives))
    for line in (*summary.nodes, *summary.pace.lines()):
        console.print(line, style="yellow", soft_wrap=True)
    if summary.contexts:
        console.print()
        console.print(context_table(summary.contexts))
        console.print(CAPTION, soft_wrap=True)


def verified_word(tool: str, *, verified: bool) -> str:
    """Whether results were right: ours are all compared, other tools compare where their version and options do."""
    if verified:
        return "yes"
    return "WRONG" if tool in _COMPARES_ALL else "no"


def _sweep_table(rows: tuple[SweepRow, ...]) -> object:
    from rich import box
    from rich.table import Table

    title = f"{rows[0].library}, {rows[0].ranks} ranks, level {rows[0].level}" if rows else "nothing was measured"
    caption = "message as the operation defines it; algbw and busbw as nccl-tests does, in GB/s of 1e9 bytes"
    # Eighty columns hold it.
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("operation", "message", "median", "iqr", "algbw", "busbw", "calls", "verified"):
        table.add_column(name, justify="left" if name == "operation" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.operation,
            format_bytes(row.message_bytes),
            format_seconds(row.median_s),
            format_seconds(row.iqr_s),
            f"{row.algbw_bytes_per_s / 1e9:.3f}",
            f"{row.busbw_bytes_per_s / 1e9:.3f}",
            str(row.calls),
            verified_word(row.tool, verified=row.verified),
        )
    return table
