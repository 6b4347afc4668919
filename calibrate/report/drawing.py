"""Measured points, fit, 90% interval and residuals of every (library, operation, level), drawn as PNG.

The interval is that of the line: of its parameters, and of what drifts between blocks.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.profile.collectives.communication import CommunicationFit, CommunicationPoint
from calibrate.profile.collectives.communication_time import pieces_of
from calibrate.profile.profile import Profile
from calibrate.report.terminal_plot import line_and_reach, measured_fits, title_of
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import file_name, write_bytes_atomically
from paradl_bench.core.registry import lookup
from paradl_bench.core.terminal.pictures import COLOURS, new_figure, refuse_without_matplotlib
from paradl_bench.core.terminal.printed import in_drawing
from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.plan.collectives.catalog import operations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

_MARKERS = "os^Dv<"
_CURVE_POINTS = 200
_MOST_TICKS = 7
_INCHES = (8.0, 6.5)


def draw_profile(profile: Profile, directory: Path) -> list[Path]:
    """Draw one PNG a (library, operation, level) into a directory, which is made; their paths.

    Raises:
        UserError: matplotlib is missing, nothing to draw, or the directory cannot be written.
    """
    groups = _groups(profile)
    refuse_without_matplotlib()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [_draw(fits, directory / f"{file_name('-'.join(key))}.png") for key, fits in groups.items()]
    except OSError as error:
        raise UserError(f"cannot draw into {directory}: {error.strerror or error}") from error


def _draw(fits: Sequence[CommunicationFit], path: Path) -> Path:
    drawn = io.BytesIO()
    figure = new_figure(*_INCHES)
    _draw_fits(fits, figure)
    figure.savefig(drawn, dpi=130, format="png")
    write_bytes_atomically(path, drawn.getvalue())
    return path


def profile_figure(profile: Profile) -> Figure:
    """All that :func:`draw_profile` draws, one below the other; a UserError where there is nothing to draw."""
    groups = _groups(profile)
    figure = new_figure(_INCHES[0], _INCHES[1] * len(groups))
    for fits, part in zip(groups.values(), figure.subfigures(len(groups), squeeze=False).flat, strict=True):
        _draw_fits(fits, part)
    return figure


def _groups(profile: Profile) -> dict[tuple[str, str, str], list[CommunicationFit]]:
    groups = measured_fits(profile)
    if not groups:
        raise UserError("the profile holds no measured points of collectives, so there is nothing to draw")
    return groups


def _draw_fits(fits: Sequence[CommunicationFit], figure: FigureBase) -> None:
    """Points, lines and residuals of the fits of one (library, operation, level)."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    points = [point for fit in fits for point in fit.measured]
    for index, ranks in enumerate(sorted({point.ranks for point in points})):
        style = COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)]
        _draw_ranks(above, below, fits, [point for point in points if point.ranks == ranks], style)
    _mark_regimes(above, below, fits)
    _label(above, below, points)
    errors = [abs(point.held_out_s / max(point.measured_s, 1e-12) - 1) for point in points]
    missed = f"{np.median(errors):.1%} in the median, {max(errors):.1%} at most"
    title = f"{title_of(fits)}; error at sizes left out {missed}"
    above.set_title(in_drawing(title), fontsize=11, wrap=True)


def _draw_ranks(
    above: Axes,
    below: Axes,
    fits: Sequence[CommunicationFit],
    points: Sequence[CommunicationPoint],
    style: tuple[str, str],
) -> None:
    """One rank count: points, line and band above, residuals below."""
    colour, marker = style
    ranks = points[0].ranks
    sizes = np.geomspace(min(p.message_bytes for p in points), max(p.message_bytes for p in points), _CURVE_POINTS)
    line, reach = line_and_reach(fits, ranks, sizes)
    at = [point.message_bytes for point in points]
    # A band that reaches 0 has no lower end on a logarithmic axis.
    above.fill_between(sizes, np.maximum(line - reach, line / 20), line + reach, color=colour, alpha=0.2, lw=0)
    above.plot(sizes, line, color=colour, lw=1.3)
    measured = [point.measured_s for point in points]
    above.plot(at, measured, marker, color=colour, ms=5, mec="white", mew=0.5, label=f"{ranks} ranks")
    for label, filled in (("fitted_s", True), ("held_out_s", False)):
        values = [100 * (getattr(point, label) / point.measured_s - 1) for point in points]
        below.plot(at, values, marker, ms=4.5, color=colour, mfc=colour if filled else "none", alpha=0.9)


def _mark_regimes(above: Axes, below: Axes, fits: Sequence[CommunicationFit]) -> None:
    """Where one regime ends and the next begins; of a step's bytes, at each rank count elsewhere."""
    operation = lookup(operations(), fits[0].operation, "collective")
    counts = np.array(sorted({point.ranks for fit in fits for point in fit.measured}), float)
    for lower, upper in itertools.pairwise(fit for fit in fits if not fit.by_ranks):
        (piece,) = pieces_of(operation, [lower])
        edge = float(np.sqrt(lower.regime_range[1] * upper.regime_range[0]))
        for at in np.unique(edge * piece.parts(counts)):
            for axes in (above, below):
                axes.axvline(at, color="0.6", lw=0.8, ls=":")


def _label(above: Axes, below: Axes, points: Sequence[CommunicationPoint]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, NullLocator

    above.set_xscale("log", base=2)
    above.set_yscale("log")
    sizes = sorted({point.message_bytes for point in points})
    step = -(-len(sizes) // _MOST_TICKS)
    below.set_xticks(sizes[::step], [format_bytes(size) for size in sizes[::step]])
    below.xaxis.set_minor_locator(NullLocator())
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    above.set_ylabel("time of a call")
    below.set_ylabel("predicted - measured, %")
    below.set_xlabel("message")
    below.axhline(0, color="0.4", lw=0.8)
    handles, _ = above.get_legend_handles_labels()
    handles.append(Line2D([], [], color="0.3", lw=1.3, label="fit, with 90% interval of the line"))
    above.legend(handles=handles, fontsize=9, loc="upper left")
    residual = [
        Line2D([], [], marker="o", ls="", ms=4.5, color="0.3", mfc=fill, label=label)
        for fill, label in (("0.3", "fitted"), ("none", "size left out"))
    ]
    below.legend(handles=residual, fontsize=8, ncols=2, loc="best")
    for axes in (above, below):
        axes.grid(True, which="major", color="0.9", lw=0.7)
        axes.spines[["top", "right"]].set_visible(False)
