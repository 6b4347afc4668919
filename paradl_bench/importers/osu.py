"""OSU micro-benchmarks: latency tables of collectives and of point to point.

    # OSU MPI-CUDA Allreduce Latency Test v5.7
    # Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
    4                      28.87             28.29             29.50        1000

or the same columns between pipes, as in Markdown.

``-f`` adds all columns behind the average. Average, least and largest are over ranks, each rank's being its mean over
the iterations: a collective takes as long as its slowest rank, so the largest is taken where it stands. The tables say
neither ranks nor hosts.
"""

from __future__ import annotations

import re

from paradl_bench.core.errors import UserError
from paradl_bench.importers.failures import Watched
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat
from paradl_bench.importers.tables.markdown import lines_and_cells
from paradl_bench.importers.tables.size_tables import REDUCING, Benchmarks, SizeRows, SizeTable

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
_LONGEST_HEADING = 1000
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


_TABLES = Benchmarks(
    tool="osu",
    prints="OSU's latency tables",
    size="Size",
    count="Iterations",
    least="Min Latency(us)",
    times=("Max Latency(us)", "Avg Latency(us)", "Latency (us)", "Latency(us)"),
    in_markdown=_IN_MARKDOWN,
    words="Validation",
    wrong=lambda values: values.get("Validation") == "Fail",
    verified=lambda values: values.get("Validation") == "Pass",
    of_mean="no -f: times are means over ranks, not of the slowest rank",
)


def _read(log: LogFile, options: ImportOptions) -> Imported:
    """OSU tables; a user error where neither they nor an option say how many ranks there were."""
    result = Imported(device="cpu")
    rows = SizeRows(result, options, log.path, _TABLES, lambda table: _ranks(result, table, options, log.path))
    table = SizeTable(line=1, refusal="no title of a benchmark stands above it")
    seen = False
    watched = Watched(result, options)
    for number, line, cells in lines_and_cells(log.text):
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
        words = table.entries(line, cells, _TABLES, _read_heading)
        ranks = _ranks_of_command(line) if words else None
        if ranks is not None:
            result.command_lines.append(" ".join(line.split()))
        elif words and seen:
            rows.take(table, number, line, words)
            watched.row(number, line)
    watched.close()
    result.dropped.sort(key=lambda item: item.line)
    if not seen:
        raise NotOfFormat(f"{log.path} holds no table of the OSU micro-benchmarks: no '# OSU MPI ... Test'")
    return result


def _titled(number: int, title: re.Match[str]) -> SizeTable:
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
        refusal = f"{name} ({family}): ParaDL does not model this operation"
    dtype = "fp32" if operation in REDUCING else "int8"
    return SizeTable(line=number, library=library, operation=operation, dtype=dtype, refusal=refusal)


def _read_heading(table: SizeTable, line: str) -> bool:
    """Take up what a line above the rows says; whether the line is one."""
    if not line.lstrip().startswith("#"):
        return False
    datatype = _DATATYPE.match(line.strip())
    heading = line.strip("# \t")
    if datatype:
        table.dtype = _DTYPES.get(datatype.group(1), datatype.group(1).lower())
    elif heading.startswith("Size") and len(heading) <= _LONGEST_HEADING:
        names = tuple(name.strip() for name in _COLUMN.findall(heading.replace("Size", "Size()", 1)))
        if names and names[0] == "Size()":
            table.columns = ("Size", *names[1:])
    return True


def _ranks_of_command(line: str) -> int | None:
    """Ranks of a line that holds ``mpirun -np 8`` or ``srun -n 8``; None where it holds no such command."""
    command = _LAUNCHER.search(line)
    counts = [int(count) for count in _RANKS.findall(command.group(1))] if command else []
    return next((count for count in counts if count > 0), None)


def _ranks(result: Imported, table: SizeTable, options: ImportOptions, path: str) -> int:
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
