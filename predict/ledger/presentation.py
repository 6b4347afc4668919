"""Ledgers as a table for a person, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_bytes, format_seconds
from predict.ledger.ledger import Ledger, LedgerEntry, RoleLedger, shown_role
from predict.ledger.waterfall import MEANINGS, SHARED_HOST

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 20
"""Entries of a table."""
_NAME_WIDTH = 42
_FEWEST_FOLDED = 4
"""Fewer rows that are alike leave room for others."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LEAST_SHOWN_S = 0.5e-6
_BAR, _BAR_WIDTH = "#", 24
_NOT_PARTED = "The effect of a shared host is part of compute: the profile has no times of a rank alone on its host."
_COLUMNS = ("entry", "count", *(f"{name}\nms" for name in ("exposed", "hidden", "base", "added", "sd")), "base from")


def print_ledger(ledger: Ledger) -> None:
    """The waterfall; the largest entries of the role that waits least, and what effects add to all of its entries."""
    role = shown_role(ledger.roles)
    whole = f"{ledger.strategy} on batch {ledger.batch}: {format_seconds(ledger.iteration_s)} by {ledger.evaluator}"
    parts = folded(role.entries)
    rest = [entry for part in parts[SHOWN:] for entry in part.entries]
    rows = [
        (part.name, f"{sum(entry.count for entry in part.entries):g}", *_cells(part.entries), part.entries[0].source)
        for part in parts[:SHOWN]
    ]
    if rest:
        rows.append((f"{len(rest)} more entries", "", *_cells(rest), ""))
    rows.append(("all entries = the iteration", "", *_cells(role.entries), ""))
    played = role.role + (f" ({role.ranks} alike)" if role.ranks > 1 else "")
    console = open_console()
    console.print(_waterfall(ledger))
    console.print("; ".join(f"{step}: {MEANINGS[step]}" for step in ledger.waterfall_s), highlight=False)
    if ledger.ranks > 1 and SHARED_HOST not in ledger.waterfall_s:
        console.print(_NOT_PARTED, highlight=False)
    console.print(table(_COLUMNS, rows, title=f"{ledger.model}, {whole}, {played}"))
    for line in _lines(ledger, role, any_folded=any(len(part.entries) > 1 for part in parts[:SHOWN])):
        console.print(line, highlight=False)


def _waterfall(ledger: Ledger) -> Table:
    """A bar a step; each begins where the one above it ends, and is as wide as a cell that no line breaks."""
    whole_s, begin_s, rows = ledger.iteration_s, 0.0, []
    for step, seconds in ledger.waterfall_s.items():
        left, right = (round(_BAR_WIDTH * at / whole_s) for at in sorted((begin_s, begin_s + seconds)))
        bar = f"{'':{left}}{_BAR * max(right - left, 1)}"
        rows.append((step, f"{1e3 * seconds:.3f}", f"{seconds / whole_s:.1%}", bar))
        begin_s += seconds
    title = f"{ledger.model}, {ledger.strategy} on batch {ledger.batch}: where {format_seconds(whole_s)} go"
    return table(("step", "ms", "share", "each after the last"), rows, title=title)


class Part(NamedTuple):
    """An entry, or those of a run of equal blocks, which differ in the number in their name."""

    name: str
    entries: tuple[LedgerEntry, ...]


def folded(entries: Sequence[LedgerEntry]) -> list[Part]:
    """Entries with those of equal blocks put together, those that are exposed for longest first."""

    def alike(entry: LedgerEntry) -> tuple[str, Hashable]:
        of_any = msgspec.structs.replace(entry, name=_NUMBER.sub("*", entry.name))
        details = tuple(sorted(entry.details.items()))
        return called_entry(of_any), (of_any.name, entry.source, entry.count, details, round(entry.base_s, 12))

    parts: list[Part] = []
    for (name, _), like_entries in grouped(entries, alike).items():
        if len(like_entries) < _FEWEST_FOLDED:
            parts += [Part(called_entry(entry), (entry,)) for entry in like_entries]
        else:
            parts.append(Part(name, tuple(like_entries)))
    return sorted(parts, key=lambda part: -sum(entry.exposed_s for entry in part.entries))


def effects_of(role: RoleLedger) -> dict[str, float]:
    """Seconds that each effect adds to all entries of a role together."""
    effects: dict[str, float] = {}
    for entry in role.entries:
        for adjustment in entry.adjustments:
            effects[adjustment.effect] = effects.get(adjustment.effect, 0.0) + adjustment.added_s
    return effects


def called_entry(entry: LedgerEntry) -> str:
    """The entry's name, with its term, bytes and group as far as there is room."""
    size = entry.details.get("bytes")
    group = entry.details.get("group", "")
    about = [entry.term, format_bytes(size) if isinstance(size, int) else "", f"over {group}" if group else ""]
    name = ", ".join(text for text in (entry.name, *about) if text)
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"


def _cells(entries: Sequence[LedgerEntry]) -> list[str]:
    """Of all columns of numbers; the deviation of a single entry alone."""
    exposed, hidden, base, total = (
        sum(getattr(entry, name) for entry in entries) for name in ("exposed_s", "hidden_s", "base_s", "total_s")
    )
    sd = f"{1e3 * entries[0].sd_s:.3f}" if len(entries) == 1 else ""
    return [*(f"{1e3 * seconds:.3f}" for seconds in (exposed, hidden, base, total - base)), sd]


def _lines(ledger: Ledger, role: RoleLedger, *, any_folded: bool) -> list[str]:
    """What the columns mean, what effects add, and what is not shown."""
    largest = sorted(effects_of(role).items(), key=lambda item: -abs(item[1]))
    adjusted = ", ".join(
        f"{effect} {1e3 * seconds:+.3f} ms" for effect, seconds in largest if abs(seconds) >= _LEAST_SHOWN_S
    )
    return [
        *([f"added: {adjusted}"] if adjusted else []),
        *(
            ["*: stands for a number, as blocks of a model that are alike share a row. --json has each of them."]
            if any_folded
            else []
        ),
        "exposed: seconds that the entry adds to the iteration. hidden: seconds beside something else on the rank.",
        *_other_roles(len(ledger.roles) - 1),
    ]


def _other_roles(count: int) -> list[str]:
    if not count:
        return []
    if count == 1:
        return ["1 more role, which waits for this one, is in --json"]
    return [f"{count} more roles, which wait for this one, are in --json"]
