"""A table that cuts no number: columns that do not fit beside the others are printed below them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_MOST_COLUMNS = 8
_UNLIMITED = 10_000


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
