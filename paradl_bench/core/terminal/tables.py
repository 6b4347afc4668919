"""Tables of all commands, in one look."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_NUMBER = re.compile(r"[-+±<x/ ]{0,4}\d")


def table(columns: Iterable[str], rows: Iterable[Sequence[str | Text]], *, title: str | None = None) -> Table:
    """A table as wide as it needs. A column whose cells mostly begin with a number runs from the right.

    A column that is empty in all rows is left out.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    rows = list(rows)
    shown = [(name, cells) for name, *cells in zip(columns, *rows, strict=True) if any(map(str, cells)) or not rows]
    for name, cells in shown:
        filled = [str(cell) for cell in cells if str(cell)]
        numbers = sum(_NUMBER.match(cell) is not None for cell in filled)
        drawn.add_column(name, justify="right" if 2 * numbers > len(filled) else "left", overflow="fold")
    for row in zip(*(cells for _, cells in shown), strict=True):
        drawn.add_row(*row)
    return drawn


def table_of(rows: Sequence[Mapping[str, str | Text]], *, title: str | None = None) -> Table:
    """A :func:`table` of at least one row, each of which names its cells by their columns."""
    return table(rows[0], [list(row.values()) for row in rows], title=title)
