"""Intel MPI Benchmarks: tables of IMB-MPI1 (intel/mpi-benchmarks, ``src_c/IMB_output.c``).

    # Benchmarking Allreduce
    # #processes = 8
           #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]

Least, largest and average are over ranks, each rank's being its mean over the repetitions: the largest is taken, since
a collective takes as long as its slowest rank. A ping-pong's time is half of the way there and back.
The same columns are read between pipes, as Markdown has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paradl_bench.importers.failures import Watched
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat
from paradl_bench.importers.plausible import implausible_call
from paradl_bench.importers.tables.markdown import Columns, PipeRow, columns_of, lines_and_cells, shown
from paradl_bench.importers.tables.numbers_read import decimal, whole
from paradl_bench.records.samples import CollectiveSamples

_BENCHMARK = re.compile(r"#\s*Benchmarking (\S{1,60})")
_PROCESSES = re.compile(r"#\s*(?:\( *(\d{1,18}) groups of (\d{1,18}) processes|#processes = (\d{1,18}))")
_VERSION = re.compile(r"Intel\(R\) MPI Benchmarks ([\w.]{1,30})|Intel \(R\) MPI Benchmark Suite V([\w.]{1,30})")
_MPI = re.compile(r"#\s*MPI Version\s*:\s*([\d.]{1,10})")
_REDUCTION_TYPE = re.compile(r"#\s*MPI_Datatype for reductions\s*:\s*(MPI_\w{1,20})")
_DTYPES = {"MPI_FLOAT": "fp32", "MPI_DOUBLE": "fp64", "MPI_INT": "int32"}
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "bcast": "broadcast",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "pingpong": "send_recv",
    "pingpongspecificsource": "send_recv",
    "pingponganysource": "send_recv",
}
_REDUCING = {"all_reduce", "reduce", "reduce_scatter"}
_TIMES = ("t_max[usec]", "t[usec]")
_IN_MARKDOWN = {
    **{(name, unit): "#bytes" for name in ("bytes", "size") for unit in ("", "b", "bytes")},
    ("repetitions", ""): "#repetitions",
    **{(f"t{which}", unit): f"t_{which}[usec]" for which in ("min", "max", "avg") for unit in ("usec", "us")},
    **{("t", unit): "t[usec]" for unit in ("usec", "us")},
    ("mbytes/sec", ""): "Mbytes/sec",
    ("msg/sec", ""): "Msg/sec",
    ("defects", ""): "defects",
    ("group", ""): "Group",
}
"""IMB's name of a column by :func:`heading_of` of its header."""
_FAILED = ("out-of-mem", "int-overflow", "time-out")


@dataclass(slots=True)
class _Table:
    """The table that rows belong to now.

    Attributes:
        concurrent: how many groups of ranks ran it at once.
        markdown: the columns of a table in Markdown, while its lines go on.
        reductions: the type of collectives that reduce.
    """

    line: int
    name: str
    ranks: int | None = None
    concurrent: int = 1
    columns: tuple[str, ...] = ()
    markdown: Columns | None = None
    reductions: str = "fp32"


def _read(log: LogFile, options: ImportOptions) -> Imported:
    """Tables of IMB-MPI1."""
    result = Imported(device="cpu")
    table: _Table | None = None
    reductions = "fp32"
    watched = Watched(result, options)
    for number, line, cells in lines_and_cells(log.text):
        watched.look(line)
        benchmark = _BENCHMARK.search(line)
        if benchmark:
            watched.close()
            watched = Watched(result, options)
            table = _Table(number, benchmark.group(1).removeprefix("Multi-"), reductions=reductions)
            continue
        kind = _REDUCTION_TYPE.search(line)
        if kind:
            reductions = _DTYPES.get(kind.group(1), kind.group(1).lower())
            if table is not None:
                table.reductions = reductions
        _describe(result, line)
        words = _words(table, line, cells) if table is not None else []
        if table is not None and words:
            _row(result, table, number, line, words, options, log.path)
            watched.row(number, line)
    watched.close()
    result.dropped.sort(key=lambda item: item.line)
    if table is None:
        raise NotOfFormat(f"{log.path} holds no table of IMB: none begins with '# Benchmarking'")
    return result


def _describe(result: Imported, line: str) -> None:
    version = _VERSION.search(line)
    if version:
        result.versions["imb"] = (version.group(1) or version.group(2)).rstrip(".,")
    mpi = _MPI.search(line)
    if mpi:
        result.versions["mpi standard"] = mpi.group(1)


def _words(table: _Table, line: str, row: PipeRow | None) -> list[str]:
    """The entries of a line that may be a row; none where it is a heading, which is taken up."""
    if row is None:
        if table.markdown is not None:
            table.markdown, table.columns = None, ()
        return [] if _read_heading(table, line) else line.split()
    columns = columns_of(row.cells, _IN_MARKDOWN, size="#bytes", times=_TIMES, tool="IMB")
    if columns is not None:
        table.markdown, table.columns = columns, columns.names
    elif row.first:
        table.markdown, table.columns = None, ()
        _read_heading(table, line)
    elif table.markdown is not None and not row.rule and any(row.cells):
        return table.markdown.entries(row.cells, size="#bytes", count="#repetitions")
    return []


def _read_heading(table: _Table, line: str) -> bool:
    """Take up what a line above the rows says; whether the line is one."""
    processes = _PROCESSES.search(line)
    if processes:
        table.ranks = int(processes.group(2) or processes.group(3))
        table.concurrent = max(int(processes.group(1) or 1), 1)
        return True
    words = line.split()
    if "#repetitions" in words:
        # "overlap[%]" is the only heading with a space before it, never inside.
        table.columns = tuple(words)
        return True
    return line.lstrip().startswith("#")


def _drop_without_size(result: Imported, table: _Table, number: int, line: str, words: list[str]) -> None:
    # Between tables stands prose; nothing of it is numbers throughout.
    if table.markdown is not None:
        result.drop(number, line, table.markdown.refusal or f"{shown(words[0])} is no whole number of bytes")
    elif table.columns and len(words) > 1 and all(decimal(word) is not None for word in words):
        result.drop(number, line, "its first column is no size")


def _row(
    result: Imported, table: _Table, number: int, line: str, words: list[str], options: ImportOptions, path: str
) -> None:
    if whole(words[0]) is None:
        _drop_without_size(result, table, number, line, words)
        return
    why = _refusal(table, line) or _why_not(table, words, options)
    if why is not None:
        result.drop(number, line, why)
        return
    values = dict(zip(table.columns, words, strict=True))
    operation = _OPERATIONS[table.name.lower()]
    ranks = 2 if operation == "send_recv" else table.ranks or 1
    size = int(values["#bytes"])
    if operation == "reduce_scatter":
        # IMB counts what all ranks keep together.
        if size % ranks:
            result.drop(number, line, f"{size} bytes are no whole part on each of {ranks} ranks")
            return
        size //= ranks
    result.rows += 1
    if "#repetitions" not in values and options.iterations is None:
        result.note(f"{path} line {table.line}: how many repetitions a time is the mean of is not said; taken as 1")
    result.collectives.append(
        CollectiveSamples(
            library=options.library or "mpi",
            tool="imb",
            operation=operation,
            level=options.level or "",
            ranks=ranks,
            message_bytes=size,
            dtype=table.reductions if operation in _REDUCING else "int8",
            block=0,
            samples_s=((_time_us(values) * 1e-6,),),
            verified="defects" in values,
            calls_per_sample=int(values.get("#repetitions", options.iterations or 1)),
            source=f"{path}:{number}",
            concurrent=table.concurrent,
            group=int(values.get("Group", 0)),
            ranks_per_node=options.ranks_on_a_node(ranks, options.level or ""),
        )
    )


def _refusal(table: _Table, line: str) -> str | None:
    if table.name.lower() not in _OPERATIONS:
        return f"{table.name}: no operation that is modelled"
    failed = next((text for text in _FAILED if text in line), None)
    if failed:
        return f"not measured: {failed}"
    if table.ranks is None:
        return "its table does not say how many processes"
    return table.markdown.refusal if table.markdown else None


def _time_us(values: dict[str, str]) -> float:
    return decimal(values.get("t_max[usec]", values.get("t[usec]", ""))) or 0.0


def _why_not(table: _Table, words: list[str], options: ImportOptions) -> str | None:
    concurrent = table.concurrent
    if len(words) != len(table.columns):
        return f"{len(words)} of {len(table.columns)} columns"
    values = dict(zip(table.columns, words, strict=True))
    size, repetitions = whole(values.get("#bytes", "")), whole(values.get("#repetitions", "1"))
    if size is None or repetitions is None or not (0 <= size < 2**63 and 1 <= repetitions < 10**12):
        return "size or repetitions are no count"
    if any(decimal(word) is None for word in words):
        return "a column holds no number"
    group = whole(values.get("Group", "0"))
    if group is None or not 0 <= group < concurrent:
        return "its group is none of those that ran at once"
    if size == 0 and "empty" not in options.keep:
        return "no bytes were sent; --keep empty takes it all the same"
    if _time_us(values) <= 0:
        return "no time above 0"
    return implausible_call(table.ranks or 1, size, _time_us(values) * 1e-6) or _implausible(values, options)


def _implausible(values: dict[str, str], options: ImportOptions) -> str | None:
    if (decimal(values.get("t_min[usec]", "")) or 0.0) > _time_us(values):
        return "its least time is above its largest"
    if (decimal(values.get("defects", "0")) or 0.0) > 0 and "wrong" not in options.keep:
        return "wrong results; --keep wrong takes it all the same"
    return None


IMPORTER = Importer(name="imb", reads="Intel MPI Benchmarks: tables of IMB-MPI1", kind="collectives", reader=_read)
