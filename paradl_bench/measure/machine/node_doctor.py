"""``doctor`` on every node of a job: what each has, in what they differ, and how far their clocks are apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.core.frames import print_rows
from paradl_bench.core.terminal.command_line import open_console, say
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_seconds
from paradl_bench.measure.machine.doctor import examine
from paradl_bench.measure.machine.node_findings import (
    NODES_NAME,
    JobNodes,
    Node,
    NodeFinding,
    calendar_lines,
    differences,
)
from paradl_bench.measure.machine.rank_hosts import hosts_of_ranks
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.hosts.host_record import RankHost

if TYPE_CHECKING:
    from rich.table import Table


def node_of_findings(*, cores: int | None = None) -> tuple[NodeFinding, ...]:
    """All that doctor finds here; ``cores`` as for :func:`examine`: after joining a process has but one."""
    return tuple(
        NodeFinding(name=finding.name, found=finding.found, text=finding.text) for finding in examine(cores=cores)
    )


def compare_nodes(context: RankContext, findings: tuple[NodeFinding, ...]) -> JobNodes:
    """What every node found, and its clock, on every rank; a collective. The first rank of each node speaks for it."""
    return nodes_of_job(context, hosts_of_ranks(context), findings)


def nodes_of_job(context: RankContext, places: Sequence[RankHost], findings: tuple[NodeFinding, ...]) -> JobNodes:
    """The same where it is known on which host each rank is, and how far its clock is off."""
    of_ranks = context.gather(findings, tuple[NodeFinding, ...])
    nodes = []
    for host in dict.fromkeys(place.host for place in places):
        ranks = tuple(place.rank for place in places if place.host == host)
        nodes.append(Node(host=host, ranks=ranks, clock=places[ranks[0]], findings=of_ranks[ranks[0]]))
    return JobNodes(nodes=tuple(nodes), differences=differences(nodes))


def refuse_known_nodes(output: Path) -> None:
    """Raise UserError, before anything is looked for, where ``nodes.json`` can't go."""
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; -o takes a directory")
    if (output / NODES_NAME).exists():
        raise UserError(f"{output / NODES_NAME} is there already; give another directory, or remove it")


def write_nodes(job: JobNodes, output: Path) -> None:
    """Keep what was found as ``nodes.json`` in a directory; raises WorkError where it can't be written."""
    write_bytes_atomically(output / NODES_NAME, encode_pretty(job))
    say(f"{output / NODES_NAME} holds all that was found on {len(job.nodes)} nodes")


class FoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked for on one node."""

    host: str
    ranks: tuple[int, ...]
    clock_offset_s: float
    name: str
    found: str | None


def _found_rows(job: JobNodes) -> Iterator[FoundRow]:
    for node in job.nodes:
        offset_s = node.clock.clock_offset_s
        for finding in node.findings:
            yield FoundRow(
                host=node.host, ranks=node.ranks, clock_offset_s=offset_s, name=finding.name, found=finding.found
            )


def print_nodes(job: JobNodes, *, as_json: bool) -> None:
    """Show clocks and differences, or all as asked for, on standard output."""
    if print_rows(FoundRow, _found_rows(job)):
        return
    if as_json:
        sys.stdout.write(msgspec.json.encode(job).decode() + "\n")
        return
    console = open_console()
    console.print(_clock_table(job))
    for line in calendar_lines(job.nodes):
        console.print(line, style="yellow", soft_wrap=True)
    if job.differences:
        console.print(_difference_table(job))
    alike = len({finding.name for node in job.nodes for finding in node.findings}) - len(job.differences)
    if len(job.nodes) == 1:
        console.print("one node: nothing to compare; start a task on each node of the job")
    else:
        console.print(f"{len(job.nodes)} nodes agree on {alike} findings and differ in {len(job.differences)}")


def _clock_table(job: JobNodes) -> Table:
    from rich.text import Text

    rows: list[tuple[str | Text, ...]] = []
    for node in job.nodes:
        ranks, clock = str(len(node.ranks)), node.clock
        if 0 in node.ranks:
            rows.append((node.host, ranks, "rank 0's", "rank 0's", ""))
            continue
        calendar = Text(_signed(clock.wall_offset_s))
        if abs(clock.wall_offset_s) > clock.clock_error_s:
            calendar.stylize("yellow")
        rows.append((node.host, ranks, _signed(clock.clock_offset_s), calendar, format_seconds(clock.clock_error_s)))
    columns = ("node", "ranks", "since start", "calendar", "within")
    return table(columns, rows, title="nodes, and how far their clocks are ahead")


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else ''}{format_seconds(abs(seconds))}"


def _difference_table(job: JobNodes) -> Table:
    from rich.text import Text

    missing = Text("missing", style="yellow")
    rows = [
        (difference.name if index == 0 else "", missing if value is None else value, ", ".join(hosts))
        for difference in job.differences
        for index, (value, hosts) in enumerate(difference.found)
    ]
    return table(("differs", "found", "nodes"), rows, title="differences between nodes")
