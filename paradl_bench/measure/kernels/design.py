"""Which kernels a sweep measures, and in which order: few that teach much, and any first part of them a good choice.

Points of a scrambled Sobol sequence fill each kind's ranges evenly in the logarithm of every size; what takes longer or
needs more memory than a limit is passed over and counted. Sizes drawn evenly pile up at the limit: so a kind's kernels
are taken in turn from classes of equal width in the logarithm of their time. Kinds take turns by the time that they
have had, dtypes by count. An interrupted sweep therefore holds a smaller design of the same make.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from paradl_bench.core.bounds import Count, EstimatedBytes, Index, PositiveRate, Seconds
from paradl_bench.core.errors import unknown_choice
from paradl_bench.core.files.storage import read_json
from paradl_bench.measure.kernels.ranges import RANGES, KernelRange
from paradl_bench.network.kernel import KernelSamples, KernelShape, KernelStage
from paradl_bench.network.kinds.kernel_shape import copy_shape, kernel_shape, layer_of_sizes, optimizer_shape
from paradl_bench.network.kinds.kind import layer_kinds

_DRAWS_AT_ONCE = 1024
# A kind whose limits leave less than one draw in so many is as good as excluded.
_MOST_DRAWS = 65536
_CLASSES_PER_FACTOR_OF_TEN = 2
# What a sample costs besides its kernels: allocation, and on a CPU the engine of autograd.
_CALL_S = 30e-6
# Short kernels are called so often that a visit takes about as long.
_VISIT_S = 0.02


class SweptKernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel that a sweep runs, its stages together, one call of all of which is estimated to take ``estimate_s``.

    ``origin`` is ``range``, or where a shape comes from: a model's layer, its shard, a neighbour.
    """

    kind: str
    sizes: dict[str, Index]
    settings: dict[str, str] = {}
    dtype: str = "fp32"
    origin: str = "range"
    estimate_s: Seconds = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same kernel, wherever it comes from."""
        return _key(self, self.dtype)


def key_of_samples(samples: KernelSamples) -> tuple[object, ...]:
    """Key of the kernel that was measured, its stages apart."""
    return _key(samples.shape, samples.dtype)


def _key(kernel: SweptKernel | KernelShape, dtype: str) -> tuple[object, ...]:
    return kernel.kind, tuple(sorted(kernel.sizes.items())), tuple(sorted(kernel.settings.items())), dtype


class MachineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a device is at best, roughly: what estimates are made from."""

    flops_per_s: PositiveRate
    bytes_per_s: PositiveRate


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep passes over: by one call of the longest stage, as estimated, and by all tensors of a kernel."""

    kernel_s: Seconds
    memory_bytes: EstimatedBytes


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep spends on a kernel: visits, samples in one (fewer of long kernels), seconds of settling caches."""

    blocks: int
    most_samples: int
    settle_s: float

    def samples(self, kernel: SweptKernel, stages: int) -> int:
        """Samples in one visit."""
        once_s = kernel.estimate_s + stages * self.settle_s
        return max(1, min(self.most_samples, round(_VISIT_S / once_s)))

    def cost_s(self, kernel: SweptKernel, shapes: tuple[KernelShape, ...], speed: MachineSpeed) -> float:
        """Seconds of all visits: making tensors, a call that warms up, samples."""
        samples = self.samples(kernel, len(shapes))
        calls = (1 + samples) * kernel.estimate_s + samples * len(shapes) * self.settle_s
        return self.blocks * (calls + memory_bytes(shapes) / speed.bytes_per_s)


class Design(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sweep is to measure, in order, and how many drawn kernels it does not take (file ``design.json``)."""

    kernels: tuple[SweptKernel, ...]
    limits: Limits
    speeds: dict[str, MachineSpeed]
    passed_over: dict[str, dict[str, Count]] = {}


def read_design(path: Path) -> Design:
    """A sweep's design; raises UserError where the file is unreadable or a field, named by its path, wrong."""
    return read_json(path, Design, remedy="; measure anew into another directory")


def shapes_of(kernel: SweptKernel, device: str = "cpu") -> tuple[KernelShape, ...]:
    """What is measured of a kernel, stage by stage."""
    if kernel.kind == "optimizer":
        sizes = kernel.sizes
        return (optimizer_shape(kernel.settings["function"], sizes["elements"], sizes["tensors"], kernel.dtype),)
    if kernel.kind == "copy":
        stages: tuple[Literal["D2D", "H2D"], ...] = ("D2D", "H2D") if device == "cuda" else ("D2D",)
        return tuple(copy_shape(stage, kernel.sizes["bytes"], kernel.sizes["tensors"]) for stage in stages)
    layer, batch, _ = layer_of_sizes(kernel.kind, kernel.sizes, kernel.settings)
    split = layer_kinds()[kernel.kind].splits_backward
    of_layer: tuple[KernelStage, ...] = ("FW", "BW_input", "BW_weight") if split else ("FW", "BW")
    shapes = (kernel_shape(layer, stage, batch, kernel.dtype) for stage in of_layer)
    return tuple(shape for shape in shapes if shape is not None)


def memory_bytes(shapes: tuple[KernelShape, ...]) -> float:
    """What all tensors of a kernel take: forward's with their gradients, and as much again for the library's copies."""
    return shapes[0].bytes * (3 if shapes[0].stage == "FW" else 1)


def estimated_s(shapes: tuple[KernelShape, ...], speed: MachineSpeed) -> tuple[float, float]:
    """Seconds of the longest stage, and of all."""
    times = [_CALL_S + shape.flops / speed.flops_per_s + shape.bytes / speed.bytes_per_s for shape in shapes]
    return max(times), sum(times)


class Planner:
    """Draws kernels of all dtypes, in turn, within limits, and puts them in order."""

    def __init__(
        self,
        kinds: tuple[str, ...],
        dtypes: tuple[str, ...],
        limits: Limits,
        speeds: dict[str, MachineSpeed],
        effort: Effort,
        *,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.limits, self.speeds, self.passed_over = limits, speeds, {kind: Counter[str]() for kind in kinds}
        self._kinds, self._dtypes, self._effort, self._device, self._seed = kinds, dtypes, effort, device, seed
        self._seen: set[tuple[object, ...]] = set()
        self._costs_s: dict[tuple[object, ...], float] = {}

    def design(
        self, *, budget_s: float | None, samples: int | None, source: Iterable[SweptKernel] | None = None
    ) -> Design:
        """As many kernels, of ``source`` or of the ranges, as a budget in seconds or a number of samples asks for."""
        taken = self._in_turn() if source is None else (self.accept(kernel) for kernel in source)
        kernels: list[SweptKernel] = []
        spent = 0.0
        for kernel in (kernel for kernel in taken if kernel is not None):
            if (samples is not None and len(kernels) >= samples) or (budget_s is not None and spent >= budget_s):
                break
            kernels.append(kernel)
            spent += self.cost_s(kernel)
        counted = {kind: dict(counts) for kind, counts in self.passed_over.items() if counts}
        return Design(kernels=tuple(kernels), limits=self.limits, speeds=self.speeds, passed_over=counted)

    def cost_s(self, kernel: SweptKernel) -> float:
        """Seconds that a sweep spends on a kernel which was accepted."""
        return self._costs_s[kernel.key]

    def accept(self, kernel: SweptKernel) -> SweptKernel | None:
        """The kernel with its estimate; None, and counted, where it passes a limit or was taken before."""
        counts = self.passed_over.setdefault(kernel.kind, Counter())
        if kernel.key in self._seen:
            counts["drawn before"] += 1
            return None
        self._seen.add(kernel.key)
        shapes = shapes_of(kernel, self._device)
        longest, together = estimated_s(shapes, self.speeds[kernel.dtype])
        if memory_bytes(shapes) > self.limits.memory_bytes:
            counts["memory"] += 1
        elif longest > self.limits.kernel_s:
            counts["time"] += 1
        else:
            accepted = msgspec.structs.replace(kernel, estimate_s=together)
            self._costs_s[kernel.key] = self._effort.cost_s(accepted, shapes, self.speeds[kernel.dtype])
            return accepted
        return None

    def _in_turn(self) -> Iterator[SweptKernel]:
        """Kinds take turns: next is the one that has had least of its part of the time."""
        drawn = {kind: self._of_kind(RANGES[kind]) for kind in self._kinds if kind in RANGES}
        spent = dict.fromkeys(drawn, 0.0)
        while drawn:
            kind = min(drawn, key=lambda name: spent[name] / RANGES[name].weight)
            kernel = next(drawn[kind], None)
            if kernel is None:
                del drawn[kind]
                continue
            spent[kind] += self.cost_s(kernel)
            yield kernel

    def _of_kind(self, kernels: KernelRange) -> Iterator[SweptKernel]:
        by_dtype = [self._of_dtype(kernels, dtype, index) for index, dtype in enumerate(self._dtypes)]
        taken = (kernel for turn in itertools.zip_longest(*by_dtype) for kernel in turn if kernel is not None)
        return itertools.islice(taken, kernels.most * len(self._dtypes))

    def _of_dtype(self, kernels: KernelRange, dtype: str, index: int) -> Iterator[SweptKernel]:
        """From classes of time in turn; a class that is empty for now is passed over."""
        waiting: dict[int, list[SweptKernel]] = {}
        for drawn in _batches(self._drawn(kernels, dtype, index)):
            for kernel in drawn:
                waiting.setdefault(time_class(kernel.estimate_s), []).append(kernel)
            # Rare classes keep up with frequent ones only if those wait: none may run more than a draw's ahead.
            turns = max(1, len(drawn) // (2 * max(1, len(waiting))))
            for _ in range(turns):
                for time in sorted(waiting):
                    if waiting[time]:
                        yield waiting[time].pop(0)
        for rest in itertools.zip_longest(*(waiting[time] for time in sorted(waiting))):
            yield from (kernel for kernel in rest if kernel is not None)

    def _drawn(self, kernels: KernelRange, dtype: str, index: int) -> Iterator[SweptKernel | None]:
        for point in sobol_points(kernels.coordinates, self._seed + index):
            drawn = kernels.draw(point, dtype)
            if drawn is None:
                self.passed_over[kernels.kind]["no such kernel"] += 1
                yield None
            else:
                yield self.accept(
                    SweptKernel(kind=kernels.kind, sizes=drawn.sizes, settings=drawn.settings, dtype=dtype)
                )


def time_class(seconds: float) -> int:
    """Classes of equal width in the logarithm of time."""
    return math.floor(math.log10(max(seconds, 1e-9)) * _CLASSES_PER_FACTOR_OF_TEN)


def sobol_points(coordinates: int, seed: int) -> Iterator[list[float]]:
    """Points of the unit cube that fill it evenly, any first part of them too."""
    from scipy.stats import qmc

    sequence = qmc.Sobol(coordinates, scramble=True, seed=seed)
    for _ in range(_MOST_DRAWS // _DRAWS_AT_ONCE):
        yield from sequence.random(_DRAWS_AT_ONCE).tolist()


def _batches(drawn: Iterator[SweptKernel | None]) -> Iterator[list[SweptKernel]]:
    for _ in range(_MOST_DRAWS // _DRAWS_AT_ONCE):
        yield [kernel for kernel in itertools.islice(drawn, _DRAWS_AT_ONCE) if kernel is not None]


def check_kinds(kinds: tuple[str, ...]) -> None:
    """Raises:
    UserError: a kind that can't be swept.
    """
    for kind in kinds:
        if kind not in sweepable_kinds():
            raise unknown_choice("kind", kind, sweepable_kinds())


@functools.cache
def sweepable_kinds() -> tuple[str, ...]:
    """Kinds that sizes describe and that run alone, the optimizer and copies."""
    of_layers = (name for name, kind in layer_kinds().items() if kind.call is not None and kind.build is not None)
    return tuple(sorted({*RANGES, *of_layers}))
