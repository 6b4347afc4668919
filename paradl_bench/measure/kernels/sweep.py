"""Sweeps of kernels that regressors are trained on: planned, within a budget of time, and resumed.

The design is cut into rounds of kernels. In a round every kernel is visited once a block, in shuffled order, so that
a slow spell of the machine falls on few samples of any of them; then comes the next round. Whatever moment a sweep is
stopped at, all rounds but the last are whole. How long a round takes follows from those before it.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from pathlib import Path

import torch

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.core.terminal.command_line import Progress, progress, say
from paradl_bench.measure.execution.kernel_layout import set_modes
from paradl_bench.measure.kernels.design import (
    Design,
    Effort,
    Limits,
    Planner,
    SweptKernel,
    key_of_samples,
    read_design,
    shapes_of,
)
from paradl_bench.measure.kernels.neighbours import Asked, kernels_of_models
from paradl_bench.measure.kernels.request import (
    DESIGN_FILE,
    PROGRESS_FILE,
    SKIPPED_FILE,
    KernelsRequest,
    SkippedKernel,
    SweepProgress,
)
from paradl_bench.measure.kernels.runs import Caches, build_run, machine_speed
from paradl_bench.measure.opening import open_directory
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.network.models.catalog import load_model
from paradl_bench.ranks.clocks import Clock, ThreadClock, clock_for
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.out_of_memory import ran_out
from paradl_bench.ranks.pulse import beat
from paradl_bench.records.kernel_settings import NO_SETTINGS
from paradl_bench.strategies.running.autocast import TORCH_DTYPES

_ROUND = 96
# Samples are written at least so often.
_FLUSH_S = 2.0
# Estimates may be too long: the design holds so many times what the budget is estimated to hold.
_SPARE = 2.0


def plan_sweep(request: KernelsRequest, device: torch.device, clock: Clock, caches: Caches) -> Design:
    """The design of a sweep on this machine, whose speeds are measured first (a second or so).

    Raises:
        UserError: a model is not known or does not run; nothing is left within the limits.
    """
    speeds = {name: machine_speed(device, TORCH_DTYPES[name], clock) for name in request.dtypes}
    memory = request.memory_bytes if request.memory_bytes is not None else free_memory_bytes(device) / 2
    limits = Limits(kernel_s=request.kernel_s, memory_bytes=memory)
    effort = effort_of(request, caches, next(iter(speeds.values())).bytes_per_s)
    planner = Planner(request.kinds, request.dtypes, limits, speeds, effort, device=device.type, seed=request.seed)
    source = None
    if request.models:
        shape = request.input_shape
        models = [load_model(name, shape, device="meta") for name in dict.fromkeys(request.models)]
        networks = list(map(trace_network, models))
        for model in models:
            model.say_guess()
        asked = Asked(request.kinds, request.dtypes, request.batches)
        source = kernels_of_models(networks, asked, seed=request.seed)
    budget_s = None if request.budget_s is None else request.budget_s * _SPARE
    design = planner.design(budget_s=budget_s, samples=request.samples, source=source)
    if not design.kernels:
        raise UserError("no kernel is left within the limits; raise --kernel-limit or --memory, or name other --kinds")
    return design


def effort_of(request: KernelsRequest, caches: Caches, bytes_per_s: float) -> Effort:
    """What is spent on a kernel; what displaces the caches' contents is read."""
    settle_s = caches.buffer_bytes / bytes_per_s
    return Effort(blocks=request.blocks, most_samples=request.repetitions, settle_s=settle_s)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that a kernel could take now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UserError("this system does not say how much memory is free: give --memory")


def sweep_kernels(request: KernelsRequest, context: RankContext, output: Path, command_line: tuple[str, ...]) -> None:
    """Measure, and write what was measured so far even when interrupted.

    Raises:
        UserError: a model that is not known, or a directory of something else.
        WorkError: no kernel ran.
    """
    # Autograd runs a CPU's backward in the thread that asks for it.
    of_thread = context.device.type == "cpu" and torch.get_num_threads() == 1
    clock: Clock = ThreadClock() if of_thread else clock_for(context.device)
    set_modes(NO_SETTINGS, context.device)
    caches = Caches("warm" if request.caches == "warm" else "training", context.device)
    settings = {
        "clock": "time on a core" if of_thread else "wall",
        "dtype": ",".join(request.dtypes),
        "caches": request.caches,
        "displaced_bytes": str(caches.buffer_bytes),
        **context.settings,
    }
    # Models are looked at before a directory is made.
    design = None if (output / DESIGN_FILE).exists() else plan_sweep(request, context.device, clock, caches)
    directory = open_directory(output, "kernels", request.arguments(), command_line, request.device, settings)
    if design is None:
        design = read_design(output / DESIGN_FILE)
    else:
        write_bytes_atomically(output / DESIGN_FILE, encode_pretty(design))
    sweep = _Sweep(request, design, directory, context.device, clock, caches)
    try:
        sweep.run()
    finally:
        sweep.flush()
    if not directory.records(KERNELS_FILE, KernelSamples):
        skipped = directory.records(SKIPPED_FILE, SkippedKernel)
        raise WorkError(f"no kernel ran: {skipped[0].why}" if skipped else "no kernel ran within the budget")
    directory.finish()


class _Sweep:
    """A design on its way through a machine."""

    def __init__(
        self,
        request: KernelsRequest,
        design: Design,
        directory: MeasurementDirectory,
        device: torch.device,
        clock: Clock,
        caches: Caches,
    ) -> None:
        self._request, self._design, self._directory = request, design, directory
        self._device, self._clock, self._caches = device, clock, caches
        speed = next(iter(design.speeds.values()))
        self._effort = effort_of(request, caches, speed.bytes_per_s)
        self._shapes = {kernel.key: shapes_of(kernel, device.type) for kernel in design.kernels}
        before = directory.records(PROGRESS_FILE, SweepProgress)
        self._spent_s = sum(part.wall_s for part in before)
        self._estimated_s = sum(part.estimated_s for part in before)
        self._flushed_s, self._flushed_estimate_s = self._spent_s, self._estimated_s
        self._mark_s = time.monotonic()
        self._waiting: list[KernelSamples] = []
        self._done = {
            (key_of_samples(record), record.block) for record in directory.records(KERNELS_FILE, KernelSamples)
        }
        self._skipped = {record.kernel.key for record in directory.records(SKIPPED_FILE, SkippedKernel)}
        if directory.resumed and self._done:
            kernels = len({key for key, _ in self._done})
            say(f"going on in {directory.path}: {kernels} kernels were measured before, in {self._spent_s:.0f} s")

    def run(self) -> None:
        """All rounds that the budget holds."""
        budget_s = self._request.budget_s
        total = budget_s if budget_s is not None else len(self._design.kernels) * self._request.blocks
        with progress("kernels", round(total)) as bar:
            bar.advance(self._spent_s if budget_s is not None else len(self._done))
            for number, start in enumerate(range(0, len(self._design.kernels), _ROUND)):
                kernels = self._affordable(self._design.kernels[start : start + _ROUND])
                if not kernels or not self._round(number, kernels, bar):
                    return

    def _round(self, number: int, kernels: tuple[SweptKernel, ...], bar: Progress) -> bool:
        """Whether there is time left."""
        budget_s = self._request.budget_s
        for block in range(self._request.blocks):
            order = list(kernels)
            random.Random(f"{self._request.seed} {number} {block}").shuffle(order)
            for kernel in order:
                if kernel.key in self._skipped or (kernel.key, block) in self._done:
                    continue
                if budget_s is not None and self._spent_s > budget_s:
                    return False
                bar.describe(f"{kernel.kind} {kernel.dtype}")
                before_s = self._spent_s
                self._visit(kernel, block)
                bar.advance(self._spent_s - before_s if budget_s is not None else 1)
        return True

    def _affordable(self, kernels: tuple[SweptKernel, ...]) -> tuple[SweptKernel, ...]:
        """The first ones, as many as the rest of the budget holds in all blocks."""
        if self._request.budget_s is None:
            return kernels
        slower = self._spent_s / self._estimated_s if self._estimated_s else 1.0
        costs = itertools.accumulate(slower * self._cost_s(kernel) for kernel in kernels)
        left = self._request.budget_s - self._spent_s
        return tuple(kernel for kernel, cost in zip(kernels, costs, strict=True) if cost <= left)

    def _cost_s(self, kernel: SweptKernel) -> float:
        """Estimated seconds of the visits that are left."""
        if kernel.key in self._skipped:
            return 0.0
        left = sum((kernel.key, block) not in self._done for block in range(self._request.blocks))
        return self._visit_s(kernel) * left

    def _visit_s(self, kernel: SweptKernel) -> float:
        speed = self._design.speeds[kernel.dtype]
        return self._effort.cost_s(kernel, self._shapes[kernel.key], speed) / self._request.blocks

    def _visit(self, kernel: SweptKernel, block: int) -> None:
        beat()
        self._estimated_s += self._visit_s(kernel)
        try:
            measured = self._measure(kernel)
        except (RuntimeError, NotImplementedError, MemoryError) as error:
            self._skip(kernel, error)
        else:
            self._done.add((kernel.key, block))
            shapes = {shape.stage: shape for shape in self._shapes[kernel.key]}
            self._waiting += [
                KernelSamples(
                    shape=shapes[stage],
                    dtype=kernel.dtype,
                    block=block,
                    samples_s=tuple(samples),
                )
                for stage, samples in measured.items()
                if stage in shapes
            ]
        now = time.monotonic()
        self._spent_s += now - self._mark_s
        self._mark_s = now
        if self._spent_s - self._flushed_s > _FLUSH_S:
            self.flush()

    def _measure(self, kernel: SweptKernel) -> dict[str, list[float]]:
        samples = self._effort.samples(kernel, len(self._shapes[kernel.key]))
        gc.disable()
        try:
            return build_run(kernel, self._device, self._caches.settle).measure(self._clock, samples)
        finally:
            gc.enable()

    def _skip(self, kernel: SweptKernel, error: BaseException) -> None:
        # torch has it from version 2.8 on.
        if isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise WorkError(f"{kernel.kind} {kernel.sizes} broke the device: {error}") from error
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        why = f"does not fit in memory: {first}" if ran_out(error) else first
        self._skipped.add(kernel.key)
        self._directory.append(SKIPPED_FILE, [SkippedKernel(kernel=kernel, why=why)])
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def flush(self) -> None:
        """Write what was measured since the last time."""
        if not self._waiting and self._spent_s == self._flushed_s:
            return
        waiting, self._waiting = self._waiting, []
        self._directory.append(KERNELS_FILE, waiting)
        part = SweepProgress(
            wall_s=self._spent_s - self._flushed_s, estimated_s=self._estimated_s - self._flushed_estimate_s
        )
        self._directory.append(PROGRESS_FILE, [part])
        self._flushed_s, self._flushed_estimate_s = self._spent_s, self._estimated_s
