"""Intel MPI Benchmarks: tables of IMB-MPI1 (intel/mpi-benchmarks, ``src_c/IMB_output.c``).

    # Benchmarking Allreduce
    # #processes = 8
           #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]

Least, largest and average are over ranks, each rank's being its mean over the repetitions: the largest is taken, since
a collective takes as long as its slowest rank. A ping-pong's time is half of the way there and back.
The same columns are read between pipes, as in Markdown.
"""

from __future__ import annotations

import re

from paradl_bench.importers.failures import Watched
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat
from paradl_bench.importers.tables.markdown import lines_and_cells
from paradl_bench.importers.tables.numbers_read import decimal
from paradl_bench.importers.tables.size_tables import REDUCING, Benchmarks, SizeRows, SizeTable

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


_TABLES = Benchmarks(
    tool="imb",
    prints="IMB",
    size="#bytes",
    count="#repetitions",
    least="t_min[usec]",
    times=("t_max[usec]", "t[usec]"),
    in_markdown=_IN_MARKDOWN,
    wrong=lambda values: (decimal(values.get("defects", "0")) or 0.0) > 0,
    verified=lambda values: "defects" in values,
)


def _read(log: LogFile, options: ImportOptions) -> Imported:
    """Tables of IMB-MPI1."""
    result = Imported(device="cpu")
    rows = SizeRows(result, options, log.path, _TABLES, _ranks)
    table: SizeTable | None = None
    reductions = "fp32"
    watched = Watched(result, options)
    for number, line, cells in lines_and_cells(log.text):
        watched.look(line)
        benchmark = _BENCHMARK.search(line)
        if benchmark:
            watched.close()
            watched = Watched(result, options)
            table = _begun(number, benchmark.group(1).removeprefix("Multi-"), reductions)
            continue
        kind = _REDUCTION_TYPE.search(line)
        if kind:
            reductions = _DTYPES.get(kind.group(1), kind.group(1).lower())
            if table is not None and table.operation in REDUCING:
                table.dtype = reductions
        _describe(result, line)
        words = table.entries(line, cells, _TABLES, _read_heading) if table is not None else []
        if table is not None and words:
            failed = next((text for text in _FAILED if text in line), None)
            unsaid = "its table does not say the number of processes" if table.ranks is None else None
            rows.take(table, number, line, words, why=f"not measured: {failed}" if failed else unsaid)
            watched.row(number, line)
    watched.close()
    result.dropped.sort(key=lambda item: item.line)
    if table is None:
        raise NotOfFormat(f"{log.path} holds no table of IMB: none begins with '# Benchmarking'")
    return result


def _begun(number: int, name: str, reductions: str) -> SizeTable:
    operation = _OPERATIONS.get(name.lower(), "")
    refusal = None if operation else f"{name}: ParaDL does not model this operation"
    dtype = reductions if operation in REDUCING else "int8"
    return SizeTable(line=number, operation=operation, dtype=dtype, refusal=refusal)


def _ranks(table: SizeTable) -> int:
    return 2 if table.operation == "send_recv" else table.ranks or 1


def _describe(result: Imported, line: str) -> None:
    version = _VERSION.search(line)
    if version:
        result.versions["imb"] = (version.group(1) or version.group(2)).rstrip(".,")
    mpi = _MPI.search(line)
    if mpi:
        result.versions["mpi standard"] = mpi.group(1)


def _read_heading(table: SizeTable, line: str) -> bool:
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


IMPORTER = Importer(name="imb", reads="Intel MPI Benchmarks: tables of IMB-MPI1", kind="collectives", reader=_read)
