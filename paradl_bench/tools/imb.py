"""Intel MPI Benchmarks: one program for all operations, which reads its sizes from a file.

Several groups at once are its ``-multi 0``, which prints the slowest group's times. They are of neighbouring ranks.
"""

from __future__ import annotations

from paradl_bench.core.files.storage import write_text_atomically
from paradl_bench.tools.tool import Job, SweepTool

_BENCHMARKS = {
    "all_reduce": "Allreduce",
    "all_gather": "Allgather",
    "reduce_scatter": "Reduce_scatter",
    "broadcast": "Bcast",
    "reduce": "Reduce",
    "send_recv": "PingPong",
}


def _arguments(job: Job) -> list[str]:
    # A reduce-scatter's size is of what all ranks keep together.
    factor = job.ranks if job.operation == "reduce_scatter" else 1
    sizes = job.folder / f"{job.stem}.sizes"
    write_text_atomically(sizes, "".join(f"{factor * size}\n" for size in job.message_bytes))
    multi = ["-multi", "0"] if job.concurrent > 1 else []
    return [_BENCHMARKS[job.operation], "-npmin", str(job.ranks), *multi, "-msglen", str(sizes)]


TOOL = SweepTool(
    name="imb",
    reads="imb",
    backend="mpi",
    programs={operation: ("IMB-MPI1",) for operation in _BENCHMARKS},
    places=("", "bin"),
    arguments=_arguments,
    groups="at once",
)
