"""Contention, and what compute adds to collectives, in tables and as numbers that two profiles are compared by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from calibrate.profile.collectives.behind import BehindCompute
from calibrate.profile.collectives.beside_all_reduce import BesideAllReduce
from calibrate.profile.collectives.contention import Contention
from calibrate.profile.profile import Profile
from paradl_bench.core.statistics import Z90
from paradl_bench.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console


class Compared(NamedTuple):
    """A number of a profile: what it is, its value, relative standard deviation and unit."""

    what: str
    value: float
    relative_sd: float
    unit: str


def print_together(profile: Profile, console: Console) -> None:
    """Tables of what the profile holds of both; nothing where it holds none."""
    if profile.contention:
        _print(
            console,
            "Contention phi: multiplies beta while groups communicate at once (90% interval)",
            ("library", "operation", "level", "groups", "ranks each", "bytes", "phi", "interval", "residual"),
            [_contention_row(entry) for entry in profile.contention],
        )
    if profile.behind_compute:
        _print(
            console,
            "Behind compute: what compute before a collective adds to it (90%)",
            ("library", "operation", "level", "ranks", "bytes", "behind", "added", "factor", "residual", "lag"),
            [_behind_row(entry) for entry in profile.behind_compute],
        )
    if profile.beside_all_reduce:
        _print(
            console,
            "Beside an all-reduce in flight: what it adds to a call that is waited for (90%)",
            ("library", "operation", "level", "ranks", "bytes", "all-reduce", "added", "factor", "residual", "queued"),
            [_beside_row(entry) for entry in profile.beside_all_reduce],
        )


def _print(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        words = name in ("library", "operation", "level")
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _contention_row(entry: Contention) -> tuple[str, ...]:
    low, high = entry.factor_interval
    return (
        entry.library,
        entry.operation,
        entry.level,
        str(entry.concurrent),
        _range(entry.ranks, str),
        _range(entry.bytes_range, format_bytes),
        f"{entry.factor:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{entry.residual_relative_median:.1%}",
    )


def _behind_row(entry: BehindCompute) -> tuple[str, ...]:
    added_sd, factor_sd = (max(entry.covariance[i][i], 0.0) ** 0.5 for i in (0, 1))
    return (
        entry.library,
        entry.operation,
        entry.level,
        _range(entry.ranks, str),
        _range(entry.bytes_range, format_bytes),
        format_seconds(entry.compute_s),
        f"{format_seconds(entry.added_s)} ± {format_seconds(Z90 * added_sd)}",
        f"{entry.factor:.2f} ± {Z90 * factor_sd:.2f}",
        f"{entry.residual_relative_median:.1%}",
        "" if entry.lag_s is None else format_seconds(entry.lag_s),
    )


def _beside_row(entry: BesideAllReduce) -> tuple[str, ...]:
    added_sd, factor_sd = (max(entry.covariance[i][i], 0.0) ** 0.5 for i in (0, 1))
    return (
        entry.library,
        entry.operation,
        entry.level,
        _range(entry.ranks, str),
        _range(entry.bytes_range, format_bytes),
        _range(entry.exchange_bytes, format_bytes) + (f" at {entry.exchange_level}" if entry.exchange_level else ""),
        "waits for it" if entry.queues else f"{format_seconds(entry.added_s)} ± {format_seconds(Z90 * added_sd)}",
        "" if entry.queues else f"{entry.factor:.2f} ± {Z90 * factor_sd:.2f}",
        f"{entry.residual_relative_median:.1%}",
        f"{entry.queued:.0%}",
    )


def _range(span: tuple[int, int], words: Callable[[int], str]) -> str:
    low, high = map(words, span)
    return low if low == high else f"{low} to {high}"


def together_quantities(profile: Profile) -> Iterator[Compared]:
    """What ``calibrate diff`` compares of both: phi, and what compute adds to a collective and multiplies it by."""
    for entry in profile.contention:
        where = f"{entry.library} {entry.operation}, level {entry.level}, {entry.concurrent} groups at once"
        yield Compared(f"contention of {where}", entry.factor, entry.factor_sd / entry.factor, "times")
    for behind in profile.behind_compute:
        where = f"{behind.library} {behind.operation}, level {behind.level}"
        (added, _), (_, slope) = behind.covariance
        if behind.added_s:
            relative = max(added, 0.0) ** 0.5 / behind.added_s
            yield Compared(f"added by compute before {where}", behind.added_s, relative, "s")
        relative = max(slope, 0.0) ** 0.5 / behind.factor
        yield Compared(f"slow-down by compute before {where}", behind.factor, relative, "times")
    for beside in profile.beside_all_reduce:
        over = f" over level {beside.exchange_level}" if beside.exchange_level else ""
        where = f"{beside.library} {beside.operation} beside an all-reduce{over}, level {beside.level}"
        (added, _), (_, slope) = beside.covariance
        if beside.queues:
            continue
        if beside.added_s:
            yield Compared(f"added to {where}", beside.added_s, max(added, 0.0) ** 0.5 / beside.added_s, "s")
        yield Compared(f"slow-down of {where}", beside.factor, max(slope, 0.0) ** 0.5 / beside.factor, "times")
