"""How well the profile's lines fit what was measured, at sizes that they have seen and at others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.report.explanation import model_sums
from calibrate.report.terminal_plot import line_and_reach, measured_fits, title_of
from paradl_bench.core.units import format_bytes, format_difference, format_seconds
from predict.validation.report.content import Content, Figure, Section
from predict.validation.shown.cells import Table

_CURVE_POINTS = 24
_MOST_DRAWN = 24
"""Operations that are drawn: each has a curve for each number of ranks."""
_MOST_RANKS = 8


def section(content: Content) -> Section | None:
    """Nothing where nothing was measured."""
    groups, sums = measured_fits(content.profile), model_sums(content.profile)
    fits = content.profile.communication
    if not fits and not sums:
        return None
    drawn = list(groups.values())[:_MOST_DRAWN]
    layers = [
        (
            f"{summed.model}, batch {summed.batch}, {summed.computed_in}, {summed.ranks_on_host} on the host",
            f"{summed.layers_measured}/{summed.layers}",
            format_seconds(summed.sum_s),
            format_seconds(summed.iteration_s),
            format_difference(summed.remainder_relative),
            " to ".join(map(format_difference, summed.remainder_interval)),
        )
        for summed in sums
    ]
    titles = ("measured", "layers", "sum of parts", "iteration", "remainder", "90%")
    return Section(
        name="fits",
        title="What it stands on: fits and their errors",
        lines=["Held-out errors are errors at sizes left out of the fit, one at a time."],
        figures=((_errors(fits),) if fits else ()) + ((_curves(drawn),) if drawn else ()),
        tables={"How measured layers add up to an iteration": Table(titles, layers)} if layers else {},
    )


def _named(fit: CommunicationFit) -> str:
    piece = "" if fit.regime == "all" else f", {fit.regime}"
    return f"{fit.library} {fit.operation}, {fit.level}{piece}"


def _errors(fits: Sequence[CommunicationFit]) -> Figure:
    rows = [
        {
            "label": _named(fit),
            "residual": fit.residual_relative_median,
            "held_out": fit.held_out_relative_error,
            "held_out_ranks": fit.held_out_ranks_relative_error,
        }
        for fit in fits
    ]
    cells = [
        (
            _named(fit),
            fit.algorithm,
            f"{format_bytes(fit.bytes_range[0])} to {format_bytes(fit.bytes_range[1])}",
            "-".join(map(str, dict.fromkeys(fit.ranks_range))),
            f"{fit.residual_relative_median:.1%}",
            f"{fit.held_out_relative_error:.1%}",
            "" if fit.held_out_ranks_relative_error is None else f"{fit.held_out_ranks_relative_error:.1%}",
        )
        for fit in fits
    ]
    titles = ("collective", "algorithm", "fitted on", "ranks", "residual", "held out", "held-out ranks")
    return Figure(
        name="fit_errors",
        title="Errors of the fits of collectives",
        shows="A circle is the median error at the points fitted, a square at sizes left out, a triangle at rank counts"
        " left out.",
        table=Table(titles, cells),
        data=rows,
    )


def _curves(groups: Sequence[Sequence[CommunicationFit]]) -> Figure:
    cells = [
        (
            title_of(fits),
            str(point.ranks),
            format_bytes(point.message_bytes),
            format_seconds(point.measured_s),
            *(
                format_difference(seconds / point.measured_s - 1) if point.measured_s else ""
                for seconds in (point.fitted_s, point.held_out_s)
            ),
        )
        for fits in groups
        for fit in fits
        for point in fit.measured
    ]
    return Figure(
        name="fits",
        title="Time of a call, measured and fitted, and what the fit misses",
        shows="Marks are measured, lines are fitted, bands their 90% intervals. Below, filled marks are residuals of"
        " the fit. Hollow marks are errors at sizes left out of the fit.",
        table=Table(("collective", "ranks", "message", "measured", "residual", "held out"), cells),
        data=[{"label": title_of(fits), "ranks": _of_ranks(fits)} for fits in groups],
    )


def _of_ranks(fits: Sequence[CommunicationFit]) -> list[dict[str, Any]]:
    """Points, line and band of each number of ranks."""
    points = [point for fit in fits for point in fit.measured]
    curves = []
    for ranks in sorted({point.ranks for point in points})[:_MOST_RANKS]:
        of_ranks = [point for point in points if point.ranks == ranks]
        sizes = np.geomspace(
            max(min(point.message_bytes for point in of_ranks), 1),
            max(max(point.message_bytes for point in of_ranks), 1),
            _CURVE_POINTS,
        )
        line, reach = line_and_reach(fits, ranks, sizes)
        columns = (sizes, line, np.maximum(line - reach, line / 20), line + reach)
        curves.append(
            {
                "ranks": ranks,
                "points": [(p.message_bytes, p.measured_s, p.fitted_s, p.held_out_s) for p in of_ranks],
                "curve": [tuple(float(f"{value:.4g}") for value in row) for row in zip(*columns, strict=True)],
            }
        )
    return curves
