"""Pictures that commands write: which files can be drawn, their colours, and how they are written."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.command_line import write_output
from paradl_bench.core.terminal.printed import in_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = (".png", ".svg", ".html")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Told apart by people with any colour vision (Okabe and Ito)."""
_DOTS_PER_INCH = 130


def refuse_undrawable(target: str, output: str | None = None) -> None:
    """Refuse, before any work is done, a file that cannot be drawn.

    Args:
        output: where rows are written; None where they are not.

    Raises:
        UserError: its name ends in nothing that is drawn, matplotlib is missing, or rows go to the same file.
    """
    if Path(target).suffix.lower() not in DRAWN:
        raise UserError(f"--plot {target}: the name has to end in {', '.join(DRAWN)}")
    refuse_without_matplotlib()
    if output not in (None, "-") and Path(output).resolve() == Path(target).resolve():
        raise UserError(f"-o and --plot both write to {target}: give two names")


def refuse_without_matplotlib() -> None:
    """Raise a UserError where nothing can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'paradl[plots]'") from None


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_line(
    panel: Axes,
    places: Sequence[float],
    values: Sequence[float],
    intervals: Sequence[tuple[float, float]],
    colour: str,
    label: str,
) -> None:
    """A line through values, with their intervals: a band, or a bar where there is one value alone."""
    panel.plot(places, values, "o-", color=colour, label=in_drawing(label), markersize=4)
    lows, highs = zip(*intervals, strict=True)
    if len(places) > 1:
        panel.fill_between(places, lows, highs, color=colour, alpha=0.15, linewidth=0)
    else:
        # A band of one place has no width.
        panel.plot([*places, *places], [*lows, *highs], color=colour, linewidth=1.2, marker="_", markersize=6)


def write_figure(figure: Figure, target: str, *, title: str, shows: str, force: bool) -> None:
    """Write a figure as its file's name says; ``.html`` holds the drawing inside.

    Args:
        title: of the page. shows: what the drawing shows, for those who can't see it.

    Raises:
        UserError: the file exists and ``force`` is not given, or cannot be written.
    """
    drawn = io.BytesIO()
    suffix = Path(target).suffix.lower()
    figure.savefig(drawn, dpi=_DOTS_PER_INCH, format="png" if suffix == ".html" else suffix[1:])
    content = drawn.getvalue()
    write_output(target, _page(content, title, shows) if suffix == ".html" else content, force=force)


def _page(drawing: bytes, title: str, shows: str) -> bytes:
    from html import escape

    data = base64.b64encode(drawing).decode()
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    return f'{head}<img alt="{escape(shows)}" src="data:image/png;base64,{data}"></html>'.encode()
