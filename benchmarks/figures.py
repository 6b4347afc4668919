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
from collections.abc import Sequence
from pathlib import Path

from paradl_bench.core.terminal.pictures import COLOURS, new_figure, write_figure
from predict.validation.shown.drawing import Bars, Row, bars_of, draw_bars
from predict.validation.validation_report import PREDICTOR

RESULTS = Path(__file__).parents[1] / "results" / "cpu-2core"
SOURCES = (
    RESULTS / "2026-11-23-ec0a21d" / "strategies" / "pairs.csv",
    RESULTS / "2026-11-21-ffbe79c" / "accuracy" / "pairs.csv",
)
"""Strategies that share layers out, and pipelines; then data parallelism."""


def read_rows(path: Path) -> list[Row]:
    """Rows of the evaluator under test, of real runs."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["evaluator"] == PREDICTOR and not row.get("emulated")]


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
        for bars in bars_of(read_rows(path)):
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
