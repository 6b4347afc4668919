"""OSU micro-benchmarks: latency tables of collectives and of point to point.

    # OSU MPI-CUDA Allreduce Latency Test v5.7
    # Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
    4                      28.87             28.29             29.50        1000

or the same columns between pipes, as Markdown has them.

``-f`` adds all columns behind the average. Average, least and largest are over ranks, each rank's being its mean over
the iterations: a collective takes as long as its slowest rank, so the largest is taken where it stands. The tables say
neither ranks nor hosts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paradl_bench.core.errors import UserError
from paradl_bench.importers.failures import Watched
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat
from paradl_bench.importers.plausible import implausible_call
from paradl_bench.importers.tables.markdown import Columns, PipeRow, columns_of, lines_and_cells, shown
from paradl_bench.importers.tables.numbers_read import decimal, whole
from paradl_bench.records.samples import CollectiveSamples

_TITLE = re.compile(r"#? ?OSU (MPI|[NR]CCL|XCCL|MPI_\w{1,40})(-[A-Z]+(?: MANAGED)?)? (.{1,80}?) ?Test v(\d[\w.]{0,20})")
_DATATYPE = re.compile(r"# Datatype: (MPI_[A-Z0-9_]{1,30})")
_DTYPES = {"MPI_CHAR": "int8", "MPI_FLOAT": "fp32", "MPI_INT": "int32", "MPI_DOUBLE": "fp64"}
_OPERATIONS = {
    "Allreduce Latency": "all_reduce",
    "Allgather Latency": "all_gather",
    "Broadcast Latency": "broadcast",
    "Reduce Latency": "reduce",
    "Reduce_scatter Latency": "reduce_scatter",
    "All-to-All Personalized Exchange Latency": "all_to_all",
    "Gather Latency": "gather",
    "Scatter Latency": "scatter",
    "Latency": "send_recv",
}
_REDUCING = {"all_reduce", "reduce", "reduce_scatter"}
_LONGEST_HEADING = 1000
_TIMES = ("Max Latency(us)", "Avg Latency(us)", "Latency (us)", "Latency(us)")
_IN_MARKDOWN = {
    **{(name, unit): "Size" for name in ("size", "bytes", "messagesize") for unit in ("", "b", "bytes")},
    **{(f"{which.lower()}latency", "us"): f"{which} Latency(us)" for which in ("Avg", "Min", "Max")},
    ("latency", "us"): "Latency (us)",
    ("iterations", ""): "Iterations",
    ("validation", ""): "Validation",
}
"""Our name of a column by :func:`heading_of` of its header."""
_LAUNCHER = re.compile(r"\b(?:mpirun|mpiexec(?:\.hydra)?|mpirun_rsh|srun)\b(.{0,2000})")
_RANKS = re.compile(r"\s(?:-np|-n|--np|--ntasks)[ =](\d{1,7})(?=\s|$)")
_COLUMN = re.compile(r"[^()]{1,60}?\([^()]{0,60}\)|Iterations|Validation|MB/s|Messages/s|Size")


@dataclass(slots=True)
class _Table:
    """The table that rows belong to now.

    Attributes:
        refusal: why none of its rows can be taken; None where they can.
        markdown: the columns of a table in Markdown, while its lines go on.
    """

    line: int
    operation: str = ""
    library: str = ""
    dtype: str = ""
    columns: tuple[str, ...] = ()
    refusal: str | None = "no title of a benchmark stands above it"
    markdown: Columns | None = None


def _read(log: LogFile, options: ImportOptions) -> Imported:
    """OSU tables; a user error where neither they nor an option say how many ranks there were."""
    result = Imported(device="cpu")
    table = _Table(1)
    seen = False
    watched = Watched(result, options)
    for number, line, row in lines_and_cells(log.text):
        watched.look(line)
        title = _TITLE.search(line)
        if title:
            watched.close()
            watched = Watched(result, options)
            table = _titled(number, title)
            seen = True
            if title.group(2) or title.group(1) != "MPI":
                result.device = "cuda"
            result.versions["osu-micro-benchmarks"] = title.group(4)
            continue
        words = _words(table, line, row)
        ranks = _ranks_of_command(line) if words else None
        if ranks is not None:
            result.command_lines.append(" ".join(line.split()))
        elif words and seen:
            _row(result, table, number, line, words, options, log.path)
            watched.row(number, line)
    watched.close()
    result.dropped.sort(key=lambda item: item.line)
    if not seen:
        raise NotOfFormat(f"{log.path} holds no table of the OSU micro-benchmarks: no '# OSU MPI ... Test'")
    return result


def _titled(number: int, title: re.Match[str]) -> _Table:
    family, memory, name = title.group(1), title.group(2) or "", title.group(3).strip()
    operation = _OPERATIONS.get(name.replace(" Persistent", ""), "")
    library = {"MPI": "mpi", "NCCL": "nccl", "RCCL": "rccl"}.get(family, "")
    # Messages between the memories of GPUs are another path of the library than those between hosts.
    if library == "mpi" and memory:
        library = f"mpi{memory.lower().replace(' ', '-')}"
    refusal = None
    if "Bandwidth" in name:
        refusal = f"{name}: bandwidth of many messages under way, no time of one"
    elif "Non-" in name:
        refusal = f"{name}: its times hold computation beside"
    elif not operation or not library:
        refusal = f"{name} ({family}): no operation that is modelled"
    dtype = "fp32" if operation in _REDUCING else "int8"
    return _Table(number, operation, library, dtype, (), refusal)


def _words(table: _Table, line: str, row: PipeRow | None) -> list[str]:
    """The entries of a line that may be a row; none where it is a heading, which is taken up."""
    if row is None:
        if table.markdown is not None:
            table.markdown, table.columns = None, ()
        if line.lstrip().startswith("#"):
            _read_heading(table, line)
            return []
        return line.split()
    columns = columns_of(row.cells, _IN_MARKDOWN, size="Size", times=_TIMES, tool="OSU's latency tables")
    if columns is not None:
        table.markdown, table.columns = columns, columns.names
    elif row.cells[0].startswith("#"):
        _read_heading(table, row.cells[0])
    elif row.first:
        table.markdown, table.columns = None, ()
    elif table.markdown is not None and not row.rule and any(row.cells):
        return table.markdown.entries(row.cells, size="Size", count="Iterations")
    return []


def _read_heading(table: _Table, line: str) -> None:
    datatype = _DATATYPE.match(line.strip())
    if datatype:
        table.dtype = _DTYPES.get(datatype.group(1), datatype.group(1).lower())
        return
    heading = line.strip("# \t")
    if not heading.startswith("Size") or len(heading) > _LONGEST_HEADING:
        return
    names = tuple(name.strip() for name in _COLUMN.findall(heading.replace("Size", "Size()", 1)))
    if names and names[0] == "Size()":
        table.columns = ("Size", *names[1:])


def _refusal(table: _Table) -> str | None:
    return table.refusal or (table.markdown.refusal if table.markdown else None)


def _drop_without_size(result: Imported, table: _Table, number: int, line: str, words: list[str]) -> None:
    # B-Caffe's logs and others glue things to the size; what looks like a row is counted.
    if table.markdown is not None:
        result.drop(number, line, _refusal(table) or f"{shown(words[0])} is no whole number of bytes")
    elif len(words) > 1 and words[0][:1].isdigit() and all(decimal(word) is not None for word in words[1:]):
        result.drop(number, line, "its first column is no size")


def _row(
    result: Imported, table: _Table, number: int, line: str, words: list[str], options: ImportOptions, path: str
) -> None:
    if whole(words[0]) is None:
        _drop_without_size(result, table, number, line, words)
        return
    why = _refusal(table) or _why_not(table, words, options)
    if why is not None:
        result.drop(number, line, why)
        return
    values = dict(zip(table.columns, words, strict=True))
    size = int(words[0])
    ranks = _ranks(result, table, options, path)
    why = implausible_call(ranks, size, _time_us(values) * 1e-6)
    if why is not None:
        result.drop(number, line, why)
        return
    if table.operation == "reduce_scatter":
        # OSU counts what all ranks keep together.
        if size % ranks:
            result.drop(number, line, f"{size} bytes are no whole part on each of {ranks} ranks")
            return
        size //= ranks
    result.rows += 1
    if "Max Latency(us)" not in values:
        result.note(f"{path} line {table.line}: no -f: times are means over ranks, not of the slowest rank")
    iterations = whole(values.get("Iterations", ""))
    if iterations is None and options.iterations is None:
        result.note(f"{path} line {table.line}: how many iterations a time is the mean of is not said; taken as 1")
    result.collectives.append(
        CollectiveSamples(
            library=options.library or table.library,
            tool="osu",
            operation=table.operation,
            level=options.level or "",
            ranks=ranks,
            message_bytes=size,
            dtype=table.dtype,
            block=0,
            samples_s=((_time_us(values) * 1e-6,),),
            verified=values.get("Validation") == "Pass",
            calls_per_sample=iterations or options.iterations or 1,
            source=f"{path}:{number}",
            ranks_per_node=options.ranks_on_a_node(ranks, options.level or ""),
        )
    )


def _time_us(values: dict[str, str]) -> float:
    column = next((name for name in _TIMES if name in values), None)
    return decimal(values[column]) or 0.0 if column else 0.0


def _why_not(table: _Table, words: list[str], options: ImportOptions) -> str | None:
    if len(words) != len(table.columns):
        return f"{len(words)} of {len(table.columns)} columns"
    values = dict(zip(table.columns, words, strict=True))
    if any(decimal(word) is None for name, word in values.items() if name != "Validation"):
        return "a column holds no number"
    if not 0 <= int(words[0]) < 2**63:
        return "no size"
    if int(words[0]) == 0 and "empty" not in options.keep:
        return "no bytes were sent; --keep empty takes it all the same"
    if _time_us(values) <= 0:
        return "no time above 0"
    least, largest = decimal(values.get("Min Latency(us)", "")), decimal(values.get("Max Latency(us)", ""))
    if least is not None and largest is not None and least > largest:
        return "its least time is above its largest"
    if values.get("Validation") == "Fail" and "wrong" not in options.keep:
        return "wrong results; --keep wrong takes it all the same"
    iterations = values.get("Iterations")
    if iterations is not None and not 1 <= (whole(iterations) or 0) < 10**12:
        return "iterations are no count"
    return None


def _ranks_of_command(line: str) -> int | None:
    """Ranks of a line that holds ``mpirun -np 8`` or ``srun -n 8``; None where it holds no such command."""
    command = _LAUNCHER.search(line)
    counts = [int(count) for count in _RANKS.findall(command.group(1))] if command else []
    return next((count for count in counts if count > 0), None)


def _ranks(result: Imported, table: _Table, options: ImportOptions, path: str) -> int:
    if table.operation == "send_recv":
        return 2
    named = {ranks for line in result.command_lines if (ranks := _ranks_of_command(line)) is not None}
    ranks = named.pop() if len(named) == 1 else options.ranks
    if ranks is None:
        raise UserError(f"{path} line {table.line}: OSU tables don't say how many ranks there were: give --ranks")
    return ranks


IMPORTER = Importer(
    name="osu",
    reads="OSU micro-benchmarks: latency of collectives and point to point",
    kind="collectives",
    reader=_read,
)
