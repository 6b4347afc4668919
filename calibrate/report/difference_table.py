"""What moved between two profiles, for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calibrate.report.diff import FALSE_DISCOVERIES, Change, Difference, Movement
from paradl_bench.core.terminal.tables import table, table_of
from paradl_bench.core.units import format_bytes, format_difference, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_CHANGES = 12
_SHOWN_UNJUDGED = 5
_FEW_MEASUREMENTS = 3


def print_difference(difference: Difference, console: Console, *, shown: int) -> None:
    """What differs between the environments, then what moved, the worst ``shown`` of it."""
    _print_changes(difference.changes, console)
    if difference.groups:
        _print_groups(difference, console)
    if difference.moved:
        _print_movements(difference.moved[:shown], console)
        if len(difference.moved) > shown:
            console.print(f"and {len(difference.moved) - shown} more: --json", highlight=False)
    if difference.without_spread:
        count, first = len(difference.without_spread), difference.without_spread[:_SHOWN_UNJUDGED]
        listed = "; ".join(f"{m.what} {format_difference(m.relative)}" for m in first)
        console.print(f"{count} without a known spread changed, most: {listed}", highlight=False)
    for names, where in ((difference.only_in_first, "A"), (difference.only_in_second, "B")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            console.print(f"only in {where}: {names[0]}{more}", highlight=False)
    _print_verdict(difference, console)


def _print_changes(changes: Sequence[Change], console: Console) -> None:
    if not changes:
        console.print("Environments: no difference, not even in the day")
        return
    rows = [
        (change.what, ", ".join(change.first) or "-", ", ".join(change.second) or "-")
        for change in changes[:_SHOWN_CHANGES]
    ]
    console.print(table(("", "A", "B"), rows, title="Between A and B differs"))
    if len(changes) > _SHOWN_CHANGES:
        rest = ", ".join(change.what for change in changes[_SHOWN_CHANGES:])
        console.print(f"and {rest}", highlight=False)


def _print_groups(difference: Difference, console: Console) -> None:
    rows = [
        {
            "numbers of": group.group.replace("_", " "),
            "compared": str(group.compared),
            "median change": format_difference(group.median_relative),
            "beyond 90%": str(group.moved),
            "by chance": f"{group.expected_by_chance:.3g}",
            "stand out": str(group.stand_out),
        }
        for group in difference.groups
    ]
    console.print(table_of(rows, title="By kind"))


def _print_movements(movements: Sequence[Movement], console: Console) -> None:
    rows = [
        {
            "": "*" if m.stands_out else "",
            "what": m.what,
            "A": _formatted(m.first, m.unit),
            "B": _formatted(m.second, m.unit),
            "change": format_difference(m.relative),
            "90% interval": "-" if m.interval_relative is None else f"±{m.interval_relative:.1%}",
            "sd": "-" if m.deviations is None else f"{m.deviations:.1f}",
        }
        for m in movements
    ]
    title = "Numbers that moved beyond their 90% interval, worst first (* stands out among all compared numbers)"
    console.print(table_of(rows, title=title, keys=2))


def _formatted(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "bytes" else f"{value:.3g} {unit}".rstrip()


def _print_verdict(difference: Difference, console: Console) -> None:
    lines = [
        f"{len(difference.moved)} of {difference.compared} numbers moved beyond their 90% interval; if nothing"
        f" had changed, {difference.expected_by_chance:.3g} would have moved by chance. {difference.stand_out}"
        f" stand out among so many (of those, {FALSE_DISCOVERIES:.0%} by chance)."
    ]
    if min(difference.measurements) < _FEW_MEASUREMENTS:
        lines.append(
            "Spreads are those between blocks of one measurement. A change between measurements shows as a median"
            " change of a whole kind. Three directories a side show that spread too."
        )
    for line in lines:
        console.print(line, highlight=False)
