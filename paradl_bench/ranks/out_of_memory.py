"""Memory that runs out in the middle of a run: what was needed, and what there was.

Known are torch's own errors, of the GPU's allocator and the CPU's, and Python's. Needed is what the process holds
and what it asked for; had is the device's memory on a GPU, and on a CPU the limit of the process's address space where
one is set, else the host's memory. A process that the kernel kills says nothing of it; its launcher does.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

from paradl_bench.core.units import format_bytes
from paradl_bench.ranks.rank_place import DOES_NOT_FIT
from paradl_bench.records.training.training_record import MemoryShortage

_ON_CPU = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_ON_GPU = re.compile(r"Tried to allocate ([\d.]+) (B|KiB|MiB|GiB)")
_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_PAGE_BYTES = resource.getpagesize()


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or bool(_ON_CPU.search(str(error)))


def shortage(error: BaseException, rank: int, phase: str, device: torch.device) -> MemoryShortage:
    """What was needed and had when memory ran out, at the moment of the error."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device)
        had = torch.cuda.get_device_properties(device).total_memory
    else:
        held, had = _of_process()
    requested = _requested(str(error))
    return MemoryShortage(
        rank=rank, phase=phase, requested_bytes=requested, needed_bytes=held + requested, had_bytes=had
    )


def describe_shortage(lacked: MemoryShortage) -> str:
    """One line."""
    asked = f", asked for {format_bytes(lacked.requested_bytes)} in" if lacked.requested_bytes else ", in"
    return (
        f"{DOES_NOT_FIT}: needed {format_bytes(lacked.needed_bytes)}, had {format_bytes(lacked.had_bytes)}"
        f" (rank {lacked.rank}{asked} {lacked.phase}); run.json keeps that"
    )


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now, by all ranks of the device or of the host together."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    of_host = _of_host("MemAvailable")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return of_host
    taken, _ = _of_process()
    return min(of_host, limit - taken)


def _requested(message: str) -> int:
    """Bytes that were asked for; 0 where the error does not say."""
    on_cpu, on_gpu = _ON_CPU.search(message), _ON_GPU.search(message)
    if on_cpu:
        return int(on_cpu.group(1))
    return int(float(on_gpu.group(1)) * _UNITS[on_gpu.group(2)]) if on_gpu else 0


def _of_process() -> tuple[int, int]:
    """Bytes that the process holds, and may hold, by whichever limit it is under."""
    pages, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return pages * _PAGE_BYTES, limit
    return resident * _PAGE_BYTES, _of_host("MemTotal")


def _of_host(name: str) -> int:
    """Bytes that the kernel says of the host's memory; 0 where it does not."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
