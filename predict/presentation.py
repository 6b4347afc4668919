"""Predictions as a table for a person, as JSON, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paradl_bench.spec.storage import encode_pretty
from paradl_bench.spec.units import format_bytes, format_seconds
from paradl_bench.terminal import open_console
from predict.prediction import Prediction
from predict.scaling import Sweep


def predictions_json(predictions: Sequence[Prediction]) -> bytes:
    """A JSON array of objects."""
    return encode_pretty(list(predictions))


def predictions_csv(predictions: Sequence[Prediction]) -> bytes:
    """A row a prediction; nested fields as ``breakdown_s.FW``, lists joined by semicolons."""
    return rows_csv([flat_row(prediction) for prediction in predictions])


def flat_row(record: msgspec.Struct) -> dict[str, object]:
    """A record's fields in one level."""
    flat: dict[str, object] = {}
    for name, value in msgspec.structs.asdict(record).items():
        if name in ("interval_s", "predicted_interval_s", "efficiency_interval") or (
            name.endswith("interval_bytes") and value is not None
        ):
            flat |= {f"{name}.low": value[0], f"{name}.high": value[1]}
        elif name == "input_shape":
            flat[name] = "x".join(map(str, value))
        else:
            flat |= _flattened(name, value)
    return flat


def _flattened(name: str, value: Any) -> dict[str, object]:
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        nested: dict[str, object] = {}
        for key, item in value.items():
            nested |= _flattened(f"{name}.{key}", item)
        return nested
    return {name: "; ".join(map(str, value)) if isinstance(value, (tuple, list)) else value}


def rows_csv(rows: Sequence[Mapping[str, object]]) -> bytes:
    """Rows under the columns that any of them has, in the order of their first occurrence."""
    columns = dict.fromkeys(column for row in rows for column in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def print_table(predictions: Sequence[Prediction], sweeps: Sequence[Sweep] = ()) -> None:
    """A table on standard output, with flags as numbered footnotes, and the knee of each sweep."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    first = predictions[0]
    shape = "x".join(map(str, first.input_shape))
    title = f"{first.model} on {shape}, {first.optimizer}, {first.dtype}: {first.evaluator}"
    table = Table(title=escape(title), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    titles = ["strategy", "ranks", "batch", "iteration", "90%", "FW", "BW", "GE", "WU", "exposed", "samples/s"]
    titles += ["efficient", "memory", "measured", "see"]
    with_epochs = any(prediction.epoch_s is not None for prediction in predictions)
    with_layers = any(_of_layers_s(prediction) for prediction in predictions)
    if with_layers:
        titles.insert(titles.index("GE"), "for layers")
    if with_epochs:
        titles.insert(titles.index("FW"), "epoch")
    for title in titles:
        table.add_column(title, justify="left" if title in ("strategy", "see") else "right")
    footnotes: dict[str, int] = {}
    for prediction in predictions:
        lines = (*prediction.extrapolated, *prediction.notes)
        numbers = [footnotes.setdefault(line, len(footnotes) + 1) for line in lines]
        cells = _cells(prediction, with_epochs, with_layers, with_band=bool(sweeps))
        table.add_row(*cells, ",".join(map(str, sorted(numbers))))
    console = open_console()
    console.print(table)
    console.print(
        "90%: interval of the iteration. "
        + ("for layers: all-gathers, halos and the like that FW and BW wait for. " if with_layers else "")
        + "GE: what is left of the exchange after the last gradient. exposed: communication that nothing hides. "
        "measured: share of the seconds.",
        highlight=False,
    )
    for sweep in sweeps:
        console.print(escape(f"knee of {sweep}"), highlight=False)
    beyond = {line for prediction in predictions for line in prediction.extrapolated}
    for line, number in footnotes.items():
        console.print(escape(f"{number}  {'extrapolated: ' if line in beyond else ''}{line}"), highlight=False)


def _memory_cell(prediction: Prediction) -> str:
    low, high = prediction.memory_interval_bytes or (prediction.memory_bytes,) * 2
    around = (
        f" {low / prediction.memory_bytes - 1:+.0%} {high / prediction.memory_bytes - 1:+.0%}" if low < high else ""
    )
    return format_bytes(prediction.memory_bytes) + around + (" (too much)" if prediction.fits is False else "")


def _of_layers_s(prediction: Prediction) -> float:
    """Seconds of the iteration that compute waits for communication for layers."""
    others = ("FW", "BW", "GE", "WU", "exposed_communication")
    return sum(seconds for name, seconds in prediction.breakdown_s.items() if name not in others)


def _efficiency_cell(prediction: Prediction, with_band: bool) -> str:
    """In percent, with how many of them the band reaches down and up."""
    low, high = (100 * (end - prediction.efficiency) for end in prediction.efficiency_interval)
    return f"{prediction.efficiency:.1%}" + (f" {low:+.0f} {high:+.0f}" if with_band else "")


def print_use(predictions: Sequence[Prediction]) -> None:
    """A second table: what the iterations make of their ranks."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    cells = [_use_cells(prediction) for prediction in predictions]
    shown = [title for title in cells[0] if any(row[title] for row in cells)]
    for title in shown:
        table.add_column(title, justify="left" if title == "strategy" else "right")
    for row in cells:
        table.add_row(*(row[title] for title in shown))
    console = open_console()
    console.print(table)
    bases = dict.fromkeys((each.peak_flops_basis, each.peak_flops_per_rank is not None) for each in predictions)
    for basis, known in bases:
        text = (
            f"MFU: FLOPs of FW and BW over those of all ranks at their peak, {basis}" if known else f"no MFU: {basis}"
        )
        console.print(escape(text), highlight=False)


def _use_cells(prediction: Prediction) -> dict[str, str]:
    """By column; empty where there is nothing to say."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    busy = prediction.model_flops_utilisation
    return {
        "strategy": prediction.strategy,
        "ranks": str(prediction.ranks),
        "batch": str(prediction.batch),
        "MFU": "" if busy is None else f"{busy:.1%}",
        "samples/s a rank": number(prediction.samples_per_s_per_rank),
        "tokens/s a rank": number(prediction.tokens_per_s_per_rank),
        "rank-hours/1e6 samples": number(prediction.rank_hours_per_million_samples),
        "rank-hours/epoch": number(prediction.rank_hours_per_epoch),
        "cost/1e6 samples": number(prediction.cost_per_million_samples),
        "cost/epoch": number(prediction.cost_per_epoch),
    }


def _cells(prediction: Prediction, with_epoch: bool, with_layers: bool, *, with_band: bool) -> list[str]:
    low, high = prediction.interval_s
    parts = prediction.breakdown_s
    memory = _memory_cell(prediction)
    epoch = [format_seconds(prediction.epoch_s) if prediction.epoch_s is not None else ""] if with_epoch else []
    return [
        prediction.strategy,
        str(prediction.ranks),
        str(prediction.batch),
        format_seconds(prediction.iteration_s),
        f"{low / prediction.iteration_s - 1:+.0%} {high / prediction.iteration_s - 1:+.0%}",
        *epoch,
        *(format_seconds(parts[name]) for name in ("FW", "BW")),
        *([format_seconds(_of_layers_s(prediction))] if with_layers else []),
        *(format_seconds(parts[name]) for name in ("GE", "WU", "exposed_communication")),
        f"{prediction.samples_per_s:.4g}",
        _efficiency_cell(prediction, with_band),
        memory,
        f"{prediction.sources['measured']:.0%}",
    ]
