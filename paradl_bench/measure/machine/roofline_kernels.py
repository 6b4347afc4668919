"""Kernels that show what a device can do: products and convolutions for FLOP/s, copies and triads for bytes/s."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paradl_bench.core.units import parse_size
from paradl_bench.ranks.environment import host_memory_bytes
from paradl_bench.records.roofline_record import Resource

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
"""What operands are stored as; tf32 is a setting of products of fp32."""
_ELEMENT_BYTES = 4
_UNKNOWN_CACHE_BYTES = 64 * 1024**2
_BEYOND_CACHES = (4, 8)
"""Working sets over the last cache: what is left of it in the cache between two calls is a small part."""
_MEMORY_SHARE = 8
_MATMUL_EXTENTS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_CONVOLUTIONS = ((64, 56), (128, 28), (256, 14))
"""Channels and extent of ResNet's 3x3 convolutions."""
_CONV_BATCH = {"cpu": 8, "cuda": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateKernel:
    """One kernel at one size; ``prepare`` makes its operands and gives what runs it once."""

    resource: Resource
    name: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    work: float
    working_set_bytes: int
    prepare: Callable[[], Callable[[], object]]

    @property
    def key(self) -> tuple[str, str, tuple[tuple[str, int], ...]]:
        """What tells it from others."""
        return self.name, self.dtype, self.sizes


def rate_kernels(device: torch.device, dtypes: tuple[str, ...], ranks: int) -> list[RateKernel]:
    """Kernels of all resources, of sizes such that those of all ranks fit into the host's memory and caches."""
    kernels = [_matmul(device, dtype, extent) for dtype in dtypes for extent in _MATMUL_EXTENTS[device.type]]
    kernels += [_conv(device, dtype, *shape) for dtype in dtypes for shape in _CONVOLUTIONS]
    return kernels + _streams(device, ranks)


@contextlib.contextmanager
def products_in(dtype: str) -> Iterator[None]:
    """Products and convolutions of fp32 with or without TensorFloat-32, as ``dtype`` says; undone afterwards."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = dtype == "tf32"
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def _matmul(device: torch.device, dtype: str, extent: int) -> RateKernel:
    def prepare() -> Callable[[], object]:
        left, right = (torch.randn(extent, extent, device=device).to(DTYPES[dtype]) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    return RateKernel(
        resource="compute",
        name="matmul",
        dtype=dtype,
        sizes=(("n", extent),),
        work=2.0 * extent**3,
        working_set_bytes=3 * extent**2 * DTYPES[dtype].itemsize,
        prepare=prepare,
    )


def _conv(device: torch.device, dtype: str, channels: int, extent: int) -> RateKernel:
    batch = _CONV_BATCH[device.type]

    def prepare() -> Callable[[], object]:
        inputs = torch.randn(batch, channels, extent, extent, device=device).to(DTYPES[dtype])
        filters = torch.randn(channels, channels, 3, 3, device=device).to(DTYPES[dtype])
        return lambda: torch.conv2d(inputs, filters, None, 1, 1)

    elements = 2 * batch * channels * extent**2 + 9 * channels**2
    return RateKernel(
        resource="compute",
        name="conv",
        dtype=dtype,
        sizes=(("batch", batch), ("channels", channels), ("extent", extent), ("kernel", 3)),
        work=2.0 * 9 * batch * channels**2 * extent**2,
        working_set_bytes=elements * DTYPES[dtype].itemsize,
        prepare=prepare,
    )


def _streams(device: torch.device, ranks: int) -> list[RateKernel]:
    inner, last = cache_bytes(device)
    memory = host_memory_bytes() if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory
    most = memory // _MEMORY_SHARE // (ranks if device.type == "cpu" else 1)
    sets: list[tuple[Resource, int]] = [("memory", min(times * last, most)) for times in _BEYOND_CACHES]
    sets += [("cache", inner // 2)] if inner < last else []
    # Ranks share the last cache of a CPU: what each keeps there has to leave room for the others.
    sets += [("cache", last // (4 * (ranks if device.type == "cpu" else 1)))]
    return [
        _stream(device, resource, size, name, arrays)
        for resource, size in dict.fromkeys(sets)
        for name, arrays in (("copy", 2), ("triad", 3))
    ]


def _stream(device: torch.device, resource: Resource, working_set_bytes: int, name: str, arrays: int) -> RateKernel:
    elements = working_set_bytes // arrays // _ELEMENT_BYTES
    moved = arrays * elements * _ELEMENT_BYTES

    def prepare() -> Callable[[], object]:
        out, left, *rest = (torch.ones(elements, device=device) for _ in range(arrays))
        if not rest:
            return lambda: out.copy_(left)
        (right,) = rest
        return lambda: torch.add(left, right, alpha=3.0, out=out)

    return RateKernel(
        resource=resource,
        name=name,
        dtype="fp32",
        sizes=(("elements", elements),),
        work=float(moved),
        working_set_bytes=moved,
        prepare=prepare,
    )


def cache_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes of the second and of the last cache of a core, as its kernel tells; of a GPU its L2 twice."""
    if device.type == "cuda":
        last = int(torch.cuda.get_device_properties(device).L2_cache_size) or _UNKNOWN_CACHE_BYTES
        return last, last
    sizes = caches_of_core()
    if not sizes:
        levels = (os.sysconf(f"SC_LEVEL{level}_CACHE_SIZE") for level in (2, 3))
        sizes = [size for size in levels if size > 0] or [_UNKNOWN_CACHE_BYTES]
    return sizes[0], sizes[-1]


def caches_of_core() -> list[int]:
    """Bytes of the caches from the second level out, as far as sysfs tells."""
    sizes: dict[int, int] = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            level = int((index / "level").read_text())
            sizes[level] = parse_size((index / "size").read_text().strip())
    return [size for level, size in sorted(sizes.items()) if level > 1]
