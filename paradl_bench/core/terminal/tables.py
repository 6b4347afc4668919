"""Tables of all commands, in one look."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_NUMBER = re.compile(r"(x/ |[-+±</ ]{0,4})\d")
_WORDS_WIDTH = 24
"""Characters of a cell from which on words may be broken into lines; numbers never are."""


def table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str | None = None,
    keys: int = 1,
    words: Container[str] = (),
) -> Table:
    """A table as wide as it needs. A column whose cells mostly begin with a number runs from the right.

    A column that is empty in all rows is left out. Where the rest is too wide, it is printed in parts, which cut no
    number and break no short word.

    Args:
        keys: so many first columns name a row, or as many more as tell rows apart. Each part has them.
        words: columns of words, though their cells may begin with a number.
    """
    from paradl_bench.core.terminal.plain_console import FittedTable

    rows = list(rows)
    every = enumerate(zip(columns, *rows, strict=True))
    shown = [(at, name, cells) for at, (name, *cells) in every if any(map(str, cells)) or not rows]
    named = _naming(rows, keys)
    drawn = FittedTable(title, keys=sum(at < named for at, *_ in shown))
    for _, name, cells in shown:
        filled = [str(cell) for cell in cells if str(cell)]
        numbered = sum(_NUMBER.match(cell) is not None for cell in filled)
        numbers = name not in words and 2 * numbered > len(filled)
        width = max(len(line) for text in (name, *filled) for line in text.splitlines() or [""])
        whole = numbers or width <= _WORDS_WIDTH
        drawn.add_column(
            name,
            justify="right" if numbers else "left",
            overflow="fold",
            no_wrap=whole,
            min_width=width if whole else _WORDS_WIDTH,
        )
    for row in zip(*(cells for *_, cells in shown), strict=True):
        drawn.add_row(*row)
    return drawn


def _naming(rows: Sequence[Sequence[str | Text]], keys: int) -> int:
    """How many first columns tell rows apart, from so many on; just those where all columns do not."""
    texts = [tuple(map(str, row)) for row in rows]
    counts = range(keys, len(texts[0]) if texts else keys)
    return next((count for count in counts if len({text[:count] for text in texts}) == len(texts)), keys)


def table_of(
    rows: Sequence[Mapping[str, str | Text]], *, title: str | None = None, keys: int = 1, words: Container[str] = ()
) -> Table:
    """A :func:`table` of at least one row, each of which names its cells by their columns."""
    return table(rows[0], [list(row.values()) for row in rows], title=title, keys=keys, words=words)
