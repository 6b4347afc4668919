"""How much slower compute and a collective each are while both run on every rank: interference.

The simulator lets compute run 1/s_c and communication 1/s_m as fast while both are active. So both are measured in a
steady state in which neither ever pauses: a fixed number of all-reduces is issued back to back while compute kernels
repeat, and the work that each finishes in that window is counted. A collective alone is one at a time, as in the sweep
whose times the simulator slows down. Alone and beside alternate, so that a slow spell of the machine falls on both.

Ranks, cores and threads are as in training: gloo's threads inherit the one core of the rank that made them, as they do
under DDP, and share it with the kernels; NCCL's kernels take multiprocessors from those of compute. On emulated nodes
ghosts stand for compute: what dispatches them takes the cores that gloo reduces and copies on.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist

from paradl_bench.measure.collectives.calls import Calls
from paradl_bench.measure.collectives.ghosts_before import GhostsBefore, ghosts_seconds
from paradl_bench.plan.collectives.routine import ELEMENT_BYTES
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.ranks.groups.agreement import everyones, largest
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.records.emulation import GHOSTS

Kernel = Callable[[], None]

OPERATION = "all_reduce"
MESSAGE_BYTES = (1 << 20, 4 << 20, 25 << 20)
"""DDP's first bucket, one between, and its bucket cap."""
GROUPS = 2
"""Alone-beside groups a record."""
WINDOW_S = 0.12
"""Of compute alone, and of communication alone; side by side the same number of collectives is run."""
IN_FLIGHT = 2
"""Collectives issued and not yet finished beside compute: the next is queued when one ends, as DDP's buckets are."""
MIN_CALLS, MAX_CALLS = 4, 500


def random_tensors(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Operands of a kernel: the same numbers on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def _conv2d(device: torch.device) -> Kernel:
    """Backward of a 3x3 convolution, 64 channels on 28x28, batch 4: bound by arithmetic, as most of a CNN's."""
    inputs, weight, gradient = random_tensors(device, (4, 64, 28, 28), (64, 64, 3, 3), (4, 64, 28, 28))

    def kernel() -> None:
        torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )

    return kernel


def _linear(device: torch.device) -> Kernel:
    """Backward of a layer from 2048 to 2048, batch 8: bound by memory, 16 MiB of weights read, 16 written."""
    inputs, weight, gradient = random_tensors(device, (8, 2048), (2048, 2048), (8, 2048))
    to_inputs, to_weight = torch.empty_like(inputs), torch.empty_like(weight)

    def kernel() -> None:
        torch.mm(gradient, weight, out=to_inputs)
        torch.mm(gradient.t(), inputs, out=to_weight)

    return kernel


KERNELS: dict[str, Callable[[torch.device], Kernel]] = {"conv2d": _conv2d, "linear": _linear}


def order_beside_compute(seed: int, block: int, layout: NodeLayout | None = None) -> list[tuple[str, int]]:
    """Kernels and message sizes of one block, shuffled: alike on all ranks, unlike in all blocks."""
    points = [(kernel, size) for kernel in (KERNELS if layout is None else (GHOSTS,)) for size in MESSAGE_BYTES]
    random.Random(f"{seed} beside {block}").shuffle(points)
    return points


class _CpuStreams:
    """Runs compute and all-reduces, alone or side by side, and counts what each finishes.

    Compute is on the calling thread; a second thread issues collectives, which the backend's own threads carry out.
    ``buffers`` has shape (IN_FLIGHT, elements): collectives that are issued at once have a row each.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._issuer = ThreadPoolExecutor(max_workers=1)
        self._group = group

    def compute(self, kernel: Kernel) -> float:
        """Seconds a call of the kernel, repeated for :data:`WINDOW_S`."""
        calls, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < WINDOW_S or calls < MIN_CALLS:
            kernel()
            calls += 1
        return elapsed / calls

    def communicate(self, buffers: torch.Tensor, count: int) -> float:
        """Seconds a collective of ``count``, one after the other."""
        start, end = self._issue(buffers[:1], count)
        return (end - start) / count

    def both(self, kernel: Kernel, buffers: torch.Tensor, count: int) -> tuple[float, float]:
        """(seconds a call of the kernel, seconds a collective) while both are active."""
        # Compute is under way before the first collective and until after the last.
        ends = [time.perf_counter()]
        issued = self._issuer.submit(self._issue, buffers, count)
        while not issued.done():
            kernel()
            ends.append(time.perf_counter())
        start, end = issued.result()
        return (end - start) / _finished_between(ends, start, end), (end - start) / count

    def _issue(self, buffers: torch.Tensor, count: int) -> tuple[float, float]:
        """Run ``count`` all-reduces, as many issued at any time as there are buffers; when they started and ended."""
        start = time.perf_counter()
        works = [dist.all_reduce(buffer, group=self._group, async_op=True) for buffer in buffers]
        for index in range(count):
            works[index].wait()
            if len(works) < count:
                works.append(dist.all_reduce(buffers[index % len(buffers)], group=self._group, async_op=True))
        return start, time.perf_counter()


class _CudaStreams:
    """The same on the current stream; collectives are waited for on a side stream, so that the host never blocks."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def compute(self, kernel: Kernel) -> float:
        start = _event()
        ends = [_event()]
        while start.elapsed_time(ends[-1]) / 1e3 < WINDOW_S or len(ends) <= MIN_CALLS:
            ends.extend(_launch(kernel) for _ in range(MIN_CALLS))
            ends[-1].synchronize()
        return _seconds(start, ends[-1]) / (len(ends) - 1)

    def communicate(self, buffers: torch.Tensor, count: int) -> float:
        start, end = self._issue(buffers, count)
        end.synchronize()
        return _seconds(start, end) / count

    def both(self, kernel: Kernel, buffers: torch.Tensor, count: int) -> tuple[float, float]:
        origin = _event()
        marks = [origin]
        start, end = self._issue(buffers, count)
        while not end.query():  # type: ignore[no-untyped-call]
            marks.append(_launch(kernel))
            # A few kernels ahead: the GPU never idles, and little runs on after the last collective.
            if len(marks) > MIN_CALLS:
                marks[-MIN_CALLS].synchronize()
        marks.append(_launch(kernel))
        torch.cuda.synchronize()
        ends = [_seconds(origin, mark) for mark in marks]
        first, last = _seconds(origin, start), _seconds(origin, end)
        return (last - first) / _finished_between(ends, first, last), (last - first) / count

    def _issue(self, buffers: torch.Tensor, count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            start = _event()
            for index in range(count):
                dist.all_reduce(buffers[index % IN_FLIGHT], group=self._group, async_op=True).wait()
            return start, _event()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _launch(kernel: Kernel) -> torch.cuda.Event:
    kernel()
    return _event()


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


class BesideComputeBench:
    """Measures one kernel beside all-reduces of one size, on all ranks at once, in the groups of a sweep.

    With a layout of emulated nodes ranks sleep instead of computing.
    """

    def __init__(self, calls: Calls, layout: NodeLayout | None) -> None:
        context, group = calls.context, calls.team.process_group
        self._calls, self._context = calls, context
        on_gpu = context.device.type == "cuda"
        self._streams = _CudaStreams(context.device, group) if on_gpu else _CpuStreams(group)
        self._kernels = (
            {name: build(context.device) for name, build in KERNELS.items()}
            if layout is None
            else {GHOSTS: GhostsBefore(ghosts_seconds(layout.ranks)).run}
        )
        self._pool = torch.zeros(IN_FLIGHT * max(MESSAGE_BYTES) // ELEMENT_BYTES, device=context.device)
        self._counts = {size: self._count(size) for size in MESSAGE_BYTES}
        for kernel in self._kernels.values():
            kernel()

    def measure(self, kernel_name: str, size: int, block: int) -> list[ContextSamples]:
        """A record a group, alike on every rank."""
        kernel, buffers, count = self._kernels[kernel_name], self._buffers(size), self._counts[size]
        rows = []
        for _ in range(GROUPS):
            self._calls.meet()
            compute_alone = self._streams.compute(kernel)
            self._calls.meet()
            communication_alone = self._streams.communicate(buffers, count)
            self._calls.meet()
            rows.append((compute_alone, communication_alone, *self._streams.both(kernel, buffers, count)))
        compute_alone_s, communication_alone_s, compute_beside_s, communication_beside_s = (
            everyones(self._context, column) for column in zip(*rows, strict=True)
        )
        return [
            ContextSamples(
                **self._calls.about(OPERATION, size, block, members),
                context="with-compute",
                neighbour=kernel_name,
                # Means over a window, in which no rank is late.
                idle_end_s=tuple(communication_alone_s[rank] for rank in members),
                end_s=tuple(communication_beside_s[rank] for rank in members),
                neighbour_s=tuple(compute_beside_s[rank] for rank in members),
                neighbour_idle_s=tuple(compute_alone_s[rank] for rank in members),
            )
            for members in self._calls.team.groups
        ]

    def estimate_s(self, steps: Sequence[object]) -> float:
        """About how long measurements take, from a few collectives beside a kernel at each size."""
        kernel = next(iter(self._kernels.values()))
        beside_s = []
        for size, count in self._counts.items():
            self._calls.meet()
            beside_s.append(count * self._streams.both(kernel, self._buffers(size), MIN_CALLS)[1])
        return GROUPS * (2 * WINDOW_S + statistics.mean(beside_s)) * len(steps)

    def _count(self, size: int) -> int:
        """How many collectives fill the window alone; the same on all ranks, which have to issue equally many."""
        trials = [self._streams.communicate(self._buffers(size), MIN_CALLS) for _ in range(3)]
        call_s = largest(self._context, statistics.median(trials))
        return max(MIN_CALLS, min(MAX_CALLS, round(WINDOW_S / call_s)))

    def _buffers(self, size: int) -> torch.Tensor:
        return self._pool[: IN_FLIGHT * size // ELEMENT_BYTES].view(IN_FLIGHT, -1)


def _finished_between(ends: list[float], start: float, end: float) -> float:
    """How many kernel calls were finished in between; ``ends`` begins with when the first call began."""
    counts = np.interp([start, end], ends, np.arange(len(ends)))
    return float(counts[1] - counts[0])
