"""What a sweep shows of collectives in contexts: medians idle and so surrounded; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import sorted_groups
from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.contexts.context import ContextSamples

if TYPE_CHECKING:
    from rich.table import Table


class ContextRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation and size in a context and idle: medians over repetitions, blocks and groups of ranks.

    Attributes:
        context: ``groups=2`` for two groups at once. neighbour: what surrounds the calls; empty for groups.
        neighbour_level: that an all-reduce in flight spans where it goes over more ranks than the call; else empty.
        idle_s, in_context_s: None where nothing was measured so.
        neighbour_ratio: how many times longer compute beside takes; None for what is not beside.
        lag_s: between the first and the last rank's arrival; None where ranks share no clock.
        queued: share of the calls begun beside an all-reduce that ended after it; None where there is none.
    """

    library: str
    operation: str
    level: str
    ranks: int
    context: str
    neighbour: str = ""
    neighbour_level: str = ""
    message_bytes: int
    idle_s: float | None
    in_context_s: float | None
    ratio: float | None
    neighbour_ratio: float | None = None
    lag_s: float | None = None
    queued: float | None = None
    calls: int
    verified: bool = True


def context_rows(records: Iterable[ContextSamples]) -> tuple[ContextRow, ...]:
    """One row a context, neighbour, operation and size."""
    groups = sorted_groups(
        records, lambda r: (r.context, r.neighbour, r.neighbour_level, r.operation, r.message_bytes, r.groups)
    )
    return tuple(map(_row, groups.values()))


def _row(records: Sequence[ContextSamples]) -> ContextRow:
    first = records[0]
    operation = lookup(operations(), first.operation, "collective")
    idle_s = _median([value for record in records for value in record.idle_s(operation.call_seconds)])
    in_context_s = _median([value for record in records for value in record.in_context_s(operation.call_seconds)])
    waited, begun = np.sum([record.queued() for record in records], axis=0).tolist()
    beside = [np.divide(record.neighbour_s, record.neighbour_idle_s) for record in records if record.neighbour_idle_s]
    lags = [value for record in records if record.context == "after-compute" for value in record.lags_s()]
    return ContextRow(
        library=first.library,
        operation=first.operation,
        level=first.level,
        ranks=first.ranks,
        context=first.context if first.groups == 1 else f"{first.context}={first.groups}",
        neighbour=first.neighbour,
        neighbour_level=first.neighbour_level,
        message_bytes=first.message_bytes,
        idle_s=idle_s,
        in_context_s=in_context_s,
        ratio=_ratio(in_context_s, idle_s),
        neighbour_ratio=_median([value for ratios in beside for value in np.ravel(ratios)]),
        lag_s=_median(lags),
        queued=waited / begun if begun and first.outlived else None,
        calls=begun,
        verified=all(record.verified for record in records),
    )


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def _ratio(in_context_s: float | None, idle_s: float | None) -> float | None:
    return in_context_s / idle_s if in_context_s is not None and idle_s else None


CAPTION = (
    "medians of alternating calls. compute: how many times longer compute takes beside the call. queued: the call"
    " ended only after the all-reduce. lag: time between the first and the last rank's arrival, not part of the"
    " call"
)
"""Under a table of contexts."""


def context_table(rows: Sequence[ContextRow]) -> Table:
    """A table of all of them."""
    from paradl_bench.core.terminal.tables import table

    columns = ("context", "operation", "message", "idle", "in context", "ratio", "besides", "calls")
    title = "in a context (from the last rank's arrival on) against idle"
    return table(columns, map(_cells, rows), title=title, keys=3)


def _cells(row: ContextRow) -> Sequence[str]:
    return (
        f"{row.context} {row.neighbour}".strip() + (f" at {row.neighbour_level}" if row.neighbour_level else ""),
        row.operation,
        format_bytes(row.message_bytes),
        "not measured" if row.idle_s is None else format_seconds(row.idle_s),
        "none" if row.in_context_s is None else format_seconds(row.in_context_s),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        _besides(row),
        str(row.calls),
    )


def _besides(row: ContextRow) -> str:
    if not row.verified:
        return "not verified"
    if row.neighbour_ratio is not None:
        return f"compute {row.neighbour_ratio:.2f}"
    if row.queued is not None:
        return f"queued {row.queued:.0%}"
    return "" if row.lag_s is None else f"lag {format_seconds(row.lag_s)}"
