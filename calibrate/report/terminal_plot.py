"""Measured points, fit, 90% interval and residuals of a collective, in characters: 80 columns, no colour needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from calibrate.profile.collectives.communication import CommunicationFit, CommunicationPoint
from calibrate.profile.collectives.communication_time import communication_seconds, spread_s
from calibrate.profile.profile import Profile
from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import Z90, Floats, grouped
from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.plan.collectives.catalog import operations

_COLUMNS, _ROWS, _RESIDUAL_ROWS = 66, 15, 7
_MARGIN = 10
_MARKERS = "ox+*#%@&"
_BAND, _LINE, _AXIS = ":", "-", "|"


def plots(profile: Profile) -> Iterator[str]:
    """One text a (library, operation, level) that the profile holds measured points of."""
    for fits in measured_fits(profile).values():
        yield "\n".join(_plot(fits))


def measured_fits(profile: Profile) -> dict[tuple[str, str, str], list[CommunicationFit]]:
    """Fits with measured points by (library, operation, level), in order; those of a group from small messages on."""
    measured = sorted((fit for fit in profile.communication if fit.measured), key=lambda fit: fit.regime_range)
    return dict(sorted(grouped(measured, lambda fit: fit.key).items()))


def title_of(fits: Sequence[CommunicationFit]) -> str:
    """What fits of one (library, operation, level) are of, and their algorithms."""
    first, names = fits[0], ", ".join(dict.fromkeys(fit.algorithm for fit in fits))
    return f"{first.library} {first.operation}, level {first.level}: {names}"


def line_and_reach(fits: Sequence[CommunicationFit], ranks: int, sizes: Floats) -> tuple[Floats, Floats]:
    """Seconds that fits of one (library, operation, level) predict at sizes, and half of their 90% interval."""
    operation = lookup(operations(), fits[0].operation, "collective")
    line = communication_seconds(operation, fits, ranks, sizes)
    return line, Z90 * np.array([spread_s(operation, fits, ranks, float(size)) for size in sizes])


def _plot(fits: Sequence[CommunicationFit]) -> Iterator[str]:
    points = [point for fit in fits for point in fit.measured]
    ranks = sorted({point.ranks for point in points})
    markers = {count: _MARKERS[index % len(_MARKERS)] for index, count in enumerate(ranks)}
    yield f"{title_of(fits)}; time of a call"
    yield from _times(fits, points, markers)
    yield "prediction of a fit without this size, minus measured"
    yield from _residuals(points, markers)
    yield from _size_axis(points)
    legend = "  ".join(f"{marker} {count} ranks" for count, marker in markers.items())
    yield f"{'':{_MARGIN}} {legend}  {_LINE} fit  {_BAND} 90% interval of the line"


class _Canvas:
    """Characters in rows, the lowest value below."""

    def __init__(self, rows: int, low: float, high: float) -> None:
        self._low, self._high, self._rows = low, max(high, low + 1e-9), rows
        self.cells = [[" "] * _COLUMNS for _ in range(rows)]

    def row(self, value: float) -> int:
        share = (value - self._low) / (self._high - self._low)
        return min(max(self._rows - 1 - round(share * (self._rows - 1)), 0), self._rows - 1)

    def put(self, column: int, value: float, mark: str) -> None:
        self.cells[self.row(value)][column] = mark

    def lines(self, labels: dict[int, str]) -> Iterator[str]:
        for index, row in enumerate(self.cells):
            yield f"{labels.get(index, ''):>{_MARGIN}}{_AXIS}{''.join(row)}".rstrip()


def _column(size: float, points: Sequence[CommunicationPoint]) -> int:
    low, high = _range(points)
    share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low)) if high > low else 0.5
    return round(share * (_COLUMNS - 1))


def _range(points: Sequence[CommunicationPoint]) -> tuple[int, int]:
    sizes = [point.message_bytes for point in points]
    return min(sizes), max(sizes)


def _times(
    fits: Sequence[CommunicationFit], points: Sequence[CommunicationPoint], markers: dict[int, str]
) -> Iterator[str]:
    sizes = np.geomspace(*_range(points), _COLUMNS)
    curves = []
    for ranks in markers:
        line, reach = line_and_reach(fits, ranks, sizes)
        curves.append((line, np.minimum(reach, 0.9 * line)))
    measured = [point.measured_s for point in points]
    low = min(*measured, *(float(line.min()) for line, _ in curves))
    high = max(*measured, *(float(line.max()) for line, _ in curves))
    canvas = _Canvas(_ROWS, math.log(low), math.log(high))
    for line, reach in curves:
        for column in range(_COLUMNS):
            top, bottom = (canvas.row(math.log(line[column] + sign * reach[column])) for sign in (1, -1))
            for row in range(top, bottom + 1):
                canvas.cells[row][column] = _BAND
    for line, _ in curves:
        for column in range(_COLUMNS):
            canvas.put(column, math.log(line[column]), _LINE)
    for point in points:
        canvas.put(_column(point.message_bytes, points), math.log(point.measured_s), markers[point.ranks])
    ticks = np.linspace(math.log(low), math.log(high), 4)
    yield from canvas.lines({canvas.row(tick): format_seconds(math.exp(tick)) for tick in ticks.tolist()})


def _residuals(points: Sequence[CommunicationPoint], markers: dict[int, str]) -> Iterator[str]:
    errors = [point.held_out_s / point.measured_s - 1 for point in points]
    reach = max(0.01, *map(abs, errors))
    canvas = _Canvas(_RESIDUAL_ROWS, -reach, reach)
    for column in range(_COLUMNS):
        canvas.put(column, 0.0, ".")
    for point, error in zip(points, errors, strict=True):
        canvas.put(_column(point.message_bytes, points), error, markers[point.ranks])
    yield from canvas.lines({canvas.row(value): f"{value:+.0%}" for value in (reach, 0.0, -reach)})


def _size_axis(points: Sequence[CommunicationPoint]) -> Iterator[str]:
    yield f"{'':{_MARGIN}}+{'-' * _COLUMNS}"
    line = ""
    for size in sorted({point.message_bytes for point in points}):
        label, column = format_bytes(size), _column(size, points)
        start = max(min(_MARGIN + 1 + column - len(label) // 2, _MARGIN + 1 + _COLUMNS - len(label)), 0)
        if start >= len(line) + 2 or not line:
            line = line.ljust(start) + label
    yield line
