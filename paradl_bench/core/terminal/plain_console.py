"""A console that shows what it is given: names from files are no markup, no emoji and no escapes of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from paradl_bench.core.terminal.printed import in_markdown, plain


class PlainConsole(Console):
    """Takes every text literally; a style is given as one (:class:`rich.text.Text`, ``style=``), never in the text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """As Console's; a sentence is broken into lines at a terminal alone, so that a file can be searched for it."""
        if not self.is_terminal and all(isinstance(each, str) for each in objects):
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
        for each in objects:
            lines = _markdown(each) if isinstance(each, Table) else map(in_markdown, str(each).splitlines())
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
