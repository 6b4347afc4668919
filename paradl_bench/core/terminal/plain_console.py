"""A console that shows what it is given: names from files are no markup, no emoji and no escapes of a terminal.

And tables that cut no number: columns that do not fit beside the others are printed below them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from paradl_bench.core.terminal.printed import in_markdown, plain

_MOST_COLUMNS = 8
_UNLIMITED = 10_000


class PlainConsole(Console):
    """Takes every text literally; a style is given as one (:class:`rich.text.Text`, ``style=``), never in the text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """As Console's; a sentence is broken into lines at a terminal alone, so that a file can be searched for it."""
        if not self.is_terminal and all(isinstance(item, str) for item in objects):
            settings.setdefault("soft_wrap", True)
        super().print(*objects, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """A text without what would steer a terminal, so that widths are those of what is shown."""
        return super().render_str(plain(text), **(settings | {"markup": False, "emoji": False}))

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """As Console's, with the same done to texts that were made elsewhere."""
        for segment in super().render(renderable, options):
            steers = segment.control is None and plain(segment.text) != segment.text
            yield Segment(plain(segment.text), segment.style) if steers else segment


class MarkdownConsole(PlainConsole):
    """Prints tables as Markdown's, whole, and every line between them as a paragraph."""

    def print(self, *objects: Any, **_: Any) -> None:
        """As Console's, without styles and widths."""
        for item in objects:
            lines = _markdown(item) if isinstance(item, Table) else map(in_markdown, str(item).splitlines())
            for line in (*lines, ""):
                self.file.write(f"{line}\n")


def _markdown(table: Table) -> Iterator[str]:
    if table.title:
        yield from (f"**{in_markdown(str(table.title))}**", "")
    columns = table.columns
    yield _row(str(column.header) for column in columns)
    yield _row("---:" if column.justify == "right" else "---" for column in columns)
    for cells in zip(*(column.cells for column in columns), strict=True):
        yield _row(map(str, cells))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(in_markdown, cells))} |"


class FittedTable(Table):
    """As rich's; each part of it repeats its first columns, which name the rows.

    Args:
        keys: how many columns those are.
    """

    def __init__(self, title: str | None = None, *, keys: int = 1) -> None:
        super().__init__(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        self._keys = keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or tables below each other: of at most eight columns, each as wide as it needs."""
        for part in self._parts(console, options):
            yield from super(FittedTable, part).__rich_console__(console, options)

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[FittedTable]:
        def fits(part: FittedTable) -> bool:
            # Asked of a narrow console, rich would say no more than its width.
            needed = Measurement.get(console, options.update_width(_UNLIMITED), part).minimum
            return len(part.columns) <= _MOST_COLUMNS and needed <= options.max_width

        if fits(self):
            yield self
            return
        named, others, at = self.columns[: self._keys], self.columns[self._keys :], 0
        while at < len(others):
            part = self._with((*named, others[at]), first=at == 0)
            at += 1
            while at < len(others):
                wider = self._with((*part.columns, others[at]), first=bool(part.title))
                if not fits(wider):
                    break
                part, at = wider, at + 1
            yield part

    def _with(self, columns: Sequence[Column], *, first: bool) -> FittedTable:
        part = FittedTable(str(self.title) if first and self.title else None, keys=self._keys)
        part.columns = [dataclasses.replace(column, _index=index) for index, column in enumerate(columns)]
        part.rows = self.rows
        return part
