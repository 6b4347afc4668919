"""Which ``bucket_cap_mb`` makes an iteration shortest: a grid of caps by one evaluator, other groupings beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_around, format_bytes, format_difference, format_seconds
from paradl_bench.strategies.data.fusion.buffers import Buffers, fused_as_ddp
from paradl_bench.strategies.data.fusion.rules import Fusion, Rule
from paradl_bench.strategies.exchange.options import ExchangeOptions, bucket_limits
from predict.closed_forms.osf import workload_of
from predict.costs.cost_model import CostModel
from predict.costs.input.input_terms import NO_INPUT, InputOptions
from predict.prediction.interval import Timed, gain_band, interval
from predict.prediction.request import Request, read_request
from predict.workload import Configuration, Evaluator, PreparedEvaluation, evaluator_named

_DEFAULT = "torch's default"


class BucketAdvice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one grouping of gradients makes of an iteration; seconds and bytes.

    Attributes:
        grouping: ``bucket_cap_mb 25``, ``torch's default``, ``layer by layer``, ``adaFusion``, ``MG-WFBP``.
        bucket_cap_mb: MiB, as DistributedDataParallel takes it; None for its default and for what DDP cannot be told.
        all_reduces: of an iteration. largest_bytes: of one of them.
        iteration_s, interval_s: by the evaluator that was asked; None where it knows DDP's buckets alone.
        gain: torch's default's iteration over this one's, less 1, with its 90% interval; None where ``iteration_s`` is.
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
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    overlap_s: float
    best: bool = False
    extrapolated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def advise(options: Mapping[str, Any]) -> tuple[tuple[BucketAdvice, ...], tuple[str, ...]]:
    """The grid and the other groupings, for every point asked for; and what a sweep had to leave out, and why."""
    evaluator = evaluator_named(options["evaluator"])
    if evaluator.name not in ("simulate", "osf"):
        raise UserError(f"--evaluator {evaluator.name} has no buckets: give simulate or osf")
    caps = parse_caps(options["caps"])
    request = _without_input(read_request(options))
    advice: list[BucketAdvice] = []
    for point in request.points:
        if not evaluator_named("osf").covers(point.strategy) or point.strategy.ranks < 2:
            raise UserError(f"buckets belong to data parallelism on at least 2 ranks, not to {point.strategy}")
        advice += _of_point(request.costs, evaluator, point, caps)
    return tuple(advice), request.left_out


def parse_caps(text: str) -> tuple[float, ...]:
    """MiB of ``1,2.5,25``, rising and without repeats; a UserError where a part is no positive number."""
    sizes = set()
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 1 / 1024**2 <= value <= 1024**2:
            raise UserError(f"--caps {text}: {part.strip()!r} is not a size in MiB from 1 byte to 1 TiB")
        sizes.add(value)
    return tuple(sorted(sizes))


def _without_input(request: Request) -> Request:
    """Buckets are compared by what they make of the exchange; reading that takes longer would hide it."""
    if request.costs.input_options != InputOptions():
        raise UserError("predict buckets compares exchanges without the input: leave the options of the input out")
    return dataclasses.replace(request, costs=dataclasses.replace(request.costs, input_options=NO_INPUT))


def _of_point(
    costs: CostModel, evaluator: Evaluator, point: Configuration, caps: Sequence[float]
) -> list[BucketAdvice]:
    as_ddp = dataclasses.replace(costs, fusion=Fusion(rule="ddp"))
    timed = [_of_cap(as_ddp, evaluator, point, cap) for cap in (None, *caps)]
    default = timed[0][1]
    grid = [
        msgspec.structs.replace(
            advice, gain=default.iteration_s / time.iteration_s - 1, gain_interval=gain_band(time, default)
        )
        for advice, time in timed
    ]
    # Of caps that make the same buckets the first is named, torch's default before all.
    best = min(range(len(grid)), key=lambda index: (_seconds(grid[index]), index))
    grid[best] = msgspec.structs.replace(grid[best], best=True)
    rules: tuple[tuple[Rule, str], ...] = (("none", "layer by layer"), ("ada", "adaFusion"), ("mg-wfbp", "MG-WFBP"))
    return [*grid, *(_of_rule(costs, evaluator, point, rule, name) for rule, name in rules)]


def _of_cap(
    as_ddp: CostModel, evaluator: Evaluator, point: Configuration, cap_mb: float | None
) -> tuple[BucketAdvice, Timed]:
    if cap_mb is not None:
        first, cap = bucket_limits(cap_mb)
        of_cap = point.settings.changed(ExchangeOptions, first_bucket_bytes=first, bucket_cap_bytes=cap)
        point = dataclasses.replace(point, settings=of_cap)
    buffers = fused_as_ddp(as_ddp.network, point.settings)
    overlapped = workload_of(as_ddp, point, buffers)
    workload = overlapped if evaluator.name == "osf" else evaluator.prepare(as_ddp, point)
    timed = Timed(workload.timing().iteration_s, interval(workload))
    grouping = _DEFAULT if cap_mb is None else f"bucket_cap_mb {cap_mb:g}"
    advice = msgspec.structs.replace(
        _advice(evaluator, point, grouping, buffers, (workload, overlapped)),
        bucket_cap_mb=cap_mb,
        iteration_s=timed.iteration_s,
        interval_s=(timed.bounds.low_s, timed.bounds.high_s),
    )
    return advice, timed


def _of_rule(costs: CostModel, evaluator: Evaluator, point: Configuration, rule: Rule, name: str) -> BucketAdvice:
    fusion = Fusion(rule=rule)
    by_rule = dataclasses.replace(costs, fusion=fusion)
    buffers = by_rule.buffers(fusion, point.strategy, point.settings)
    overlapped = workload_of(by_rule, point, buffers)
    return _advice(evaluator, point, name, buffers, (overlapped,))


def _advice(
    evaluator: Evaluator,
    point: Configuration,
    grouping: str,
    buffers: Buffers,
    workloads: Sequence[PreparedEvaluation],
) -> BucketAdvice:
    """Remarks are those of all workloads, equal ones once; the last of these is osf's."""
    remarks = [workload.remarks for workload in workloads]
    return BucketAdvice(
        strategy=str(point.strategy),
        batch=point.settings.batch,
        evaluator=evaluator.name,
        grouping=grouping,
        all_reduces=len(buffers.bytes),
        largest_bytes=max(buffers.bytes, default=0),
        overlap_s=workloads[-1].timing().iteration_s,
        extrapolated=tuple(dict.fromkeys(line for remark in remarks for line in remark.extrapolated())),
        notes=tuple(dict.fromkeys(line for remark in remarks for line in remark.notes())),
    )


def _seconds(advice: BucketAdvice) -> float:
    assert advice.iteration_s is not None
    return advice.iteration_s


def print_advice(advice: Sequence[BucketAdvice]) -> None:
    """A table a point on standard output, and what it says in one line."""
    console = open_console()
    for key in dict.fromkeys((row.strategy, row.batch) for row in advice):
        rows = [row for row in advice if (row.strategy, row.batch) == key]
        console.print(_table(rows))
        console.print(_in_words(rows), highlight=False)
        lines = dict.fromkeys(f"extrapolated: {line}" for row in rows for line in row.extrapolated)
        for line in (*lines, *dict.fromkeys(line for row in rows for line in row.notes)):
            console.print(line, highlight=False)
    console.print("free overlap: as osf predicts it. The last three rows are not settings of DDP.", highlight=False)


def _in_words(rows: Sequence[BucketAdvice]) -> str:
    best = next(row for row in rows if row.best)
    text = f"best of the grid: {best.grouping}, {format_seconds(_seconds(best))}"
    if best.grouping == _DEFAULT:
        return text
    clear = [row for row in rows if row.gain_interval is not None and row.gain_interval[0] > 0]
    text += f", {_gain_in_words(best)} {_DEFAULT}"
    if not clear:
        return f"{text}; no cap is clearly faster than {_DEFAULT}"
    if best in clear:
        return text
    surest = min(clear, key=_seconds)
    return f"{text}, which is not certain; {surest.grouping} is clearly faster, {_gain_in_words(surest)} it"


def _gain_in_words(row: BucketAdvice) -> str:
    assert row.gain is not None
    assert row.gain_interval is not None
    low, high = row.gain_interval
    return f"{row.gain:.2%} (90%: {format_difference(low, 2)} to {format_difference(high, 2)}) faster than"


def _table(rows: Sequence[BucketAdvice]) -> Any:
    first, shown = rows[0], []
    for row in rows:
        time, bounds = row.iteration_s, row.interval_s
        around = format_around(bounds, time) if time and bounds else ""
        cells = (
            row.grouping,
            str(row.all_reduces),
            format_bytes(row.largest_bytes),
            format_seconds(time) if time else "",
        )
        shown.append((*cells, around, format_seconds(row.overlap_s), "best" if row.best else ""))
    columns = ("grouping", "all-reduces", "largest", "iteration", "90%", "free overlap", "")
    return table(columns, shown, title=f"buckets of {first.strategy}, batch {first.batch}: {first.evaluator}")
