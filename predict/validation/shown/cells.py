"""Tables of a validation, and how they call a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paradl_bench.core.terminal.printed import in_markdown
from paradl_bench.plan.settings import SIMULATED_ALONE
from predict.validation.validation_report import Pair, Repeated

_TOLD = ("schedule", *SIMULATED_ALONE, "exchange", "fused_by", "batch_norm")


class Table(NamedTuple):
    """Titles of columns, and cells."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown_table(cells: Table) -> list[str]:
    """Lines of a table."""

    def line(row: Sequence[str]) -> str:
        return f"| {' | '.join(in_markdown(cell) for cell in row)} |"

    return [line(cells.titles), line(["---"] * len(cells.titles)), *map(line, cells.rows)]


def configured_pair(pair: Pair | Repeated) -> str:
    """A run's strategy, with what was chosen of it."""
    return configured(pair.strategy, pair.options, emulated=bool(pair.emulated))


def configured(strategy: str, options: Mapping[str, str], *, emulated: bool) -> str:
    """The strategy, with what tells runs of it apart."""
    told = [f"{name.replace('_', '-')} {options[name]}" for name in _TOLD if name in options]
    told += ["emulated"] if emulated else []
    return strategy + (f" ({'; '.join(told)})" if told else "")
