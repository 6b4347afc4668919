"""``paradl-bench doctor --measure``: the rates of a device, alone and with all ranks of the host at once.

What is kept is the sustained rate: every block repeats a kernel for as long, and medians over blocks are taken later.
The best of a few lucky calls is no rate that layers could have.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from paradl_bench.core.checks import refuse_fp8
from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.terminal.command_line import progress, say
from paradl_bench.core.units import counted
from paradl_bench.measure.machine.roofline_kernels import DTYPES, RateKernel, products_in, rate_kernels
from paradl_bench.measure.opening import open_directory
from paradl_bench.ranks.clocks import Clock, clock_for
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.roofline_record import RATES_FILE, RateSamples

_SHORTEST_SAMPLE_S = 2e-4
"""A sample of shorter calls is the mean of several: the clock and Python's own time count for nothing then."""
_FEWEST_SAMPLES = 3
_LONGEST_CALL_S = 1.0


class RooflineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``paradl-bench doctor --measure`` is asked to measure, each kernel for ``point_s`` in a block."""

    device: str
    dtypes: tuple[str, ...]
    blocks: int
    point_s: float
    seed: int = 0

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            refuse_fp8(dtype)
            if dtype not in DTYPES:
                raise unknown_choice("dtype", dtype, DTYPES)
        if self.device == "cpu" and "tf32" in self.dtypes:
            raise UserError("--dtype tf32: TensorFloat-32 is a mode of GPUs; a CPU has fp32 and bf16")

    def arguments(self, ranks: int) -> dict[str, str]:
        """Settings that two runs have to share for one to resume the other."""
        return {
            "dtypes": ",".join(self.dtypes),
            "ranks": str(ranks),
            "blocks": str(self.blocks),
            "point_s": f"{self.point_s:g}",
            "seed": str(self.seed),
        }


def measure_roofline(
    request: RooflineRequest, context: RankContext, output: Path, command_line: tuple[str, ...]
) -> None:
    """Measure each kernel by rank 0 alone and by all ranks of the host; rank 0 writes.

    Raises UserError for a directory of something else.
    """
    clock = clock_for(context.device)
    kernels = _quick_enough(rate_kernels(context.device, request.dtypes, context.ranks), clock, context)
    directory = None
    if context.rank == 0:
        arguments = request.arguments(context.ranks)
        directory = open_directory(output, "roofline", arguments, command_line, request.device, context.settings)
    done = context.share(_finished(directory), set[_Done])
    plan = _plan(request, len(kernels), context.ranks)
    with progress("doctor", len(plan)) as bar:
        for block, index, ranks in plan:
            kernel = kernels[index]
            bar.describe(f"{kernel.name} {kernel.dtype} on {ranks}")
            if (kernel.key, ranks, block) not in done:
                record = _measure(request, context, clock, kernel, ranks, block)
                rows = context.gather(record, RateSamples | None)
                if directory is not None:
                    directory.append(RATES_FILE, [row for row in rows if row is not None])
            bar.advance()
    if directory is not None:
        directory.finish()


def _quick_enough(kernels: list[RateKernel], clock: Clock, context: RankContext) -> list[RateKernel]:
    """Without the kernels of which one call would take seconds, going by the smallest of their dtype.

    A CPU without instructions for bf16 computes in it a hundred times more slowly than in fp32.
    """
    kept = list(range(len(kernels)))
    for dtype in sorted({kernel.dtype for kernel in kernels if kernel.resource == "compute"}):
        of_dtype = [i for i, kernel in enumerate(kernels) if kernel.resource == "compute" and kernel.dtype == dtype]
        smallest = min(of_dtype, key=lambda index: kernels[index].work)
        with products_in(dtype), torch.no_grad():
            call = kernels[smallest].prepare()
            call()
            per_work_s = _seconds_a_call(clock, call, 1) / kernels[smallest].work
        slow = [i for i in of_dtype if i != smallest and per_work_s * kernels[i].work > _LONGEST_CALL_S]
        kept = [index for index in kept if index not in slow]
        if slow and context.rank == 0:
            say(f"{dtype}: {len(slow)} larger kernels are left out: a call would take over a second")
    return [kernels[index] for index in context.share(kept, list[int])]


_Done = tuple[tuple[str, str, tuple[tuple[str, int], ...]], int, int]


def _finished(directory: MeasurementDirectory | None) -> set[_Done]:
    if directory is None:
        return set()
    records = directory.records(RATES_FILE, RateSamples)
    done = {((r.kernel, r.dtype, tuple(r.sizes.items())), r.ranks_on_host, r.block) for r in records}
    if directory.resumed and done:
        say(f"going on in {directory.path}: {counted(len(done), 'point')} measured before")
    return done


def _plan(request: RooflineRequest, kernels: int, ranks: int) -> list[tuple[int, int, int]]:
    """(block, kernel, ranks at once) in an order that is shuffled in each block."""
    shuffle = random.Random(request.seed)
    plan = []
    for block in range(request.blocks):
        order = [(block, index, count) for index in range(kernels) for count in sorted({1, ranks})]
        shuffle.shuffle(order)
        plan += order
    return plan


def _measure(
    request: RooflineRequest, context: RankContext, clock: Clock, kernel: RateKernel, ranks: int, block: int
) -> RateSamples | None:
    """This rank's times; None where it stands by."""
    if context.rank >= ranks:
        context.barrier()
        return None
    with products_in(kernel.dtype), torch.no_grad():
        call = kernel.prepare()
        call()
        call_s = _seconds_a_call(clock, call, 1)
        calls = max(1, round(_SHORTEST_SAMPLE_S / max(call_s, 1e-9)))
        context.barrier()
        samples: list[float] = []
        while len(samples) < _FEWEST_SAMPLES or sum(samples) * calls < request.point_s:
            samples.append(_seconds_a_call(clock, call, calls))
    return RateSamples(
        resource=kernel.resource,
        kernel=kernel.name,
        sizes=dict(kernel.sizes),
        dtype=kernel.dtype,
        work=kernel.work,
        working_set_bytes=kernel.working_set_bytes,
        ranks_on_host=ranks,
        rank=context.rank,
        block=block,
        samples_s=tuple(samples),
        calls_per_sample=calls,
    )


def _seconds_a_call(clock: Clock, call: Callable[[], object], calls: int) -> float:
    begin = clock.stamp()
    for _ in range(calls):
        call()
    end = clock.stamp()
    clock.synchronise()
    return clock.seconds(begin, end) / calls
