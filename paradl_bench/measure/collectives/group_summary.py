"""What a sweep shows of groups that ran at once, and of collectives behind compute; torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import summarise
from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.contexts.behind import BehindComputeSamples
from paradl_bench.records.contexts.beside_all_reduce import BesideAllReduceSamples
from paradl_bench.records.samples import CollectiveSamples

if TYPE_CHECKING:
    from rich.table import Table

_COMPARES_ALL = frozenset({"torch", "mpi4py"})


class ConcurrentRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation and size of several groups at once, and of one group alone.

    Attributes:
        alone_s, together_s: medians over calls, blocks and groups; alone is None where nothing alone was measured.
        ratio: of the two. contention phi, which multiplies beta only, is fitted by ``calibrate``.
    """

    library: str
    tool: str
    operation: str
    level: str
    ranks: int
    concurrent: int
    message_bytes: int
    alone_s: float | None
    together_s: float
    ratio: float | None
    calls: int
    verified: bool


class BehindRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation and size behind compute and back to back: medians over calls and blocks.

    Attributes:
        compute_s: before the call, on a rank. lag_s: between the first and the last rank's arrival; None where ranks
            share no clock.
        behind_s: from the last arrival on. back_to_back_s: as in a sweep.
    """

    library: str
    operation: str
    level: str
    ranks: int
    message_bytes: int
    compute_s: float
    lag_s: float | None
    back_to_back_s: float
    behind_s: float
    calls: int


class BesideRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation and size beside an all-reduce in flight and apart from it: medians over repetitions and blocks.

    Attributes:
        exchange_bytes: of the all-reduce. exchange_level: that it spans where it goes over more ranks than the call;
            else empty. beside_s: None where no call began before it was done.
        queued: of the calls that began beside it, how many ended after it; None without any.
    """

    library: str
    operation: str
    level: str
    ranks: int
    message_bytes: int
    exchange_bytes: int
    apart_s: float
    beside_s: float | None
    queued: float | None
    calls: int
    exchange_level: str = ""


def verified_word(tool: str, *, verified: bool) -> str:
    """Whether results were right: ours are all compared, other tools compare where their version and options do."""
    if verified:
        return "yes"
    return "WRONG" if tool in _COMPARES_ALL else "no"


def concurrent_rows(records: Iterable[CollectiveSamples]) -> tuple[ConcurrentRow, ...]:
    """One row an operation, size and number of groups at once."""
    groups: dict[tuple[str, int, int], list[CollectiveSamples]] = defaultdict(list)
    for record in records:
        groups[record.operation, record.message_bytes, record.concurrent].append(record)
    return tuple(
        _concurrent_row(groups[key], groups.get((key[0], key[1], 1), [])) for key in sorted(groups) if key[2] > 1
    )


def _concurrent_row(together: list[CollectiveSamples], alone: list[CollectiveSamples]) -> ConcurrentRow:
    first = together[0]
    alone_s = _median_call_s(alone) if alone else None
    together_s = _median_call_s(together)
    return ConcurrentRow(
        library=first.library,
        tool=first.tool,
        operation=first.operation,
        level=first.level,
        ranks=first.ranks,
        concurrent=first.concurrent,
        message_bytes=first.message_bytes,
        alone_s=alone_s,
        together_s=together_s,
        ratio=together_s / alone_s if alone_s else None,
        calls=sum(len(record.samples_s[0]) for record in together),
        verified=all(record.verified for record in (*together, *alone)),
    )


def _median_call_s(records: list[CollectiveSamples]) -> float:
    operation = lookup(operations(), records[0].operation, "collective")
    return float(np.median(np.concatenate([operation.call_seconds(record.samples_s) for record in records])))


def behind_rows(records: Iterable[BehindComputeSamples]) -> tuple[BehindRow, ...]:
    """One row an operation and size, over all blocks."""
    groups: dict[tuple[str, int], list[BehindComputeSamples]] = defaultdict(list)
    for record in records:
        groups[record.operation, record.message_bytes].append(record)
    return tuple(_behind_row(groups[key]) for key in sorted(groups))


def _behind_row(records: list[BehindComputeSamples]) -> BehindRow:
    first = records[0]
    operation = lookup(operations(), first.operation, "collective")
    behind = summarise([value for record in records for value in record.after_last_arrival_s()])
    lags = [value for record in records for value in record.lags_s()]
    return BehindRow(
        library=first.library,
        operation=first.operation,
        level=first.level,
        ranks=first.ranks,
        message_bytes=first.message_bytes,
        compute_s=float(np.median([value for record in records for row in record.compute_s for value in row])),
        lag_s=float(np.median(lags)) if lags else None,
        back_to_back_s=float(
            np.median(np.concatenate([operation.call_seconds(record.back_to_back_s) for record in records]))
        ),
        behind_s=behind.median_s,
        calls=behind.samples,
    )


def beside_rows(records: Iterable[BesideAllReduceSamples]) -> tuple[BesideRow, ...]:
    """One row an operation and size, over all blocks and groups of ranks."""
    groups: dict[tuple[str, int], list[BesideAllReduceSamples]] = defaultdict(list)
    for record in records:
        groups[record.operation, record.message_bytes].append(record)
    return tuple(_beside_row(groups[key]) for key in sorted(groups))


def _beside_row(records: list[BesideAllReduceSamples]) -> BesideRow:
    first = records[0]
    beside = [value for record in records for value in record.beside_s() if value is not None]
    waited, begun = np.sum([record.queued() for record in records], axis=0).tolist()
    return BesideRow(
        library=first.library,
        operation=first.operation,
        level=first.level,
        ranks=first.ranks,
        message_bytes=first.message_bytes,
        exchange_bytes=first.exchange_bytes,
        exchange_level=first.exchange_level,
        apart_s=float(np.median([value for record in records for value in record.apart_s()])),
        beside_s=float(np.median(beside)) if beside else None,
        queued=waited / begun if begun else None,
        calls=begun,
    )


def concurrent_table(rows: tuple[ConcurrentRow, ...]) -> Table:
    """A table of groups at once."""
    first = rows[0]
    title = f"{first.concurrent} groups of {first.ranks} ranks at once against one alone, level {first.level}"
    table = _table(title, "medians; groups and one group alone in turn; calibrate fits contention phi to the ratios")
    for name in ("operation", "message", "groups", "alone", "at once", "ratio", "calls", "verified"):
        table.add_column(name, justify="left" if name == "operation" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.operation,
            format_bytes(row.message_bytes),
            str(row.concurrent),
            "not measured" if row.alone_s is None else format_seconds(row.alone_s),
            format_seconds(row.together_s),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            str(row.calls),
            verified_word(row.tool, verified=row.verified),
        )
    return table


def behind_table(rows: tuple[BehindRow, ...]) -> Table:
    """A table of collectives behind compute."""
    table = _table(
        f"behind {format_seconds(rows[0].compute_s)} of compute: from the last rank's arrival on",
        "medians; lag is between the first and the last rank's arrival, and no part of the time",
    )
    for name in ("operation", "message", "back to back", "behind compute", "lag", "calls"):
        table.add_column(name, justify="left" if name == "operation" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.operation,
            format_bytes(row.message_bytes),
            format_seconds(row.back_to_back_s),
            format_seconds(row.behind_s),
            "no one clock" if row.lag_s is None else format_seconds(row.lag_s),
            str(row.calls),
        )
    return table


def beside_table(rows: tuple[BesideRow, ...]) -> Table:
    """A table of calls beside an all-reduce in flight."""
    table = _table(
        f"{rows[0].ranks} ranks beside an all-reduce of {format_bytes(rows[0].exchange_bytes)} in flight"
        f"{_over_more(rows[0])}: from the last rank's arrival on",
        "medians of repetitions' means, behind compute; queued: ended only after the all-reduce",
    )
    for name in ("operation", "message", "apart", "beside", "queued", "calls"):
        table.add_column(name, justify="left" if name == "operation" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.operation,
            format_bytes(row.message_bytes),
            format_seconds(row.apart_s),
            "none" if row.beside_s is None else format_seconds(row.beside_s),
            "" if row.queued is None else f"{row.queued:.0%}",
            str(row.calls),
        )
    return table


def _over_more(row: BesideRow) -> str:
    return f" over all at level {row.exchange_level}" if row.exchange_level else ""


def _table(title: str, caption: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False)
