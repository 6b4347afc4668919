"""What surrounds a call that is measured in a context: compute before it, and an all-reduce in flight."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from paradl_bench.measure.collectives.beside_compute import Kernel, random_tensors
from paradl_bench.measure.collectives.calls import Calls
from paradl_bench.measure.collectives.ghosts_before import GhostsBefore
from paradl_bench.plan.collectives.routine import ELEMENT_BYTES
from paradl_bench.ranks.groups.agreement import host_numbers, largest
from paradl_bench.ranks.groups.teams import level_spanned
from paradl_bench.records.emulation import GHOSTS

KERNEL = "layers"
COMPUTE_S = 1e-3
"""Of compute before every call, about: what the layers of small networks take on a core, and more than threads poll."""
EXCHANGE_BYTES, LARGEST_EXCHANGE_BYTES = 25 << 20, 1 << 30
"""DDP's bucket cap; doubled up to the latter until it lasts as long as the calls' compute, twice."""
_WARMUP, _TRIALS = 2, 3


def _layers(device: torch.device) -> Kernel:
    """A 3x3 convolution of 32 channels on 28x28, then a layer from 1024 to 2048: arithmetic, and 8 MiB are read."""
    shapes = (1, 32, 28, 28), (32, 32, 3, 3), (2048, 1024), (4, 1024)
    images, filters, weight, inputs = random_tensors(device, *shapes)

    def kernel() -> None:
        torch.conv2d(images, filters, padding=1)
        torch.mm(inputs, weight.t())

    return kernel


class ComputeBefore:
    """About :data:`COMPUTE_S` of compute on this rank, as many kernels on all, or ghosts that sleep instead."""

    def __init__(self, calls: Calls, ghosts_s: float | None) -> None:
        self.kernel, self.seconds = (KERNEL, COMPUTE_S) if ghosts_s is None else (GHOSTS, ghosts_s)
        self.sleeps = ghosts_s is not None
        self._calls = calls
        self._ghosts = None if ghosts_s is None else GhostsBefore(ghosts_s)
        self._kernel = self._ghosts.run if self._ghosts else _layers(calls.context.device)
        self._rounds = 1 if self._ghosts else self._count_rounds()

    def run(self) -> None:
        """Compute, or on a GPU launch it."""
        for _ in range(self._rounds):
            self._kernel()

    def over(self, stamp: Any) -> Any:
        """When compute was over, or was to be; ``stamp`` is of the call behind it."""
        return stamp if self._ghosts is None else self._ghosts.over

    def _count_rounds(self) -> int:
        """How many calls of the kernel take about :data:`COMPUTE_S`; the same on all ranks."""
        trials = []
        for _ in range(_WARMUP + 5):
            start = time.perf_counter()
            self._kernel()
            self._calls.clock.synchronise()
            trials.append(time.perf_counter() - start)
        kernel_s = largest(self._calls.context, statistics.median(trials[_WARMUP:]))
        return max(1, min(1000, round(COMPUTE_S / kernel_s)))


class _CpuFlight:
    """An all-reduce under way; whether it was at some moment the library is asked at that very moment."""

    def __init__(self, buffer: torch.Tensor, calls: Calls) -> None:
        self._clock = calls.clock
        self._work = dist.all_reduce(buffer, group=calls.context.group, async_op=True)

    def mark(self, stamp: Any) -> Any:
        """Note a moment, which is now; ``stamp`` is the clock's."""
        return float(not self._work.is_completed())

    def land(self) -> Any:
        """Wait for it; the stamp of its end."""
        self._work.wait()
        return self._clock.stamp()

    def were_before_its_end(self, marks: list[Any]) -> list[float]:
        """Of the moments noted, 1 where it was under way; after the clock has been synchronised."""
        return marks


class _CudaFlight:
    """Compares events, the all-reduce's end being one of a stream that waits for it and for nothing else."""

    def __init__(self, buffer: torch.Tensor, calls: Calls) -> None:
        work = dist.all_reduce(buffer, group=calls.context.group, async_op=True)
        with torch.cuda.stream(torch.cuda.Stream(calls.context.device)):  # type: ignore[no-untyped-call]
            work.wait()
            self._end = calls.clock.stamp()

    def mark(self, stamp: Any) -> Any:
        return stamp

    def land(self) -> Any:
        self._end.wait()
        return self._end

    def were_before_its_end(self, marks: list[Any]) -> list[float]:
        return [float(mark.elapsed_time(self._end) > 0) for mark in marks]


class AllReduceInFlight:
    """An all-reduce over all ranks that outlasts some compute twice; alike on all of them.

    Attributes:
        level: that it spans where it goes over more ranks than the calls beside it; else empty.
    """

    def __init__(self, calls: Calls, outlasts_s: float) -> None:
        self._calls = calls
        self.bytes = EXCHANGE_BYTES
        while True:
            self._buffer = torch.zeros(self.bytes // ELEMENT_BYTES, device=calls.context.device)
            self.seconds = largest(calls.context, statistics.median(self._alone_s() for _ in range(_TRIALS)))
            if self.seconds >= 2 * outlasts_s or 2 * self.bytes > LARGEST_EXCHANGE_BYTES:
                break
            self.bytes *= 2
        level = level_spanned(host_numbers(calls.context), range(calls.context.ranks))
        self.level = "" if calls.team.count == 1 else level

    def issue(self) -> _CpuFlight | _CudaFlight:
        """Begin it, and do not wait."""
        of_device = _CudaFlight if self._calls.context.device.type == "cuda" else _CpuFlight
        return of_device(self._buffer, self._calls)

    def _alone_s(self) -> float:
        clock = self._calls.clock
        self._calls.meet()
        start = clock.stamp()
        end = self.issue().land()
        clock.synchronise()
        return clock.seconds(start, end)
