"""Where each second comes from: the ledger that ``predict --explain`` prints."""

from __future__ import annotations

import itertools

import msgspec

from paradl_bench.core.units import format_bytes, format_seconds
from predict.ledger.ledger import Ledger, LedgerEntry, RoleLedger, shown_role
from predict.ledger.presentation import SHOWN, called_entry, effects_of
from predict.ledger.waterfall import MEANINGS
from predict.validation.report.content import Content, Figure, Section
from predict.validation.shown.cells import Table

MOST_ENTRIES = 1_000
"""Of the ledger in a page: some 400 kB of JSON, which leave room for the charts of a deep network."""


def section(content: Content) -> Section:
    """Of the role that waits least."""
    ledger = content.case.ledger
    role = shown_role(ledger.roles)
    lines = [f"Of {role.role}, {role.ranks} alike.{_others(ledger)}"]
    document, left_out = ledger_document(ledger, role)
    shown, rest = role.entries[:SHOWN], role.entries[SHOWN:]
    rows = [_row(entry) for entry in shown]
    if rest:
        sums = {name: sum(getattr(entry, name) for entry in rest) for name in ("exposed_s", "hidden_s")}
        rows.append({"label": f"{len(rest)} more entries", "phase": "rest", **sums})
    effects = sorted(effects_of(role).items(), key=lambda item: -abs(item[1]))
    figure = Figure(
        name="entries",
        title="The largest entries of an iteration",
        shows="Exposed seconds are the entry's own and add up to the iteration. Hidden seconds pass beside something"
        " else on the rank.",
        table=Table(
            ("entry", "phase", "count", "exposed", "hidden", "base", "added", "base from", "size"),
            [_cells(entry) for entry in role.entries[: 4 * SHOWN]],
        ),
        data=rows,
    )
    return Section(
        name="seconds",
        title="Where each second comes from",
        lines=[*lines, *left_out],
        figures=(_waterfall(ledger), figure),
        tables={
            "What effects add to all entries": Table(
                ("effect", "adds"), [(name, f"{1e3 * seconds:+.3f} ms") for name, seconds in effects]
            )
        }
        if effects
        else {},
        documents={"ledger": document},
    )


def _others(ledger: Ledger) -> str:
    return f" {len(ledger.roles) - 1} more roles wait for it." if len(ledger.roles) > 1 else ""


def ledger_document(ledger: Ledger, role: RoleLedger) -> tuple[dict[str, object], list[str]]:
    """What a page holds of a ledger as JSON, and in words what it leaves out.

    It is the role that is shown: a long pipeline's together are larger than the page may be. So are all entries of a
    deep network.
    """
    kept = msgspec.structs.replace(role, entries=role.entries[:MOST_ENTRIES])
    document = {"iteration_s": ledger.iteration_s, "interval_s": ledger.interval_s, "role": kept}
    rest = role.entries[MOST_ENTRIES:]
    if not rest:
        return document, []
    seconds = {name: sum(getattr(entry, name) for entry in rest) for name in ("exposed_s", "hidden_s")}
    said = f"The data of this page hold the {MOST_ENTRIES} largest of {len(role.entries)} entries."
    return document | {"left_out": {"entries": len(rest), **seconds}}, [f"{said} predict --explain -o writes all."]


def _waterfall(ledger: Ledger) -> Figure:
    """Steps of the iteration, each behind the last."""
    ends_s = list(itertools.accumulate(ledger.waterfall_s.values()))
    steps = zip(ledger.waterfall_s, [0.0, *ends_s], ends_s, strict=False)
    return Figure(
        name="waterfall",
        title="What the iteration is made of, step by step",
        shows="Each step begins where the step before it ends. The last step ends with the iteration.",
        table=Table(
            ("step", "time", "share", "what it is"),
            [
                (step, format_seconds(seconds), f"{seconds / ledger.iteration_s:.1%}", MEANINGS[step])
                for step, seconds in ledger.waterfall_s.items()
            ],
        ),
        data=[{"label": step, "begin_s": begin_s, "end_s": end_s} for step, begin_s, end_s in steps],
    )


def _row(entry: LedgerEntry) -> dict[str, object]:
    seconds = {"exposed_s": entry.exposed_s, "hidden_s": entry.hidden_s}
    return {"label": called_entry(entry), "phase": entry.phase or "waiting", **seconds}


def _cells(entry: LedgerEntry) -> tuple[str, ...]:
    size = entry.details.get("bytes")
    times = entry.exposed_s, entry.hidden_s, entry.base_s, entry.total_s - entry.base_s
    return (
        called_entry(entry),
        entry.phase,
        f"{entry.count:g}",
        *map(format_seconds, times),
        entry.source,
        format_bytes(size) if isinstance(size, int) else "",
    )
