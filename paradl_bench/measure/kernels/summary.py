"""What a sweep of kernels shows at once: how many of which kind, how long they take, what was passed over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.frames import print_rows
from paradl_bench.core.statistics import Floats, sorted_groups
from paradl_bench.core.terminal.command_line import open_console, write_output
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.measure.kernels.design import Design, SweptKernel, key_of_samples, read_design, shapes_of
from paradl_bench.measure.kernels.request import (
    DESIGN_FILE,
    PROGRESS_FILE,
    SKIPPED_FILE,
    SkippedKernel,
    SweepProgress,
)
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.records.measurement import read_manifest, read_records


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One kind, stage and dtype of a sweep.

    Attributes:
        shortest_s, median_s, longest_s: over the kernels' medians.
        spread_relative: median over kernels of (largest - smallest block's median) / median; None with one block.
    """

    kind: str
    stage: str
    dtype: str
    kernels: int
    samples: int
    shortest_s: float
    median_s: float
    longest_s: float
    spread_relative: float | None


class SweepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep: kernels in its design, those measured, and those skipped or never taken, by reason."""

    planned: int
    kernels: int
    samples: int
    wall_s: float
    complete: bool
    stages: tuple[StageSummary, ...]
    skipped: dict[str, int]
    passed_over: dict[str, dict[str, int]]


def summarise_sweep(directory: Path) -> SweepSummary:
    """Counts and spreads of a sweep; raises UserError where the directory holds none, or a damaged one."""
    manifest = read_manifest(directory)
    design = read_design(directory / DESIGN_FILE)
    records = read_records(directory, KERNELS_FILE, KernelSamples)
    skipped = read_records(directory, SKIPPED_FILE, SkippedKernel)
    parts = read_records(directory, PROGRESS_FILE, SweepProgress)
    return SweepSummary(
        planned=len(design.kernels),
        kernels=len(set(map(key_of_samples, records))),
        samples=sum(len(record.samples_s) for record in records),
        wall_s=sum(part.wall_s for part in parts),
        complete=manifest.complete,
        stages=tuple(_stages(records)),
        skipped=dict(Counter(f"{record.kernel.kind} {record.kernel.dtype}: {record.why}" for record in skipped)),
        passed_over=design.passed_over,
    )


def _stages(records: Iterable[KernelSamples]) -> Iterable[StageSummary]:
    of_stages = sorted_groups(records, lambda record: (record.shape.kind, record.shape.stage, record.dtype))
    for (kind, stage, dtype), of_stage in of_stages.items():
        kernels = sorted_groups(of_stage, key_of_samples)
        blocks = [np.array([np.median(record.samples_s) for record in group]) for group in kernels.values()]
        medians: Floats = np.array([np.median(values) for values in blocks])
        spreads = [
            float(np.ptp(values) / np.median(values)) for values in blocks if len(values) > 1 and np.median(values) > 0
        ]
        yield StageSummary(
            kind=kind,
            stage=stage,
            dtype=dtype,
            kernels=len(kernels),
            samples=sum(len(record.samples_s) for record in of_stage),
            shortest_s=float(medians.min()),
            median_s=float(np.median(medians)),
            longest_s=float(medians.max()),
            spread_relative=float(np.median(spreads)) if spreads else None,
        )


def print_sweep(directory: Path, *, as_json: bool) -> None:
    """Show a sweep on standard output, as a table or as asked for."""
    summary = summarise_sweep(directory)
    if print_rows(StageSummary, summary.stages):
        return
    if as_json:
        write_output("-", encode_pretty(summary))
        return
    rows = []
    for stage in summary.stages:
        times = (format_seconds(value) for value in (stage.shortest_s, stage.median_s, stage.longest_s))
        counts = (str(stage.kernels), str(stage.samples))
        spread = "-" if stage.spread_relative is None else f"{stage.spread_relative:.1%}"
        rows.append((stage.kind, stage.stage, stage.dtype, *counts, *times, spread))
    console = open_console()
    columns = ("kind", "stage", "dtype", "kernels", "samples", "shortest", "median", "longest", "between blocks")
    title = f"{summary.kernels} kernels of {summary.planned} planned, {format_seconds(summary.wall_s)}"
    console.print(table(columns, rows, title=title))
    for line in (*_passed_over(summary.passed_over), *_skipped(summary.skipped)):
        console.print(line, soft_wrap=True)


def _passed_over(counts: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{kind}: passed over " + ", ".join(f"{count} ({reason})" for reason, count in sorted(reasons.items()))
        for kind, reasons in sorted(counts.items())
    ]


def _skipped(reasons: dict[str, int]) -> list[str]:
    return [f"skipped {count}: {reason}" for reason, count in sorted(reasons.items())]


def print_plan(design: Design, seconds: Sequence[float], device: str, budget_s: float | None, *, as_json: bool) -> None:
    """Show what a sweep would measure, given what each kernel is estimated to take in all blocks."""
    kernels, total_s = _within(design.kernels, seconds, budget_s)
    if print_rows(SweptKernel, kernels):
        return
    if as_json:
        plan = {
            "kernels": [msgspec.to_builtins(kernel) for kernel in kernels],
            "estimated_s": total_s,
            "limits": msgspec.to_builtins(design.limits),
            "speeds": msgspec.to_builtins(design.speeds),
            "passed_over": design.passed_over,
        }
        write_output("-", encode_pretty(plan))
        return
    rows = []
    spent_s: dict[tuple[str, str], float] = defaultdict(float)
    for kernel, cost_s in zip(kernels, seconds, strict=False):
        spent_s[kernel.kind, kernel.dtype] += cost_s
    for (kind, dtype), group in sorted_groups(kernels, lambda kernel: (kernel.kind, kernel.dtype)).items():
        calls = sorted(kernel.estimate_s / len(shapes_of(kernel, device)) for kernel in group)
        times = (format_seconds(value) for value in (calls[0], calls[-1], spent_s[kind, dtype]))
        rows.append((kind, dtype, str(len(group)), *times, _sizes(group)))
    console = open_console()
    columns = ("kind", "dtype", "kernels", "shortest call", "longest call", "time", "sizes, smallest to largest")
    console.print(table(columns, rows, title=f"{len(kernels)} kernels, about {format_seconds(total_s)}"))
    limits = f"{format_seconds(design.limits.kernel_s)} a call, {format_bytes(design.limits.memory_bytes)} a kernel"
    console.print(f"limits: {limits}")
    for line in _passed_over(design.passed_over):
        console.print(line, soft_wrap=True)


def _within(
    kernels: Sequence[SweptKernel], seconds: Sequence[float], budget_s: float | None
) -> tuple[list[SweptKernel], float]:
    """The first kernels, as many as the budget is estimated to hold."""
    taken, total_s = [], 0.0
    for kernel, cost_s in zip(kernels, seconds, strict=True):
        if budget_s is not None and total_s + cost_s > budget_s:
            break
        taken.append(kernel)
        total_s += cost_s
    return taken, total_s


def _sizes(group: Sequence[SweptKernel]) -> str:
    """Sizes that vary."""
    ranges = {name: (min(k.sizes[name] for k in group), max(k.sizes[name] for k in group)) for name in group[0].sizes}
    return " ".join(f"{name}={low}..{high}" for name, (low, high) in ranges.items() if low != high)
