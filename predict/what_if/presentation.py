"""A what-if as a table for a person, and drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.pictures import COLOURS, draw_line, new_figure, write_figure
from paradl_bench.core.terminal.printed import in_drawing
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_around, format_seconds
from predict.costs.hardware.what_if_hardware import AS_MEASURED
from predict.prediction.confidence import confidence_in
from predict.prediction.presentation import memory_cell
from predict.what_if.quantities import COUNTS, DEVICE, FACTORS, Setting, hardware_of, shown_value
from predict.what_if.what_if import WhatIf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_TICKS = 9
_PANELS_ABREAST = 3
_OTHERS = ("epoch", "memory")


def print_what_if(rows: Sequence[WhatIf], *, grid: bool, ranked: bool = False, why: bool = False) -> None:
    """A table on standard output, and below it what the columns mean and what the rows rest on.

    Args:
        ranked: rows are in the order of what helps most.
        why: list every remark.
    """
    from rich.text import Text

    first = rows[0]
    names = list(dict.fromkeys(name for row in rows for name in row.varied))
    varied = names if grid or len(names) == 1 else ["varied"]
    named_by = _bases(rows) if ranked else rows
    of_points = {
        "layers": [row.layers_from for row in named_by],
        "strategy": [row.strategy for row in named_by],
        "ranks": [str(row.ranks) for row in named_by],
        "batch": [str(row.batch) for row in named_by],
    }
    alike = {name: cells[0] for name, cells in of_points.items() if len(set(cells)) == 1 and name != "layers"}
    named = {name: cells for name, cells in of_points.items() if len(set(cells)) > 1 and name not in varied}
    columns = [*named, *varied, "iteration", "90%", "speed-up", "bound by", *_OTHERS]
    cells = [
        [
            *(of_row[index] for of_row in named.values()),
            *([_text(row.varied)] if varied == ["varied"] else [_value(row, name) for name in names]),
            format_seconds(row.iteration_s),
            format_around(row.interval_s, row.iteration_s),
            f"{row.speedup_over_base:.3g}",
            f"{row.bound_by} {row.seconds_of[row.bound_by] / row.iteration_s:.0%}",
            *_other_cells(row, [] if ranked else rows),
        ]
        for index, row in enumerate(rows)
    ]
    styled = [
        [Text(cell, style="" if row.varied else "bold") for cell in of] for row, of in zip(rows, cells, strict=True)
    ]
    how = "all combinations" if grid else "one at a time" if len(names) > 1 else ""
    about = ", ".join([first.model, *(f"{name} {cell}" for name, cell in alike.items())])
    what = "twice as much of one thing at a time" if ranked else f"{', '.join(names)}" + (f" ({how})" if how else "")
    title = f"{about}: {first.evaluator}, what if {what}"
    open_console().print(table(columns, styled, title=title, keys=len(named) + len(varied)))
    for line in _most_helpful(rows) if ranked else ():
        open_console().print(line, highlight=False)
    _print_notes(rows, why=why)


def _bases(rows: Sequence[WhatIf]) -> list[WhatIf]:
    """The row as measured that each row is held against."""
    starts = [index for index, row in enumerate(rows) if not row.varied]
    return [rows[max(start for start in starts if start <= index)] for index in range(len(rows))]


def _most_helpful(rows: Sequence[WhatIf]) -> list[str]:
    """What helps each point most, in words."""
    lines = []
    for base, best in itertools.pairwise(rows):
        if best.varied and not base.varied:
            point = f"{base.strategy} on batch {base.batch}"
            lines.append(
                f"{point}: {_text(best.varied)} helps most, {best.speedup_over_base:.3g} times as many samples/s."
            )
    return lines


def _other_cells(row: WhatIf, rows: Sequence[WhatIf]) -> list[str]:
    """Memory where it is not the same in all rows, and the epoch."""
    differs = len({other.memory_bytes for other in rows}) > 1
    return [
        "" if row.epoch_s is None else format_seconds(row.epoch_s),
        memory_cell(row.memory_bytes, row.memory_interval_bytes, row.fits) if differs else "",
    ]


def _print_notes(rows: Sequence[WhatIf], *, why: bool) -> None:
    """What the columns mean, and what the rows rest on."""
    console = open_console()
    # Rows on other hardware would say so once a value; what they vary stands in the table.
    as_measured = [row for row in rows if DEVICE not in row.varied and hardware_of(row.varied) == AS_MEASURED]
    lines = confidence_in([(f"{row.strategy} on batch {row.batch}", row) for row in as_measured]).lines(why=why)
    if any(row.sources["scaled_by_roofline"] for row in rows):
        lines.append("extrapolated: compute on other hardware is scaled by the roofline")
    if any(DEVICE in row.varied for row in rows):
        lines.append("device: compute is scaled by the data sheets of both devices; links and host stay as measured")
    if {name.partition("@")[0] for row in rows for name in row.varied} & set(FACTORS):
        lines.append("bandwidth, latency, peak-flops, memory-bandwidth: factors on the measured value.")
    lines.append(
        "speed-up: samples/s over the samples/s of the row as measured (-). bound by: the largest part of the"
        " iteration."
    )
    if any(row.bound_by == "compute" for row in rows):
        lines.append("compute includes what a shared host, overlap and late ranks add; predict --explain shows each.")
    if any(row.bound_by == "host dispatch" for row in rows):
        lines.append("host dispatch: kernels wait so long for their host. Shorter kernels would wait longer.")
    if any(row.bound_by == "exposed communication" for row in rows):
        lines.append("exposed communication: communication that nothing hides.")
    for line in lines:
        console.print(line, highlight=False)


def _text(setting: Setting) -> str:
    return ", ".join(f"{name} {shown_value(name, value)}" for name, value in setting.items()) or "-"


def _value(row: WhatIf, name: str) -> str:
    """What a row has of a quantity: ``-`` as measured, with the number of ranks or samples that this is."""
    if name in row.varied:
        return shown_value(name, row.varied[name])
    return f"- ({getattr(row, name)})" if name in COUNTS else "-"


def draw_what_if(rows: Sequence[WhatIf], target: str, *, force: bool) -> None:
    """Draw :func:`what_if_figure` into a file; ``.html`` holds the drawing inside.

    Raises:
        UserError: the file exists and ``force`` is not given, or cannot be written.
    """
    title = f"{rows[0].model}: what if"
    figure = what_if_figure(rows)
    shows = "speed-up of each change" if _one_value_each(rows) else "iteration over what was varied"
    write_figure(figure, target, title=title, shows=shows, force=force)


def _one_value_each(rows: Sequence[WhatIf]) -> bool:
    """Whether each change is of one quantity, to one value: nothing to draw a line through."""
    bases = [id(base) for base in _bases(rows)]
    changes = [(base, *row.varied) for base, row in zip(bases, rows, strict=True) if row.varied]
    return all(len(row.varied) < 2 for row in rows) and len(set(changes)) == len(changes)


def what_if_figure(rows: Sequence[WhatIf]) -> Figure:
    """Bars of speed-ups where each quantity has one value, else the iteration over each quantity."""
    return _speedup_figure(rows) if _one_value_each(rows) else _panels_figure(rows)


def _speedup_figure(rows: Sequence[WhatIf]) -> Figure:
    """One bar for each change: its samples/s over those as measured; what helps most is on top."""
    several, of_points = _layers_differ(rows), len([row for row in rows if not row.varied]) > 1
    changed = [(base, row) for base, row in zip(_bases(rows), rows, strict=True) if row.varied]
    figure = new_figure(7, 1.4 + 0.35 * len(changed))
    axes = figure.subplots()
    points = [_point(base, several) for base, _ in changed]
    colours = {point: COLOURS[at % len(COLOURS)] for at, point in enumerate(dict.fromkeys(points))}
    for at, ((_, row), point) in enumerate(zip(changed, points, strict=True)):
        # One label for each colour: matplotlib leaves out those that begin with an underscore.
        label = in_drawing(point) if points.index(point) == at else "_"
        bar = axes.barh(at, row.speedup_over_base, 0.7, color=colours[point], label=label)
        axes.bar_label(bar, [f"{row.speedup_over_base:.2f}"], padding=3, fontsize=8)
    axes.axvline(1, color="0.3", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(changed)), [in_drawing(_text(row.varied)) for _, row in changed])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("samples/s, times those as measured")
    if of_points:
        axes.legend(fontsize=8)
    figure.suptitle(in_drawing(f"{rows[0].model}: {rows[0].evaluator}" + ("" if of_points else f", {points[0]}")))
    return figure


def _point(base: WhatIf, several: bool) -> str:
    """A point as measured in words, with the source of its layers' seconds where there are several."""
    return f"{base.strategy}, batch {base.batch}" + (f", layers {base.layers_from}" if several else "")


def _panels_figure(rows: Sequence[WhatIf]) -> Figure:
    """The iteration over each quantity that was varied, a panel each, with its interval.

    A line for each strategy and source of layers' seconds (KernelMLP, figures 4 and 5: roofline beside MLP), and in
    a grid one for each combination of the other quantities. The row as measured is a dashed line.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.varied))
    columns = min(len(names), _PANELS_ABREAST)
    lines_of_panels = math.ceil(len(names) / columns)
    figure = new_figure(1 + 5.5 * columns, 4.5 * lines_of_panels)
    grid = figure.subplots(lines_of_panels, columns, squeeze=False, sharey=True)
    for panel in grid.flat[len(names) :]:
        panel.remove()
    for panel, name in zip(grid.flat, names, strict=False):
        varied = dict.fromkeys(row.varied[name] for row in rows if name in row.varied)
        # Names stand side by side in the order given; numbers on a scale of their logarithms.
        place = {value: at if name == DEVICE else float(value) for at, value in enumerate(varied)}
        for index, (label, line) in enumerate(_lines(rows, name).items()):
            values = [place[row.varied[name]] for row in line]
            seconds, intervals = [row.iteration_s for row in line], [row.interval_s for row in line]
            draw_line(panel, values, seconds, intervals, COLOURS[index % len(COLOURS)], label)
        for base in (row for row in rows if not row.varied):
            panel.axhline(base.iteration_s, color="0.5", linestyle="--", linewidth=1)
        panel.set_xscale("linear" if name == DEVICE else "log")
        _mark_values(panel, name, place)
        panel.set_xlabel(f"{name}, times what was measured" if name.partition("@")[0] in FACTORS else name)
        panel.legend(fontsize=8)
    for panel in grid[:, 0]:
        panel.set_ylabel("iteration [s], with 90% interval")
    grid[0, 0].set_ylim(bottom=0)
    figure.suptitle(in_drawing(f"{rows[0].model}: {rows[0].evaluator}"))
    return figure


def _mark_values(panel: Axes, name: str, place: Mapping[float | str, float]) -> None:
    """Ticks at values that were varied, by where they stand, at most so many of them that they can be read."""
    from matplotlib.ticker import NullLocator

    values = sorted(place, key=lambda value: place[value])
    marked = values[:: -(-len(values) // _MOST_TICKS)]
    panel.set_xticks([place[value] for value in marked], [shown_value(name, value) for value in marked])
    panel.xaxis.set_minor_locator(NullLocator())


def _layers_differ(rows: Sequence[WhatIf]) -> bool:
    """Whether the seconds of layers are from several sources."""
    return len({row.layers_from for row in rows}) > 1


def _lines(rows: Sequence[WhatIf], name: str) -> dict[str, list[WhatIf]]:
    """Rows along one quantity, by their base, which stands before them, and by what else they are of."""
    lines: dict[str, list[WhatIf]] = {}
    base, several = "", _layers_differ(rows)
    for row in rows:
        if not row.varied:
            base = _point(row, several)
        elif name in row.varied:
            others = [f"{other}={shown_value(other, value)}" for other, value in row.varied.items() if other != name]
            lines.setdefault("; ".join([base, *others]), []).append(row)
    if name == DEVICE:
        return lines
    return {label: sorted(line, key=lambda row: float(row.varied[name])) for label, line in lines.items()}
