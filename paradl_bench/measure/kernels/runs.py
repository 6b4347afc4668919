"""Running one kernel of a sweep: its tensors, its calls, and the state of the caches that a call finds.

In training a layer finds in the caches what the layer before it has just written, and little else: weights and saved
activations were used an iteration, or half of one, ago. A sweep leaves them so: before every timed call a buffer as
large as the last-level cache is read, then the input (forward) or the output's gradient (backward) is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from paradl_bench.measure.execution.optimizers import build_optimizer
from paradl_bench.measure.kernels.design import MachineSpeed, SweptKernel
from paradl_bench.measure.layers.isolated import IsolatedOperation, Settle, leave_warm, random_tensor
from paradl_bench.measure.machine.roofline_kernels import caches_of_core
from paradl_bench.network.kinds.kernel_shape import layer_of_sizes
from paradl_bench.ranks.clocks import Clock
from paradl_bench.strategies.running.autocast import TORCH_DTYPES

CacheState = Literal["training", "warm"]

_UNKNOWN_CACHE_BYTES = 32 * 1024**2
# A cache that many cores share is never one core's own.
_LARGEST_CACHE_BYTES = 64 * 1024**2
# So long that what follows has been launched when it is over: a small kernel's time must not be that of its launch.
_GPU_CACHES = 8
_MATRIX = {"cpu": 768, "cuda": 8192}
_STREAM_BYTES = {"cpu": 64 * 1024**2, "cuda": 1024**3}


class Caches:
    """Brings caches into a state before every timed call.

    Attributes:
        buffer_bytes: what is read to displace what they hold; 0 where they are left warm.
    """

    def __init__(self, state: CacheState, device: torch.device) -> None:
        self._cache_bytes = _last_level_cache_bytes(device)
        times = {"cpu": 1, "cuda": _GPU_CACHES}[device.type]
        self.buffer_bytes = 0 if state == "warm" else times * self._cache_bytes
        self._buffer = torch.zeros(self.buffer_bytes // 4, device=device)
        self._predecessor = torch.ones(64, device=device, requires_grad=True)
        self.settle: Settle = leave_warm if state == "warm" else self._as_in_training

    def _as_in_training(self, written: Sequence[torch.Tensor]) -> None:
        self._buffer.sum()
        with torch.no_grad():
            for tensor in written:
                # A larger one would not stay in the caches either.
                if tensor.is_floating_point() and tensor.nbytes <= self._cache_bytes:
                    tensor.mul_(1.0)
        # What every operation runs of torch's code, its predecessor has just run.
        torch.relu(self._predecessor)


def _last_level_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or _UNKNOWN_CACHE_BYTES
    return min(max(caches_of_core(), default=_UNKNOWN_CACHE_BYTES), _LARGEST_CACHE_BYTES)


def build_run(
    kernel: SweptKernel, device: torch.device, settle: Settle
) -> IsolatedOperation | _OptimizerRun | _CopyRun:
    """Make a kernel's tensors; ``measure`` gives samples in seconds by stage, after a call that warms up.

    Raises torch's RuntimeError where there is no memory for them.
    """
    dtype = TORCH_DTYPES[kernel.dtype]
    if kernel.kind == "optimizer":
        return _OptimizerRun(kernel, dtype, device, settle)
    if kernel.kind == "copy":
        return _CopyRun(kernel, dtype, device, settle)
    layer, batch, parameter_shapes = layer_of_sizes(kernel.kind, kernel.sizes, kernel.settings)
    return IsolatedOperation(layer, parameter_shapes, batch, device, dtype=dtype, settle=settle)


class _OptimizerRun:
    """An optimizer's step over parameters of nearly equal size; gradients stay."""

    def __init__(self, kernel: SweptKernel, dtype: torch.dtype, device: torch.device, settle: Settle) -> None:
        self._settle = settle
        parts = equal_parts(kernel.sizes["elements"], kernel.sizes["tensors"])
        parameters = [torch.nn.Parameter(random_tensor((part,), device, dtype)) for part in parts]
        for parameter in parameters:
            parameter.grad = random_tensor(parameter.shape, device, dtype)
        self._optimizer = build_optimizer(kernel.settings["function"], parameters)

    def measure(self, clock: Clock, samples: int) -> dict[str, list[float]]:
        # The first makes the optimizer's state.
        self._optimizer.step()
        return {"WU": [_timed(self._optimizer.step, clock, self._settle) for _ in range(samples)]}


class _CopyRun:
    """Tensors copied one by one inside a memory, and on a GPU from the host's pinned memory as well."""

    def __init__(self, kernel: SweptKernel, dtype: torch.dtype, device: torch.device, settle: Settle) -> None:
        self._settle = settle
        elements = kernel.sizes["bytes"] // torch.empty((), dtype=dtype).element_size()
        parts = equal_parts(elements, kernel.sizes["tensors"])
        self._targets = [torch.zeros(part, device=device, dtype=dtype) for part in parts]
        self._sources = {"D2D": [torch.ones_like(target) for target in self._targets]}
        if device.type == "cuda":
            self._sources["H2D"] = [torch.ones(part, dtype=dtype, pin_memory=True) for part in parts]

    def measure(self, clock: Clock, samples: int) -> dict[str, list[float]]:
        return {stage: self._of_stage(sources, clock, samples) for stage, sources in self._sources.items()}

    def _of_stage(self, sources: Sequence[torch.Tensor], clock: Clock, samples: int) -> list[float]:
        def copy() -> None:
            for target, source in zip(self._targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

        copy()
        return [_timed(copy, clock, self._settle) for _ in range(samples)]


def _timed(call: Callable[[], object], clock: Clock, settle: Settle) -> float:
    settle([])
    clock.hold()
    begin = clock.stamp()
    call()
    end = clock.stamp()
    clock.synchronise()
    return clock.seconds(begin, end)


def equal_parts(elements: int, tensors: int) -> list[int]:
    """Whole numbers as equal as they can be that sum up to ``elements``."""
    return [elements // tensors + (index < elements % tensors) for index in range(tensors)]


def machine_speed(device: torch.device, dtype: torch.dtype, clock: Clock) -> MachineSpeed:
    """Roughly how fast a matrix product and a copy are: the fastest of a few calls each."""
    size, count = _MATRIX[device.type], _STREAM_BYTES[device.type] // 4
    first, second = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source, target = torch.ones(count, device=device), torch.zeros(count, device=device)

    def fastest(call: Callable[[], object]) -> float:
        call()
        return min(_timed(call, clock, leave_warm) for _ in range(4))

    product_s = fastest(lambda: first @ second)
    copy_s = fastest(lambda: target.copy_(source))
    return MachineSpeed(flops_per_s=2 * size**3 / product_s, bytes_per_s=2 * source.nbytes / copy_s)
