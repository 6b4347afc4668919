"""nccl-tests: one process drives all GPUs of a host, or a launcher starts one a GPU.

Several groups at once are made of processes by the variable NCCL_TESTS_SPLIT (README, "Running multiple operations in
parallel"); ``MOD K`` puts process r into group r modulo K. Where mpirun starts them on other hosts it has to be told to
pass the variable on (Open MPI: -x NCCL_TESTS_SPLIT); that it was not is seen in the groups that the log lists.
"""

from __future__ import annotations

from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.tools.tool import Job, SweepTool, geometric_runs


def _arguments(job: Job) -> list[str]:
    factor = operations()[job.operation].size_factor(job.ranks)
    # nccl-tests' size is its largest buffer: of all ranks together where each has a part.
    first, last = (round(factor * job.message_bytes[index]) for index in (0, -1))
    step = job.message_bytes[1] // job.message_bytes[0] if len(job.message_bytes) > 1 else 2
    gpus = job.ranks if job.own else 1
    report = ["-J", str(job.report_path)] if job.report else []
    return ["-b", str(first), "-e", str(last), "-f", str(step), "-g", str(gpus), *report]


def _variables(job: Job) -> dict[str, str]:
    return {"NCCL_TESTS_SPLIT": f"MOD {job.concurrent}"} if job.concurrent > 1 else {}


TOOL = SweepTool(
    name="nccl-tests",
    reads="nccl-tests",
    backend="nccl",
    # Builds with MPI may carry a suffix.
    programs={
        "all_reduce": ("all_reduce_perf", "all_reduce_perf_mpi"),
        "all_gather": ("all_gather_perf", "all_gather_perf_mpi"),
        "reduce_scatter": ("reduce_scatter_perf", "reduce_scatter_perf_mpi"),
        "broadcast": ("broadcast_perf", "broadcast_perf_mpi"),
        "reduce": ("reduce_perf", "reduce_perf_mpi"),
        "send_recv": ("sendrecv_perf", "sendrecv_perf_mpi"),
    },
    places=("", "build", "bin"),
    alone=True,
    arguments=_arguments,
    at_once=geometric_runs,
    groups="at once",
    variables=_variables,
    report_flag="--output_file",
)
