"""Figures of ParaDL and OSF from committed results; `results/README.md` says how each was measured.

    python benchmarks/figures/figures.py -o DIR

Of ParaDL, by medians over a configuration's runs on one or two real ranks:
`figure-3-breakdown.png`: phases predicted beside measured, each strategy of three models, with the accuracy.
`figure-7-compute.png`: forward, backward and weight update of serial training, as shares of its iteration.

Of runs whose calls were timed one by one (`timed_calls.py`); four ranks share two cores there:
`figure-4-cosmoflow.png`: the first, of CosmoFlow by spatial and by data and spatial parallelism.
`figure-5-scaling.png`: samples a second of these, with the gain of data and spatial over spatial parallelism.
`figure-6-outliers.png`: single transfers by the size of their message.
`figure-6-congestion.png`: the same over a link of 1 Gbit/s, without and with foreign traffic.
`figure-8-split-and-concatenation.png`: what filter and channel parallelism compute, in parts.
`osf-figure-5-ranks.png`, `osf-figure-7-fusion.png`: what communication of gradients is made of, on each rank, and by
how gradients are merged.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path

from call_figures import draw_calls, read_calls

from paradl_bench.core.terminal.pictures import COLOURS, new_figure, write_figure
from predict.validation.shown.drawing import Bars, Row, bars_of, draw_bars
from predict.validation.validation_report import PREDICTOR

RESULTS = Path(__file__).parents[2] / "results" / "cpu-2core"
SOURCES = (
    RESULTS / "2026-11-23-ec0a21d" / "strategies" / "pairs.csv",
    RESULTS / "2026-11-21-ffbe79c" / "accuracy" / "pairs.csv",
)
"""Strategies that share layers out, and pipelines; then data parallelism."""
TIMED_CALLS = RESULTS / "2026-11-30-75521010-calls"


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


def draw_scaling(configurations: Sequence[Bars], target: str) -> None:
    """Samples a second, predicted beside measured, and how many times those of the first configuration they are."""
    figure = new_figure(1.8 + 1.5 * len(configurations), 3.8)
    axes = figure.subplots()
    first = configurations[0]
    for shift, hatch, name in ((-1, "", "predicted"), (1, "///", "measured")):
        rates = [samples_per_s(bars, name) for bars in configurations]
        for index, rate in enumerate(rates):
            look = {"color": COLOURS[0], "edgecolor": "white", "hatch": hatch, "linewidth": 0.4}
            axes.bar(index + 0.2 * shift, rate, 0.38, label=name if index == 0 else None, **look)
            gain = f"{rate / samples_per_s(first, name):.2f}x"
            axes.annotate(gain, (index + 0.2 * shift, rate), xytext=(0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(configurations)), [bars.configuration for bars in configurations], fontsize=8)
    axes.set_ylabel("samples per second")
    axes.set_title(first.model, fontsize=10)
    axes.margins(y=0.15)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    write_figure(figure, target, title="scaling", shows="samples a second by strategy", force=True)


def samples_per_s(bars: Bars, side: str) -> float:
    """Of a configuration as predicted or measured."""
    return int(bars.configuration.split()[-1]) / getattr(bars, side).iteration_s


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
    rows = [row for row in read_rows(TIMED_CALLS / "pairs.csv") if row["model"] == "cosmoflow"]
    cosmoflow = bars_of(sorted(rows, key=lambda row: int(row["ranks"])))
    draw_bars(cosmoflow, str(output / "figure-4-cosmoflow.png"), force=True)
    spatial = [bars for bars in cosmoflow if not bars.configuration.startswith("serial")]
    draw_scaling(spatial, str(output / "figure-5-scaling.png"))
    draw_calls(read_calls(TIMED_CALLS / "calls.json"), output)
    for bars in (*breakdown, *cosmoflow):
        told = {"model": bars.model, "configuration": " ".join(bars.configuration.split()), "accuracy": bars.accuracy}
        print(json.dumps(told))


if __name__ == "__main__":
    main()
