"""OSU micro-benchmarks: a launcher starts one process a rank; sizes double."""

from __future__ import annotations

import functools

from paradl_bench.tools.tool import Job, SweepTool, geometric_runs


def _arguments(job: Job) -> list[str]:
    # A reduce-scatter's size is of what all ranks keep together.
    factor = job.ranks if job.operation == "reduce_scatter" else 1
    first, last = (factor * job.message_bytes[index] for index in (0, -1))
    if job.operation == "send_recv":
        # Point to point knows neither the limit of memory nor -f, and ends at options that it does not know.
        return ["-m", f"{first}:{last}"]
    # -f adds the slowest rank's time.
    return ["-m", f"{first}:{last}", "-M", str(max(1 << 29, 4 * last * job.ranks)), "-f"]


# Where make install puts them, and where they are built; version 7 made folders below.
_ROOTS = ("", "mpi", "c/mpi", "libexec/osu-micro-benchmarks/mpi")
_FOLDERS = ("", "collective", "pt2pt", "collective/blocking", "pt2pt/standard")

TOOL = SweepTool(
    name="osu",
    reads="osu",
    backend="mpi",
    programs={
        "all_reduce": ("osu_allreduce",),
        "all_gather": ("osu_allgather",),
        "reduce_scatter": ("osu_reduce_scatter",),
        "broadcast": ("osu_bcast",),
        "reduce": ("osu_reduce",),
        "send_recv": ("osu_latency",),
    },
    places=tuple(f"{root}/{folder}".strip("/") for root in _ROOTS for folder in _FOLDERS),
    arguments=_arguments,
    at_once=functools.partial(geometric_runs, factors=(2,)),
    no_groups="its collectives run over all ranks that are started",
)
