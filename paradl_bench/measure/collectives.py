"""The sweep: every operation at every size through torch.distributed, verified, in blocks spread over time.

Ranks meet in a barrier before each repetition, then each times its own call. All ranks' times are kept; whose counts is
the operation's to say. A block visits all operations and sizes in shuffled order, so that a slow spell of the machine
does not fall on neighbouring sizes.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from paradl_bench.collectives.catalog import routines
from paradl_bench.collectives.routine import Buffers, Routine
from paradl_bench.measure.agreement import everyones, largest, of_first, ranks_of_hosts
from paradl_bench.measure.clocks import clock_for
from paradl_bench.measure.collective_request import CollectivesRequest
from paradl_bench.measure.directory import MeasurementDirectory
from paradl_bench.measure.environment import capture_environment, host_memory_bytes
from paradl_bench.measure.interference import InterferenceBench, interference_order
from paradl_bench.measure.process_groups import RankContext
from paradl_bench.spec.errors import WorkError
from paradl_bench.spec.measurement import COLLECTIVES_FILE, INTERFERENCE_FILE, CollectiveSamples, InterferenceSamples
from paradl_bench.spec.units import format_bytes, format_seconds
from paradl_bench.terminal import Progress, progress, say

WARMUP_CALLS = 2
"""Besides the verified one."""
ESTIMATE_CALLS = 3
MIN_REPETITIONS, MAX_REPETITIONS = 3, 100

_REFUSAL = re.compile(r"not supported|unsupported|not implemented|does not support|no backend type", re.IGNORECASE)


class Step(NamedTuple):
    """One thing to measure in one block: an operation, or a kernel beside the collective, at one size."""

    block: int
    beside: bool
    name: str
    message_bytes: int


def measure_collectives(
    request: CollectivesRequest, context: RankContext, output: Path, command_line: tuple[str, ...]
) -> None:
    """Measure on this rank together with all others; rank 0 writes.

    Args:
        request: what to measure; ``request.ranks`` ranks have joined.
        output: measurement directory, new or left by an interrupted run of the same command.

    Raises:
        UserError: a directory of something else, or too little memory.
        WorkError: a result was wrong (the measurements are kept, marked as not verified).
    """
    hosts = ranks_of_hosts(context)
    if context.device.type == "cpu":
        request.check_memory(ranks_on_host=max(hosts), memory_bytes=host_memory_bytes())
    directory = _open(request, context, output, command_line) if context.rank == 0 else None
    level = "node" if len(hosts) == 1 else "system"
    sweep = CollectiveSweep(request, context, level)
    accepted = {name for name in request.operations if sweep.accepts(name)}
    steps = _unmeasured(_steps(request, accepted), directory, context)
    bench = InterferenceBench(context, level) if any(step.beside for step in steps) else None
    estimate_s = _estimate_s(steps, sweep, bench)
    if directory is not None:
        _announce(request, directory, steps, estimate_s)
    with progress("collectives", len(steps)) as bar:
        for _, block in itertools.groupby(steps, key=lambda step: step.block):
            _measure_block(list(block), sweep, bench, directory, bar)
    if directory is not None:
        directory.finish()
        _check_verified(directory)


def _steps(request: CollectivesRequest, accepted: set[str]) -> list[Step]:
    steps = []
    for block in range(request.blocks):
        steps += [Step(block, False, name, size) for name, size in request.order(block) if name in accepted]
        if request.beside_compute:
            steps += [Step(block, True, name, size) for name, size in interference_order(request.seed, block)]
    return steps


def _unmeasured(steps: list[Step], directory: MeasurementDirectory | None, context: RankContext) -> list[Step]:
    """What an earlier, interrupted run did not measure: rank 0 looks, and all ranks agree."""
    done: set[Step] = set()
    if directory is not None and directory.resumed:
        sweeps = directory.records(COLLECTIVES_FILE, CollectiveSamples)
        done = {Step(record.block, False, record.operation, record.message_bytes) for record in sweeps}
        beside = directory.records(INTERFERENCE_FILE, InterferenceSamples)
        done |= {Step(record.block, True, record.kernel, record.message_bytes) for record in beside}
    wanted = of_first(context, [int(step not in done) for step in steps])
    return [step for step, is_wanted in zip(steps, wanted, strict=True) if is_wanted]


def _estimate_s(steps: list[Step], sweep: CollectiveSweep, bench: InterferenceBench | None) -> float:
    """About how long all steps take, from calls of each operation at its smallest and largest size."""
    total = 0.0
    for name in sorted({step.name for step in steps if not step.beside}):
        sizes = [step.message_bytes for step in steps if step.name == name and not step.beside]
        small_s, large_s = (sweep.point_s(name, size) for size in (min(sizes), max(sizes)))
        # Between the two, time goes by bytes; a small message's is the least of any.
        total += sum(max(small_s, large_s * size / max(sizes)) for size in sizes)
    if bench is not None:
        total += bench.step_s() * sum(step.beside for step in steps)
    return total


def _announce(
    request: CollectivesRequest, directory: MeasurementDirectory, steps: list[Step], estimate_s: float
) -> None:
    if directory.resumed:
        say(f"going on in {directory.path}: {len(steps)} measurements are left")
    if steps:
        what = f"{len(request.operations)} operations, {len(request.sizes)} sizes, {request.blocks} blocks"
        say(f"collectives over {request.backend} on {request.ranks} ranks: {what}; about {format_seconds(estimate_s)}")


def _measure_block(
    steps: list[Step],
    sweep: CollectiveSweep,
    bench: InterferenceBench | None,
    directory: MeasurementDirectory | None,
    bar: Progress,
) -> None:
    """Measure the steps of one block; what is measured when it is interrupted is kept."""
    swept: list[CollectiveSamples] = []
    beside: list[InterferenceSamples] = []
    try:
        for step in steps:
            bar.describe(f"{step.name} {format_bytes(step.message_bytes)}")
            if bench is not None and step.beside:
                beside += bench.measure(step.name, step.message_bytes, step.block)
            else:
                swept.append(sweep.measure(step.name, step.message_bytes, step.block))
            bar.advance()
    finally:
        if directory is not None:
            directory.append(COLLECTIVES_FILE, swept)
            directory.append(INTERFERENCE_FILE, beside)


def _check_verified(directory: MeasurementDirectory) -> None:
    records = directory.records(COLLECTIVES_FILE, CollectiveSamples)
    wrong = sorted({(record.operation, record.message_bytes) for record in records if not record.verified})
    if wrong:
        listed = ", ".join(f"{name} of {size} bytes" for name, size in wrong[:5])
        raise WorkError(
            f"{len(wrong)} results were wrong ({listed}); {directory.path} holds them, marked as not verified"
        )


class CollectiveSweep:
    """Measures single points; buffers are made once, as large as the largest needs, and reused.

    Args:
        level: of the cluster, that the ranks span.
    """

    def __init__(self, request: CollectivesRequest, context: RankContext, level: str) -> None:
        self._request = request
        self._context = context
        self._clock = clock_for(context.device)
        inputs, outputs = request.pool_elements()
        self._pool = Buffers(torch.zeros(inputs, device=context.device), torch.zeros(outputs, device=context.device))
        self._level = level

    def accepts(self, operation: str) -> bool:
        """Whether the backend has the operation: the smallest message is tried. Where not, says so."""
        try:
            self._run_once(routines()[operation], min(self._request.sizes))
        except (RuntimeError, NotImplementedError) as error:
            if not is_refusal(error):
                raise
            if self._context.rank == 0:
                reason = " ".join(str(error).split())
                say(f"skipped {operation}: backend {self._context.backend} refuses it: {reason}")
            return False
        return True

    def point_s(self, operation: str, size: int) -> float:
        """About how long one point takes, from one verified call and a few that are timed with their barrier."""
        routine = routines()[operation]
        buffers = routine.buffers(self._pool, size, self._context.ranks)
        start = time.perf_counter()
        self._verify(routine, buffers)
        verified = time.perf_counter()
        call_s = statistics.median(self._timed_call(routine, buffers) for _ in range(ESTIMATE_CALLS))
        with_barrier_s = (time.perf_counter() - verified) / ESTIMATE_CALLS
        count = WARMUP_CALLS + repetitions(largest(self._context, call_s), self._request.point_s)
        return verified - start + count * with_barrier_s

    def measure(self, operation: str, size: int, block: int) -> CollectiveSamples:
        """One operation and size, verified, then repeated; the same record on all ranks."""
        context, routine = self._context, routines()[operation]
        buffers = routine.buffers(self._pool, size, context.ranks)
        verified = self._verify(routine, buffers)
        warm = [self._timed_call(routine, buffers) for _ in range(WARMUP_CALLS)]
        count = repetitions(largest(context, statistics.median(warm)), self._request.point_s)
        times = everyones(context, [self._timed_call(routine, buffers) for _ in range(count)])
        return CollectiveSamples(
            library=context.backend,
            tool="torch",
            operation=operation,
            level=self._level,
            ranks=context.ranks,
            message_bytes=size,
            dtype="fp32",
            block=block,
            samples_s=tuple(times[rank] for rank in routine.sides(context.ranks)),
            verified=verified,
        )

    def _verify(self, routine: Routine, buffers: Buffers) -> bool:
        """Whether every rank ended with what the operation promises; leaves zeros."""
        rank, ranks = self._context.rank, self._context.ranks
        buffers.clear()
        routine.fill(buffers, rank, ranks)
        self._timed_call(routine, buffers)
        right = routine.correct(buffers, rank, ranks)
        buffers.clear()
        return largest(self._context, float(not right)) == 0.0

    def _run_once(self, routine: Routine, size: int) -> float:
        return self._timed_call(routine, routine.buffers(self._pool, size, self._context.ranks))

    def _timed_call(self, routine: Routine, buffers: Buffers) -> float:
        """Seconds of one call on this rank, after a barrier."""
        clock, context = self._clock, self._context
        clock.synchronise()
        context.barrier()
        start = clock.stamp()
        work = routine.call(buffers, context.rank, context.ranks)
        if work is not None:
            work.wait()
        end = clock.stamp()
        clock.synchronise()
        return clock.seconds(start, end)


def repetitions(call_s: float, point_s: float) -> int:
    """How many calls of ``call_s`` fill about ``point_s``: many of a small message, few of a large one."""
    return max(MIN_REPETITIONS, min(MAX_REPETITIONS, round(point_s / max(call_s, 1e-9))))


def is_refusal(error: Exception) -> bool:
    """Whether a backend says that it does not have an operation, rather than that a call failed."""
    return isinstance(error, NotImplementedError) or bool(_REFUSAL.search(str(error)))


def _open(
    request: CollectivesRequest, context: RankContext, output: Path, command_line: tuple[str, ...]
) -> MeasurementDirectory:
    return MeasurementDirectory.open(
        output,
        kind="collectives",
        arguments=request.arguments(),
        command_line=command_line,
        environment=capture_environment(request.device, settings={"dtype": "fp32", **context.settings}),
    )
