"""Collectives behind compute: what a layer's communication takes once the last rank has arrived.

A repetition is a pair. A: the call right behind a barrier, as a sweep makes it. B: about a millisecond of compute on
every rank, then the call. Compute does what layers do before a run's collectives: it fills the caches with other data
and leaves the communication library's threads asleep. Both are of one run, so that a slow spell falls on both.

On emulated nodes ghosts of a few layers stand for compute, as they do in what is trained there: ranks share this host's
cores, and what they compute on them is no part of what is emulated. A call counts from the moment at which they were to
be over, since ranks on one core begin their calls one after the other. What precedes them is a call as well, and no
barrier: that one lets ranks go by and by, while a call lets them go as the next call finds them. What follows is what
follows in a run: what a gather brought is put in its places, and ghosts are dispatched. Where ranks share a core, one
that is done keeps another from ending its part of the call meanwhile: that is a quarter of what short gathers take.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from paradl_bench.measure.collectives.calls import Calls
from paradl_bench.measure.collectives.ghosts_before import GhostsBefore, ghosts_seconds
from paradl_bench.measure.collectives.interference import Kernel
from paradl_bench.plan.collectives.catalog import routines
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.ranks.groups.agreement import everyones, largest
from paradl_bench.records.cluster import NODE
from paradl_bench.records.contexts.behind import BehindComputeSamples
from paradl_bench.records.emulation import GHOSTS

KERNEL = "layers"
COMPUTE_S = 1e-3
"""Of compute before every call, about: what the layers of small networks take on a core, and more than threads poll."""
MOST_SIZES = 6
LARGEST_BYTES = 16 << 20
"""What compute adds to a call is nothing beside longer ones."""
MIN_PAIRS, MAX_PAIRS = 5, 60
_WARMUP = 2
_SAMPLES = 16
"""Of a batch whose gathered parts are put in their places; at most."""


def behind_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a sweep's sizes that are measured behind compute: at most six, spread evenly, up to 16 MiB."""
    chosen = sorted(size for size in set(sizes) if size <= LARGEST_BYTES) or [min(sizes)]
    count = min(MOST_SIZES, len(chosen))
    places = [round(index * (len(chosen) - 1) / max(count - 1, 1)) for index in range(count)]
    return tuple(chosen[place] for place in places)


def behind_order(operations: tuple[str, ...], sizes: tuple[int, ...], seed: int, block: int) -> list[tuple[str, int]]:
    """Operations and sizes of one block, shuffled: alike on all ranks, unlike in all blocks."""
    points = [(name, size) for name in operations for size in behind_sizes(sizes)]
    random.Random(f"{seed} behind {block}").shuffle(points)
    return points


def _layers(device: torch.device) -> Kernel:
    """A 3x3 convolution of 32 channels on 28x28, then a layer from 1024 to 2048: arithmetic, and 8 MiB are read."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 32, 28, 28, generator=generator).to(device)
    filters = torch.randn(32, 32, 3, 3, generator=generator).to(device)
    weight = torch.randn(2048, 1024, generator=generator).to(device)
    inputs = torch.randn(4, 1024, generator=generator).to(device)

    def kernel() -> None:
        torch.conv2d(images, filters, padding=1)
        torch.mm(inputs, weight.t())

    return kernel


class ComputeBefore:
    """About :data:`COMPUTE_S` of compute on this rank; as many kernels on all ranks.

    Args:
        ghosts_s: that ghosts sleep instead; None where ranks compute.

    Attributes:
        kernel: its name.
        seconds: about how long it takes.
    """

    def __init__(self, calls: Calls, ghosts_s: float | None) -> None:
        self.kernel, self.seconds = (KERNEL, COMPUTE_S) if ghosts_s is None else (GHOSTS, ghosts_s)
        self._calls = calls
        self._ghosts = None if ghosts_s is None else GhostsBefore(ghosts_s)
        self._kernel = self._ghosts.run if self._ghosts else _layers(calls.context.device)
        self._rounds = 1 if self._ghosts else self._count_rounds()

    def run(self) -> None:
        """Compute, or on a GPU launch it."""
        for _ in range(self._rounds):
            self._kernel()

    def over(self, stamp: Any) -> Any:
        """When compute was over, or was to be.

        Args:
            stamp: of the call behind it.
        """
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


class BehindBench:
    """Measures operations behind compute, on all ranks at once: of one group, or of groups side by side.

    Args:
        layout: of emulated nodes, where ranks sleep instead of computing; None of real ones.
    """

    def __init__(self, calls: Calls, point_s: float, attempt: int, layout: NodeLayout | None) -> None:
        self._calls = calls
        self._attempt = attempt
        self._point_s = point_s
        self._compute = ComputeBefore(calls, ghosts_seconds(layout.ranks) if layout else None)

    def measure(self, operation: str, size: int, block: int) -> list[BehindComputeSamples]:
        """One operation and size, a record a group; the same on all ranks. The sweep before has verified results."""
        calls, routine = self._calls, routines()[operation]
        buffers = calls.buffers(routine, size)
        buffers.clear()
        pair_s = self._lead_s + 2 * largest(calls.context, calls.warm(routine, buffers, _WARMUP))
        count = max(MIN_PAIRS, min(MAX_PAIRS, round(self._point_s / pair_s)))
        columns = list(zip(*(self._pair(operation, size) for _ in range(count)), strict=True))
        told = [everyones(calls.context, column) for column in columns]
        return [self._record(operation, size, block, members, told) for members in calls.team.groups]

    def _record(
        self, operation: str, size: int, block: int, members: range, told: Sequence[Sequence[tuple[float, ...]]]
    ) -> BehindComputeSamples:
        """What the ranks of a group have told: seconds back to back and of compute, starts and ends."""
        calls = self._calls
        alone, compute, start, end = told
        sides = [members[side] for side in routines()[operation].sides(len(members))]
        one_clock = calls.context.device.type == "cpu" and calls.team.level == NODE
        count = len(start[0])
        # Of stamps on clocks of their own, only a rank's differences mean anything.
        origin = [min(start[rank][i] for rank in sides) for i in range(count)] if one_clock else None
        own = [[origin[i] if origin else start[rank][i] for i in range(count)] for rank in sides]
        stamped = calls.context.device.type == "cpu" and not one_clock and sides == list(members)
        return BehindComputeSamples(
            library=calls.context.backend,
            operation=operation,
            level=calls.team.level,
            ranks=calls.team.ranks,
            message_bytes=size,
            dtype="fp32",
            block=block,
            kernel=self._compute.kernel,
            one_clock=one_clock,
            back_to_back_s=tuple(alone[rank] for rank in sides),
            compute_s=tuple(compute[rank] for rank in sides),
            start_s=tuple(_less(start[rank], zero) for rank, zero in zip(sides, own, strict=True)),
            end_s=tuple(_less(end[rank], zero) for rank, zero in zip(sides, own, strict=True)),
            host_start_s=tuple(start[rank] for rank in sides) if stamped else (),
            attempt=self._attempt,
            first_rank=calls.team.first_rank(members),
        )

    def step_s(self) -> float:
        """About how long one measurement takes."""
        return self._point_s + MIN_PAIRS * self._lead_s

    @property
    def _lead_s(self) -> float:
        """What stands round a call that is measured, about."""
        return self._compute.seconds * (3 if self._as_in_a_run else 1)

    @property
    def _as_in_a_run(self) -> bool:
        return self._compute.kernel == GHOSTS

    def _called_for_a_layer(self, routine: Routine, buffers: Buffers) -> tuple[Any, Any]:
        """Stamps round a call on tensors that are new, as a layer's are, and what the layer then does with a gather."""
        taken = torch.empty_like(buffers.output) if buffers.input.numel() else buffers.output.clone()
        stamps = self._calls.stamped(routine, Buffers(buffers.input.clone(), taken))
        if taken.numel() > buffers.input.numel() > 0:
            _put_in_place(taken, self._calls.team.ranks)
        return stamps

    def _pair(self, operation: str, size: int) -> tuple[float, float, float, float]:
        """Seconds back to back, seconds of compute, and when the call behind it started and ended."""
        calls, routine = self._calls, routines()[operation]
        buffers = calls.buffers(routine, size)
        alone_s = calls.seconds(routine, buffers)
        calls.meet()
        if self._as_in_a_run:
            self._compute.run()
            self._called_for_a_layer(routine, buffers)
        origin = calls.clock.stamp()
        self._compute.run()
        if self._as_in_a_run:
            start, end = self._called_for_a_layer(routine, buffers)
        else:
            start, end = calls.stamped(routine, buffers)
        start = self._compute.over(start)
        if self._as_in_a_run:
            self._compute.run()
        calls.clock.synchronise()
        start_s, end_s = calls.clock.seconds(origin, start), calls.clock.seconds(origin, end)
        # The CPU's stamps are seconds of a clock that all processes of a host share; a GPU's are events.
        zero_s = origin if isinstance(origin, float) else 0.0
        return alone_s, start_s, zero_s + start_s, zero_s + end_s


def _put_in_place(gathered: torch.Tensor, parts: int) -> torch.Tensor:
    """What ranks hold of each sample side by side, as filters and rows of images are."""
    held = gathered.numel() // parts
    samples = math.gcd(_SAMPLES, held)
    whole = gathered.new_empty(samples, parts, held // samples)
    for part, own in enumerate(gathered.view(parts, samples, -1)):
        whole[:, part].copy_(own)
    return whole


def _less(values: tuple[float, ...], zero: list[float]) -> tuple[float, ...]:
    return tuple(max(0.0, value - each) for value, each in zip(values, zero, strict=True))
