"""A console that shows what it is given: names from files are no markup, no emoji and no escapes of a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from paradl_bench.core.terminal.printed import plain


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
