"""Which ``bucket_cap_mb`` makes an iteration shortest: a grid of caps by one evaluator, other groupings beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.plan import bucket_limits
from paradl_bench.spec.units import format_bytes, format_seconds
from paradl_bench.terminal import open_console
from predict.cost_model import CostModel
from predict.evaluators.osf import buffers_of
from predict.interval import interval
from predict.osf import Fusion, Rule
from predict.osf_form import Buffers, fused_as_ddp
from predict.request import read_request
from predict.workload import Evaluator, Point, evaluator_named


class BucketAdvice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one grouping of gradients makes of an iteration; seconds and bytes.

    Attributes:
        grouping: ``bucket_cap_mb 25``, ``torch's default``, ``layer by layer``, ``adaFusion``, ``MG-WFBP``.
        bucket_cap_mb: MiB, as DistributedDataParallel takes it; None for its default and for what DDP cannot be told.
        all_reduces: of an iteration. largest_bytes: of one of them.
        iteration_s, interval_s: by the evaluator that was asked; None where it knows DDP's buckets alone.
        overlap_s: the iteration by ``osf``, for which overlap and copies are free: the one number all groupings have.
        best: the shortest iteration of the grid.
    """

    strategy: str
    batch: int
    evaluator: str
    grouping: str
    bucket_cap_mb: float | None = None
    all_reduces: int
    largest_bytes: int
    iteration_s: float | None = None
    interval_s: tuple[float, float] | None = None
    overlap_s: float
    best: bool = False


def advise(options: Mapping[str, Any]) -> tuple[BucketAdvice, ...]:
    """The grid and the other groupings, for every point that the options ask for.

    Args:
        options: of the command line, by the names of its parameters.

    Raises:
        UserError: whatever of the options, files or limits is wrong, in one line; an evaluator that knows no buckets.
    """
    evaluator = evaluator_named(options["evaluator"])
    if evaluator.name not in ("simulate", "osf"):
        raise UserError(f"--evaluator {evaluator.name} knows no buckets: give simulate or osf")
    caps = parse_caps(options["caps"])
    request = read_request(options)
    found: list[BucketAdvice] = []
    for point in request.points:
        if not evaluator_named("osf").covers(point.strategy) or point.strategy.ranks < 2:
            raise UserError(f"buckets are those of data parallelism on 2 ranks or more, not of {point.strategy}")
        found += _of_point(request.model, evaluator, point, caps)
    return tuple(found)


def parse_caps(text: str) -> tuple[float, ...]:
    """MiB of ``1,2.5,25``, rising and without repeats.

    Raises:
        UserError: a part is no positive number.
    """
    found = set()
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 1 / 1024**2 <= value <= 1024**2:
            raise UserError(f"--caps {text}: {part.strip()!r} is no number of MiB from 1 byte to 1 TiB")
        found.add(value)
    return tuple(sorted(found))


def _of_point(model: CostModel, evaluator: Evaluator, point: Point, caps: Sequence[float]) -> list[BucketAdvice]:
    as_ddp = dataclasses.replace(model, fusion=Fusion(rule="ddp"))
    grid = [_of_cap(as_ddp, evaluator, point, cap) for cap in (None, *caps)]
    # Of caps that make the same buckets the first is named, torch's default before all.
    best = min(range(len(grid)), key=lambda index: (_seconds(grid[index]), index))
    grid[best] = msgspec.structs.replace(grid[best], best=True)
    rules: tuple[tuple[Rule, str], ...] = (("none", "layer by layer"), ("ada", "adaFusion"), ("mg-wfbp", "MG-WFBP"))
    return [*grid, *(_of_rule(model, evaluator, point, rule, name) for rule, name in rules)]


def _of_cap(as_ddp: CostModel, evaluator: Evaluator, point: Point, cap_mb: float | None) -> BucketAdvice:
    if cap_mb is not None:
        first, cap = bucket_limits(cap_mb)
        of_cap = msgspec.structs.replace(point.settings, first_bucket_bytes=first, bucket_cap_bytes=cap)
        point = dataclasses.replace(point, settings=of_cap)
    workload = evaluator.prepare(as_ddp, point)
    bounds = interval(workload)
    name = "torch's default" if cap_mb is None else f"bucket_cap_mb {cap_mb:g}"
    advice = _advice(as_ddp, evaluator, point, name, fused_as_ddp(as_ddp.network, point.settings))
    timing = workload.timing()
    return msgspec.structs.replace(
        advice, bucket_cap_mb=cap_mb, iteration_s=timing.iteration_s, interval_s=(bounds.low_s, bounds.high_s)
    )


def _of_rule(model: CostModel, evaluator: Evaluator, point: Point, rule: Rule, name: str) -> BucketAdvice:
    by_rule = dataclasses.replace(model, fusion=Fusion(rule=rule))
    return _advice(by_rule, evaluator, point, name, buffers_of(by_rule, point))


def _advice(model: CostModel, evaluator: Evaluator, point: Point, name: str, buffers: Buffers) -> BucketAdvice:
    return BucketAdvice(
        strategy=str(point.strategy),
        batch=point.settings.batch,
        evaluator=evaluator.name,
        grouping=name,
        all_reduces=len(buffers.bytes),
        largest_bytes=max(buffers.bytes, default=0),
        overlap_s=evaluator_named("osf").prepare(model, point).timing().iteration_s,
    )


def _seconds(advice: BucketAdvice) -> float:
    assert advice.iteration_s is not None
    return advice.iteration_s


def print_advice(advice: Sequence[BucketAdvice]) -> None:
    """A table a point on standard output, and what it says in one line."""
    console = open_console()
    for key in dict.fromkeys((row.strategy, row.batch) for row in advice):
        rows = [row for row in advice if (row.strategy, row.batch) == key]
        console.print(_table(rows), markup=False)
        best = next(row for row in rows if row.best)
        console.print(_in_words(best, rows[0]), highlight=False, markup=False)
    console.print(
        "free overlap: by osf, with overlap and copies for free and all ranks equally fast; the last three rows are no"
        " setting of DDP.",
        highlight=False,
    )


def _in_words(best: BucketAdvice, default: BucketAdvice) -> str:
    text = f"best of the grid: {best.grouping}, {format_seconds(_seconds(best))}"
    if best is default:
        return text
    return f"{text}, {_seconds(default) / _seconds(best) - 1:.2%} faster than torch's default"


def _table(rows: Sequence[BucketAdvice]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    first = rows[0]
    title = f"buckets of {first.strategy}, batch {first.batch}: {first.evaluator}"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("grouping", "all-reduces", "largest", "iteration", "90%", "free overlap", ""):
        table.add_column(name, justify="left" if name in ("grouping", "") else "right")
    for row in rows:
        time, bounds = row.iteration_s, row.interval_s
        around = f"{bounds[0] / time - 1:+.0%} {bounds[1] / time - 1:+.0%}" if time and bounds else ""
        cells = (
            row.grouping,
            str(row.all_reduces),
            format_bytes(row.largest_bytes),
            format_seconds(time) if time else "",
        )
        table.add_row(*cells, around, format_seconds(row.overlap_s), "best" if row.best else "")
    return table
