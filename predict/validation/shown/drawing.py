"""Predicted beside measured, drawn: what an iteration is made of, and the peak of memory (figure 3 of ParaDL).

A panel a model, two bars a configuration. Phases are stacked as in the report: of the rank that ends backward
last, or of a pipeline's stage. What they leave of the iteration is its own part.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.pictures import COLOURS, new_figure, write_figure
from paradl_bench.core.terminal.printed import in_drawing
from paradl_bench.core.units import format_accuracy
from predict.validation.runs import PHASES
from predict.validation.shown.cells import configured
from predict.validation.shown.report import csv_row
from predict.validation.validation_report import PIPELINE_IDLE, PREDICTOR, Report, pairs_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
REST = "rest"
PARTS = (*PHASES, PIPELINE_IDLE, REST)
_NAMES = {PIPELINE_IDLE: "waits of stages", "GE": "exposed GE"}
_COLOUR_OF = {**dict(zip(PHASES, COLOURS, strict=False)), PIPELINE_IDLE: "0.75", REST: "0.45"}
_BYTES_OF_GIB = 2**30
_PANELS_A_ROW = 2
_OPTION = "options."
_BAR_WIDTH = 0.38
_LONGEST_LABEL = 14
"""Characters of a line under a pair of bars: more would reach into the next pair's."""
_EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
_SECONDS_LABEL = "iteration [s]"
_TITLE = "predicted (left bars) beside measured (hatched)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One side of a pair of bars: predicted or measured.

    Attributes:
        parts_s: stacked; they add up to ``iteration_s`` where they do not exceed it.
        spread_s: of the 90% interval of a prediction, or of quartiles of a measurement; (low, high).
        peak_bytes: None where memory was not tracked.
    """

    iteration_s: float
    parts_s: Mapping[str, float]
    spread_s: tuple[float, float]
    peak_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A configuration: medians over its runs.

    Attributes:
        model: with the shape of its input. configuration: strategy, options and batch, in lines.
    """

    model: str
    configuration: str
    predicted: Measured
    measured: Measured

    @property
    def accuracy(self) -> float:
        """1 - |predicted - measured| / measured."""
        return 1 - abs(self.predicted.iteration_s / self.measured.iteration_s - 1)


def bars_of(rows: Iterable[Row]) -> list[Bars]:
    """One for each configuration, in the order in which they come.

    Args:
        rows: pairs of the evaluator under test, as in ``pairs.csv``: their values may be text.
    """

    def key(row: Row) -> tuple[str, str]:
        options = {name.removeprefix(_OPTION): str(row[name]) for name in row if name.startswith(_OPTION) and row[name]}
        strategy = configured(str(row["strategy"]), options, emulated=bool(row.get("emulated")))
        return f"{row['model']}, {row['input_shape']}", f"{strategy}\nbatch {row['batch']}"

    return [
        Bars(model=model, configuration=configuration, predicted=_predicted(runs), measured=_measured(runs))
        for (model, configuration), runs in grouped(rows, key).items()
    ]


def draw_validation(report: Report, target: str, *, force: bool) -> None:
    """Draw a report's runs.

    Raises:
        UserError: the file exists and ``force`` is not given, or cannot be written.
    """
    draw_bars(bars_of_report(report), target, force=force)


def bars_of_report(report: Report) -> list[Bars]:
    """The runs of a report, as :func:`bars_of`."""
    return bars_of(csv_row(pair) for pair in pairs_of(report.pairs, PREDICTOR))


def draw_bars(configurations: Sequence[Bars], target: str, *, force: bool) -> None:
    """Draw :func:`bars_figure` into a file; raises as :func:`draw_validation`."""
    figure = bars_figure(configurations)
    write_figure(figure, target, title="predicted beside measured", shows=_TITLE, force=force)


def bars_figure(configurations: Sequence[Bars]) -> Figure:
    """Configurations: a panel a model, the iteration above and, where it was tracked, memory below."""
    models = grouped(configurations, lambda bars: bars.model)
    columns = min(_PANELS_A_ROW, len(models))
    blocks = -(-len(models) // columns)
    with_memory = any(bars.measured.peak_bytes is not None for bars in configurations)
    rows = blocks * (2 if with_memory else 1)
    most = max(len(of_model) for of_model in models.values())
    figure = new_figure(columns * max(4.5, 1.2 + 0.85 * most), 3.6 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_visible(False)
    for index, (model, of_model) in enumerate(models.items()):
        row, column = divmod(index, columns)
        _draw_times(panels[row][column], model, of_model)
        tracked = [bars for bars in of_model if bars.measured.peak_bytes is not None]
        if tracked:
            _draw_memory(panels[blocks + row][column], model, tracked)
    _legend(panels[0][0], configurations)
    figure.suptitle(_TITLE, fontsize=11)
    return figure


def _predicted(runs: Sequence[Row]) -> Measured:
    spread_s = _median(runs, "interval_s.low"), _median(runs, "interval_s.high")
    return _side(runs, _median(runs, "predicted_s"), spread_s, "predicted")


def _measured(runs: Sequence[Row]) -> Measured:
    whole_s, half_s = _median(runs, "measured_median_s"), _median(runs, "measured_iqr_s") / 2
    return _side(runs, whole_s, (whole_s - half_s, whole_s + half_s), "measured")


def _side(runs: Sequence[Row], whole_s: float, spread_s: tuple[float, float], which: str) -> Measured:
    parts_s = {name: _median(runs, f"phases.{name}.{which}_s") for name in PHASES}
    idle, peak = f"idle.{which}_s", f"memory.{which}_bytes"
    if _has(runs, idle):
        parts_s[PIPELINE_IDLE] = _median(runs, idle)
    parts_s[REST] = max(0.0, whole_s - sum(parts_s.values()))
    peak_bytes = _median(runs, peak) if _has(runs, peak) else None
    return Measured(iteration_s=whole_s, parts_s=parts_s, spread_s=spread_s, peak_bytes=peak_bytes)


def _has(runs: Sequence[Row], column: str) -> bool:
    return any(run.get(column) not in (None, "") for run in runs)


def _median(runs: Sequence[Row], column: str) -> float:
    """Over the runs that have it."""
    return statistics.median(float(run[column]) for run in runs if run.get(column) not in (None, ""))


def _draw_times(axes: Axes, model: str, configurations: Sequence[Bars]) -> None:
    """Stacked phases, the spread of either side, and the accuracy above each pair."""
    for index, bars in enumerate(configurations):
        for side, shift, hatch in ((bars.predicted, -1, ""), (bars.measured, 1, "///")):
            at, bottom_s = index + shift * _BAR_WIDTH / 2, 0.0
            for name in PARTS:
                seconds = side.parts_s.get(name, 0.0)
                look: dict[str, Any] = {
                    "color": _COLOUR_OF[name],
                    "edgecolor": "white",
                    "hatch": hatch,
                    "linewidth": 0.4,
                }
                axes.bar(at, seconds, _BAR_WIDTH, bottom=bottom_s, **look)
                bottom_s += seconds
            low_s, high_s = side.spread_s
            axes.plot([at, at], [low_s, high_s], color="black", linewidth=1.2, marker="_", markersize=5)
        top_s = max(bars.predicted.spread_s[1], bars.measured.spread_s[1])
        said = format_accuracy(bars.accuracy) if bars.accuracy > 0 else f"off by {1 - bars.accuracy:.0%}"
        axes.annotate(said, (index, top_s), xytext=(0, 4), textcoords="offset points", ha="center")
    _frame(axes, model, configurations, _SECONDS_LABEL)


def _draw_memory(axes: Axes, model: str, configurations: Sequence[Bars]) -> None:
    for index, bars in enumerate(configurations):
        for side, shift, hatch in ((bars.predicted, -1, ""), (bars.measured, 1, "///")):
            if side.peak_bytes is not None:
                at, gibibytes = index + shift * _BAR_WIDTH / 2, side.peak_bytes / _BYTES_OF_GIB
                axes.bar(at, gibibytes, _BAR_WIDTH, color=COLOURS[-1], hatch=hatch, **_EDGE)
    _frame(axes, model, configurations, "peak memory of a rank [GiB]")


def _frame(axes: Axes, model: str, configurations: Sequence[Bars], label: str) -> None:
    axes.set_visible(True)
    axes.set_title(in_drawing(model), fontsize=10)
    names = ["\n".join(_wrapped(bars.configuration)) for bars in configurations]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel(label)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)


def _wrapped(configuration: str) -> list[str]:
    lines = configuration.splitlines()
    return [in_drawing(part) for line in lines for part in textwrap.wrap(line, _LONGEST_LABEL) or [""]]


def _legend(axes: Axes, configurations: Sequence[Bars]) -> None:
    """Of the parts that any bar has."""
    from matplotlib.patches import Patch

    present = [
        name
        for name in PARTS
        if any(side.parts_s.get(name) for bars in configurations for side in (bars.predicted, bars.measured))
    ]
    handles = [Patch(color=_COLOUR_OF[name], label=_NAMES.get(name, name)) for name in present]
    axes.legend(handles=handles, fontsize=7)
