"""A sweep of our own over MPI (mpi4py): raw times of every rank, every result verified; a launcher starts it."""

from __future__ import annotations

import sys

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.importers.importer import Imported, ImportOptions, LogFile
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.tools.tool import Job, SweepTool

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send_recv")


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line of what the program writes: where it ran, the host of every rank in the order of ranks."""

    hosts: tuple[str, ...]
    device_name: str
    versions: dict[str, str]


def read(log: LogFile, options: ImportOptions) -> Imported:
    """Read what the program wrote: a head, UserError without one, then a record a size; a broken one is dropped."""
    lines = log.content.split(b"\n")
    try:
        head = msgspec.json.decode(lines[0], type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UserError(f"{log.path} is no sweep over MPI") from None
    held = Imported(device="cpu", device_names={head.device_name}, hosts=set(head.hosts), versions=dict(head.versions))
    held.ranks_per_host = max(head.hosts.count(host) for host in held.hosts)
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=CollectiveSamples)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            held.drop(number, line.decode("utf-8", errors="replace"), f"torn: {error}")
            continue
        if not record.verified:
            held.drop(number, f"{record.operation} {record.message_bytes} bytes", "wrong results")
            continue
        held.collectives.append(msgspec.structs.replace(record, source=f"{log.path}:{number}"))
        held.rows += 1
    return held


def _arguments(job: Job) -> list[str]:
    sizes = ",".join(map(str, job.message_bytes))
    program = ["-P", "-m", "paradl_bench.tools.mpi_program"]
    return [*program, job.operation, sizes, str(job.point_s), str(job.concurrent), str(job.report_path)]


TOOL = SweepTool(
    name="mpi4py",
    backend="mpi",
    programs={operation: (sys.executable,) for operation in OPERATIONS},
    arguments=_arguments,
    groups="with alone",
    read=read,
)
