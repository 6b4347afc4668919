"""What a measurement knows of where it was made: device, host, versions, settings, variables, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from paradl_bench.core.errors import UserError
from paradl_bench.ranks.emulated_nodes.cluster import nodes_of_rank
from paradl_bench.ranks.rank_place import cluster_or_host, whole_number
from paradl_bench.records.emulation import EmulatedLayers, Emulation
from paradl_bench.records.measurement import Environment

ALLOCATOR_VARIABLES: dict[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(4 * 1024**3),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
    # Before 2.35 glibc refused thresholds above 32 MiB, and then maps whatever is larger than 128 KiB anew each time.
    "MALLOC_MMAP_MAX_": "0",
    # An arena of a thread's own is of heaps of 64 MiB, which go back to the kernel whatever the thresholds: what a
    # communication library's threads allocate for a reduce-scatter then takes three times as long, by chance.
    "MALLOC_ARENA_MAX": "1",
}
"""glibc keeps freed memory instead of returning it: page faults drop a hundredfold and the spread of times by half."""

_PREFIXES = ("NCCL_", "CUDA_", "OMP_", "MKL_", "MALLOC_", "GLOO_", "TORCH_", "SLURM_JOB", "SLURM_N", "KMP_")
_PREFIXES_OF_MPI = ("OMPI_MCA_", "UCX_", "FI_", "I_MPI_")
_VOLATILE_VARIABLES = {"TORCHELASTIC_RUN_ID"}


def capture_environment(device: str, *, settings: dict[str, str], layers: EmulatedLayers | None = None) -> Environment:
    """Describe this process's device, host and software.

    Args:
        settings: what else changes a kernel, as the command chose it (threads, layout, TF32, pinning).
        layers: that slept; None where they computed.

    Raises:
        UserError: torch is missing, or the device is not there.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: torch sees no GPU here; run on a GPU machine, or with --device cpu")
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name, count, memory = properties.name, torch.cuda.device_count(), int(properties.total_memory)
    else:
        name, count, memory = cpu_name(), len(os.sched_getaffinity(0)), host_memory_bytes()
    nodes = nodes_of_rank()
    return Environment(
        device=device,
        device_name=name,
        device_count=host_cores() if device == "cpu" else count,
        memory_bytes=memory,
        hostname=cluster_or_host(),
        kernel=platform.release(),
        versions=versions(),
        settings={
            **_torch_settings(device),
            **settings,
            **{name: os.environ.get(name, "default") for name in ALLOCATOR_VARIABLES},
        },
        variables=recorded_variables(),
        commit=source_commit(),
        emulated=Emulation(nodes=nodes, layers=layers) if nodes or layers else False,
    )


def recorded_variables() -> dict[str, str]:
    """Variables of this process's environment that change what is measured, or say where it was."""
    prefixes = _PREFIXES + _PREFIXES_OF_MPI
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes) and k not in _VOLATILE_VARIABLES}


def host_cores() -> int:
    """Cores that ranks of this host were given.

    Raises:
        UserError: the variable that says so holds something else.
    """
    # A pinned rank sees one core in its own mask; the launcher passes on how many the job was given.
    given = os.environ.get("PARADL_HOST_CORES")
    return len(os.sched_getaffinity(0)) if given is None else max(1, whole_number("PARADL_HOST_CORES", given))


def _torch_settings(device: str) -> dict[str, str]:
    import torch

    settings = {"threads": str(torch.get_num_threads())}
    if device == "cpu":
        settings["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    else:
        settings["tf32_matmul"] = str(torch.backends.cuda.matmul.allow_tf32)
        settings["tf32_cudnn"] = str(torch.backends.cudnn.allow_tf32)
        settings["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
    return settings


def versions() -> dict[str, str]:
    """Versions of Python, torch and what torch was built with, and of this program."""
    known = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "numpy", "paradl"):
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in known:
        import torch

        if torch.version.cuda and torch.cuda.is_available():
            known["cuda"] = torch.version.cuda
            known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            known["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
            known["driver"] = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    return known


def _printed(*command: str) -> str:
    """The first line that a program prints; empty where the program is not there."""
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return result.stdout.partition("\n")[0].strip()


def cpu_name() -> str:
    """The CPU's model name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def host_memory_bytes() -> int:
    """Physical memory of the host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def source_commit() -> str | None:
    """Commit of the source tree that this program runs from; None for an installed copy or without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return _printed("git", "-C", str(root), "rev-parse", "--short=12", "HEAD") or None
