"""nccl-tests: the text that it prints, of every generation, and its JSON reports (``-J``)."""

from __future__ import annotations

from collections import Counter

from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat
from paradl_bench.importers.nccl_logs.nccl_collectives import Sweep, add_sweep
from paradl_bench.importers.nccl_logs.nccl_json import is_report, read_report
from paradl_bench.importers.nccl_logs.nccl_text import Run, read_runs


def read(log: LogFile, options: ImportOptions) -> Imported:
    """Read text or a JSON report of nccl-tests.

    Raises:
        UserError: the file holds no table of nccl-tests.
    """
    if is_report(log.text):
        return read_report(log, options)
    return read_text(log, options, library="nccl", tool="nccl-tests")


def read_text(log: LogFile, options: ImportOptions, *, library: str, tool: str) -> Imported:
    """Read what nccl-tests, or its port, printed.

    Raises:
        UserError: the file holds no table.
    """
    result = Imported(device="cuda")
    runs = read_runs(log.text)
    if not runs:
        raise NotOfFormat(f"{log.path} holds no table of {tool}: rows of size, count, type, time, algbw and busbw")
    for run in runs:
        result.dropped += run.dropped
        _describe(result, run)
        if run.rows and run.layout is not None:
            add_sweep(result, sweep_of(run), options, library=library, tool=tool, path=log.path)
        if run.out_of_bounds:
            result.notes.append(f"{log.path} line {run.line}: {run.out_of_bounds} results out of bounds, says the log")
    result.dropped.sort(key=lambda item: item.line)
    return result


def sweep_of(run: Run) -> Sweep:
    """A run of the text format as a table to be identified."""
    groups = Counter(rank.group for rank in run.ranks)
    listed = max(groups.values(), default=0)
    highest = max((rank.rank for rank in run.ranks), default=-1) + 1
    aggregated = max(run.settings.get("agg iters", 1), 1)
    iterations = run.settings.get("iters")
    placed = Counter((rank.group, rank.host) for rank in run.ranks)
    return Sweep(
        line=run.line,
        rows=run.rows,
        stated=run.stated,
        named=tuple(run.programs),
        columns=run.layout.columns if run.layout and not run.layout.chosen else (),
        # A long list is cut by the tool: ranks beyond it are known by their numbers only.
        ranks=tuple({listed, highest}) if len(groups) == 1 else ((listed,) if listed else ()),
        hosts=len({rank.host for rank in run.ranks}) or None,
        ranks_per_node=max(placed.values(), default=0),
        groups=max(len(groups), 1),
        calls=max(iterations, 1) * aggregated if iterations else None,
        failure=run.failure,
    )


def _describe(result: Imported, run: Run) -> None:
    result.versions |= run.versions
    result.device_names |= {rank.device for rank in run.ranks if rank.device}
    result.hosts |= {rank.host for rank in run.ranks}
    hosts = Counter(rank.host for rank in run.ranks)
    result.ranks_per_host = max([result.ranks_per_host, *hosts.values()])
    for name in ("validation", "graph"):
        if name in run.settings:
            result.settings[name] = str(run.settings[name])
    if run.command_line and run.command_line not in result.command_lines:
        result.command_lines.append(run.command_line)


IMPORTER = Importer(
    name="nccl-tests", reads="NVIDIA's nccl-tests: logs of every version, JSON reports", kind="collectives", reader=read
)
