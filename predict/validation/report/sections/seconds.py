"""Where each second comes from: the ledger that ``predict --explain`` prints."""

from __future__ import annotations

import itertools

import msgspec

from paradl_bench.core.units import format_bytes, format_seconds
from predict.ledger.ledger import Ledger, RoleLedger, shown_role
from predict.ledger.presentation import SHOWN, Part, effects_of, folded
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
    parts = folded(role.entries)
    rest = [entry for part in parts[SHOWN:] for entry in part.entries]
    rows = [_row(part) for part in parts[:SHOWN]]
    if rest:
        sums = {name: sum(getattr(entry, name) for entry in rest) for name in ("exposed_s", "hidden_s")}
        rows.append({"label": f"{len(rest)} more entries", "phase": "rest", **sums})
    effects = sorted(effects_of(role).items(), key=lambda item: -abs(item[1]))
    figure = Figure(
        name="entries",
        title="The largest entries of an iteration",
        shows="Exposed seconds are the entry's own and add up to the iteration. Hidden seconds pass beside something"
        " else on the rank. A star stands for the number of a block: equal blocks share a row.",
        table=Table(
            ("entry", "phase", "count", "exposed", "hidden", "base", "added", "base from", "size"),
            [_cells(part) for part in parts[: 4 * SHOWN]],
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


def _row(part: Part) -> dict[str, object]:
    seconds = {name: _sum(part, name) for name in ("exposed_s", "hidden_s")}
    return {"label": part.name, "phase": part.entries[0].phase or "waiting", **seconds}


def _cells(part: Part) -> tuple[str, ...]:
    first = part.entries[0]
    size = first.details.get("bytes")
    base_s = _sum(part, "base_s")
    times = _sum(part, "exposed_s"), _sum(part, "hidden_s"), base_s, _sum(part, "total_s") - base_s
    return (
        part.name,
        first.phase,
        f"{_sum(part, 'count'):g}",
        *map(format_seconds, times),
        first.source,
        format_bytes(size) if isinstance(size, int) else "",
    )


def _sum(part: Part, name: str) -> float:
    seconds: float = sum(getattr(entry, name) for entry in part.entries)
    return seconds
