"""``paradl-bench import``: measurements from what other tools wrote."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path

import click

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.frames import print_rows
from paradl_bench.core.registry import lookup
from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.command_line import say, tell
from paradl_bench.core.terminal.forms import summary_format
from paradl_bench.core.units import counted, parse_size
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import Importer, ImportOptions, LogFile, load_or_refuse
from paradl_bench.importers.operator_tables.mapping import shipped_mappings
from paradl_bench.importers.writing import FileRead, ImportSummary, environment_of, read_files, write_import
from paradl_bench.plan.options import not_fp8
from paradl_bench.records.cluster import NODE
from paradl_bench.records.measurement import ImportedFile

_SHOWN = 10
_LARGEST_TRIED = 1 << 24
"""Bytes; a file that one format refuses is tried as the others, which takes seconds where it is larger."""


@click.command("import", epilog="\n\n".join(f"{name}: {importer.reads}" for name, importer in importers().items()))
@click.argument("format_name", metavar="FORMAT")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(1), help="Number of ranks, if the file does not say it.")
@click.option(
    "--level",
    metavar="NAME",
    help="Level of the cluster that the ranks span: node, rack, system, ... Needed if the file lists no hosts. Default"
    " for runs on several hosts: system.",
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(1),
    help="The most ranks that share a host, if the file lists no hosts.",
)
@click.option("--op", "operation", metavar="OP", help="The collective (all_reduce, ...), if the file does not say it.")
@click.option(
    "--library",
    metavar="NAME",
    help="Library to which the times belong. Default: nccl, rccl, mpi or mpi-cuda, by format.",
)
@click.option("--iterations", type=click.IntRange(1), help="Number of calls in a mean, if the file does not say it.")
@click.option("--model", metavar="NAME", help="Name of the model that layer times belong to. Default: the file's.")
@click.option("--batch", type=click.IntRange(1), help="Local batch of layer times, if the file does not say it.")
@click.option(
    "--dtype",
    default="fp32",
    show_default=True,
    callback=not_fp8,
    help="Dtype of layer times, of a trace's parameters, and of tables without types.",
)
@click.option(
    "--keep",
    multiple=True,
    type=click.Choice(["empty", "wrong", "failed", "incomplete"]),
    callback=lambda _context, _option, names: frozenset(names),
    help="Keep rows that are dropped by default: empty messages, wrong results, rows of a run in which a rank failed,"
    " networks that lack layers with dropped rows. Repeatable.",
)
@click.option(
    "--cluster",
    metavar="NAME",
    help="Name that stands for the hosts, so that runs on any nodes of one cluster can be merged.",
)
@click.option(
    "--device-name",
    metavar="NAME",
    help="Name of the accelerator, if the file does not say it. For tables of several: the one to import.",
)
@click.option(
    "--mapping",
    metavar="MAPPING",
    help=f"For operators: a YAML file that describes the columns, or {', '.join(shipped_mappings())}.",
)
@click.option(
    "--memory", metavar="SIZE", help="Memory of one device, such as 16GiB, which files of other tools never say."
)
@click.option("--force", is_flag=True, help="Merge files from different environments.")
@click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path))
@summary_format("json holds the files, the rows, and every dropped row; csv and parquet the files.")
@collected(told=ImportOptions)
def COMMAND(  # noqa: N802
    format_name: str,
    files: tuple[Path, ...],
    told: ImportOptions,
    cluster: str | None,
    memory: str | None,
    force: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Make a measurement directory of files that another tool wrote.

    What can be read is read; every row that is not is shown with its line and the reason. calibrate fit takes the
    directory. A log's mean over many calls stays one number: it is not made into samples that nobody has.
    """
    importer = lookup(importers(), format_name, "format")
    if told.level == NODE and told.ranks_per_node and told.ranks and told.ranks_per_node < told.ranks:
        raise UserError(
            f"--level node means that all {told.ranks} ranks share a node, and --ranks-per-node says"
            f" {told.ranks_per_node}: give --level system"
        )
    read = _read(importer, [load_or_refuse(path) for path in files], told)
    memory_bytes = parse_size(memory) if memory else 0
    environment = environment_of(
        read, cluster=cluster, device_name=told.device_name, memory_bytes=memory_bytes, force=force
    )
    summary = write_import(
        output,
        importer,
        read,
        environment=environment,
        command_line=("paradl-bench", *sys.argv[1:]),
        arguments={"command": "import", "format": format_name, "files": " ".join(map(str, files))},
    )
    if summary.not_read:
        several = len(summary.not_read) > 1
        say(f"warning: {len(summary.not_read)} of {len(files)} files {'are' if several else 'is'} left out:")
    for left_out in summary.not_read:
        say(f"warning: {left_out.why}")
    if print_rows(ImportedFile, summary.files):
        return
    if as_json:
        sys.stdout.buffer.write(encode_pretty(summary))
        sys.stdout.flush()
    else:
        _show(summary, output)


def _read(importer: Importer, logs: list[LogFile], options: ImportOptions) -> list[FileRead]:
    try:
        return read_files(importer, logs, options)
    except UserError as error:
        others = [] if sum(len(log.content) for log in logs) > _LARGEST_TRIED else _formats_of(importer, logs)
        raise UserError(f"{error}; {' and '.join(others)} can read it" if others else str(error)) from error


def _formats_of(refused: Importer, logs: list[LogFile]) -> list[str]:
    """Other formats that take most of the rows of every file."""
    told = ImportOptions(ranks=2, level="system", batch=1, iterations=1, keep=frozenset({"empty", "wrong", "failed"}))
    names = []
    for name, other in importers().items():
        with contextlib.suppress(UserError):
            held = [other.read(log, told) for log in logs] if other is not refused else []
            if held and all(file.rows > len(file.dropped) for file in held):
                names.append(name)
    return names


def _show(summary: ImportSummary, output: Path) -> None:
    for file in summary.files:
        tell(f"{file.path}: {counted(file.rows, 'row')} read, {file.dropped} dropped")
    for why, count in Counter(item.why for item in summary.dropped).most_common():
        lines = [item for item in summary.dropped if item.why == why]
        tell(f"dropped {count}: {why}")
        for item in lines[:_SHOWN]:
            tell(f"  {item.file}:{item.line}: {item.text}")
        if count > _SHOWN:
            tell(f"  and {count - _SHOWN} more: dropped.jsonl in {output}")
    for note in summary.notes:
        tell(f"note: {note}")
    tell(f"wrote {output}; next: calibrate fit {output} ... -o PROFILE")
