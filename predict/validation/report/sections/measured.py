"""Runs beside their predictions, by phase."""

from __future__ import annotations

from paradl_bench.core.units import format_accuracy, format_difference, format_seconds
from predict.validation.report.content import Content, Figure, Section
from predict.validation.shown.cells import Table
from predict.validation.shown.drawing import Bars, bars_of
from predict.validation.shown.findings import findings
from predict.validation.shown.report import csv_row
from predict.validation.validation_report import PREDICTOR, Report, pairs_of

SHOWN = 24
"""Configurations that are drawn; the table has all of them."""
_KEPT = (
    *("run", "model", "strategy", "ranks", "batch", "options", "predicted_s", "interval_s", "measured_median_s"),
    *("measured_iqr_s", "noise_floor", "error", "covered", "phases", "idle", "input", "memory", "explained_by"),
)


def section(content: Content) -> Section | None:
    """Nothing without runs."""
    report = content.validation
    if report is None:
        return None
    pairs = pairs_of(report.pairs, PREDICTOR)
    bars = bars_of([csv_row(pair) for pair in pairs])
    more = [f"Drawn are the first {SHOWN} of {len(bars)} configurations."] if len(bars) > SHOWN else []
    return Section(
        name="measured",
        title="Predicted beside measured",
        lines=[
            "Measured is the median over iterations of the slowest rank. Error is (predicted - measured) / measured.",
            *more,
        ],
        figures=(_phases(bars),) if bars else (),
        tables={"Accuracy": _scores(report)},
        further={"Findings": findings(report)},
        documents={"pairs": [{name: getattr(pair, name) for name in _KEPT} for pair in pairs]},
    )


def _phases(bars: list[Bars]) -> Figure:
    rows, cells = [], []
    for bar in bars:
        label = f"{bar.model}: {bar.configuration.replace(chr(10), ', ')}"
        for side in ("predicted", "measured"):
            of_side = getattr(bar, side)
            rows.append(
                {
                    "label": label,
                    "side": side,
                    "iteration_s": of_side.iteration_s,
                    "spread_s": of_side.spread_s,
                    "parts_s": of_side.parts_s,
                }
            )
            whole = format_seconds(of_side.iteration_s), " to ".join(map(format_seconds, of_side.spread_s))
            error = format_difference(bar.predicted.iteration_s / bar.measured.iteration_s - 1)
            parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in of_side.parts_s.items())
            cells.append((label, side, *whole, parts, error if side == "predicted" else ""))
    return Figure(
        name="phases",
        title="Phases of an iteration, predicted and measured",
        shows="The line on a predicted bar is the 90% interval of the iteration. The line on a measured bar shows the"
        " quartiles. Phases have no interval of their own.",
        table=Table(("configuration", "side", "iteration", "90% or quartiles", "phases", "error"), cells),
        data=rows[: 2 * SHOWN],
    )


def _scores(report: Report) -> Table:
    rows = [
        (
            name,
            str(of.score.runs),
            format_accuracy(of.score.mean_accuracy),
            format_accuracy(of.score.worst_accuracy),
            f"{of.score.interval_coverage:.0%}",
        )
        for name, of in report.overall.items()
    ]
    return Table(("predicted by", "runs", "mean accuracy", "worst", "interval holds"), rows)
