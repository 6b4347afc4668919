"""Figures of ParaDL from committed results: breakdown (3), memory, and what compute is made of (7).

    python benchmarks/figures.py -o DIR

`figure-3-breakdown.png`: phases predicted beside measured, each strategy of three models, with the accuracy.
`figure-7-compute.png`: forward, backward and weight update of serial training, as shares of its iteration. Both are of
medians over a configuration's runs, on one or two real ranks; `results/README.md` says how each was measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.pictures import COLOURS, new_figure, write_figure
from predict.validation.runs import PHASES
from predict.validation.shown.drawing import REST, Bars, Measured, draw_bars
from predict.validation.validation_report import PREDICTOR

RESULTS = Path(__file__).parents[1] / "results" / "cpu-2core"
SOURCES = (
    RESULTS / "2026-11-23-ec0a21d" / "strategies" / "pairs.csv",
    RESULTS / "2026-11-21-ffbe79c" / "accuracy" / "pairs.csv",
)
"""Strategies that share layers out, and pipelines; then data parallelism."""
Row = Mapping[str, str]


def read_rows(path: Path) -> list[Row]:
    """Rows of the evaluator under test, of real runs."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["evaluator"] == PREDICTOR and not row.get("emulated")]


def bars_of_rows(rows: Iterable[Row]) -> list[Bars]:
    """One for each configuration: medians over its runs."""
    groups = grouped(rows, lambda row: (f"{row['model']}, {row['input_shape']}", row["strategy"], row["batch"]))
    return [
        Bars(
            model=model,
            configuration=f"{strategy}\nbatch {batch}",
            predicted=_predicted(of_configuration),
            measured=_measured(of_configuration),
        )
        for (model, strategy, batch), of_configuration in groups.items()
    ]


def _predicted(rows: Sequence[Row]) -> Measured:
    spread_s = _median(rows, "interval_s.low"), _median(rows, "interval_s.high")
    return _side(rows, _median(rows, "predicted_s"), spread_s, "predicted")


def _measured(rows: Sequence[Row]) -> Measured:
    whole_s, half_s = _median(rows, "measured_median_s"), _median(rows, "measured_iqr_s") / 2
    return _side(rows, whole_s, (whole_s - half_s, whole_s + half_s), "measured")


def _side(rows: Sequence[Row], whole_s: float, spread_s: tuple[float, float], which: str) -> Measured:
    parts_s = {name: _median(rows, f"phases.{name}.{which}_s") for name in PHASES}
    parts_s[REST] = max(0.0, whole_s - sum(parts_s.values()))
    peaks = [float(row[f"memory.{which}_bytes"]) for row in rows if row.get(f"memory.{which}_bytes")]
    peak_bytes = statistics.median(peaks) if peaks else None
    return Measured(iteration_s=whole_s, parts_s=parts_s, spread_s=spread_s, peak_bytes=peak_bytes)


def _median(rows: Sequence[Row], column: str) -> float:
    return statistics.median(float(row[column]) for row in rows)


def draw_compute(configurations: Sequence[Bars], target: str, *, force: bool) -> None:
    """Forward, backward and weight update of serial training, shares of the measured iteration."""
    figure = new_figure(1.6 + 1.3 * len(configurations), 4)
    axes = figure.subplots()
    for index, bars in enumerate(configurations):
        bottom = 0.0
        for name, colour in zip(("FW", "BW", "WU"), COLOURS, strict=False):
            share = bars.measured.parts_s[name] / bars.measured.iteration_s
            axes.bar(index, share, 0.6, bottom=bottom, color=colour, label=name if index == 0 else None)
            axes.annotate(f"{share:.0%}", (index, bottom + share / 2), ha="center", va="center", color="white")
            bottom += share
    names = [f"{bars.model}\n{bars.configuration.splitlines()[-1]}" for bars in configurations]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("share of a serial iteration, measured")
    axes.margins(y=0.12)
    axes.legend(loc="upper center", ncols=3, fontsize=8)
    write_figure(figure, target, title="compute", shows="shares of forward, backward and weight update", force=force)


def main() -> None:
    """Draw every figure into a directory, and print what each holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    configurations: dict[tuple[str, str], Bars] = {}
    for path in SOURCES:
        for bars in bars_of_rows(read_rows(path)):
            # Serial training stands in both: the first is beside the strategies that it is compared with.
            configurations.setdefault((bars.model, bars.configuration), bars)
    breakdown = list(configurations.values())
    draw_bars(breakdown, str(output / "figure-3-breakdown.png"), force=True)
    serial = [bars for bars in breakdown if bars.configuration.startswith("serial")]
    draw_compute(serial, str(output / "figure-7-compute.png"), force=True)
    for bars in breakdown:
        told = {"model": bars.model, "configuration": " ".join(bars.configuration.split()), "accuracy": bars.accuracy}
        print(json.dumps(told))


if __name__ == "__main__":
    main()
