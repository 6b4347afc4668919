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
        if name in ("interval_s", "predicted_interval_s") or (name.endswith("interval_bytes") and value is not None):
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


def print_table(predictions: Sequence[Prediction]) -> None:
    """A table on standard output, with flags as numbered footnotes."""
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
        table.add_row(*_cells(prediction, with_epochs, with_layers), ",".join(map(str, sorted(numbers))))
    console = open_console()
    console.print(table)
    console.print(
        "90%: interval of the iteration. "
        + ("for layers: all-gathers, halos and the like that FW and BW wait for. " if with_layers else "")
        + "GE: what is left of the exchange after the last gradient. exposed: communication that nothing hides. "
        "measured: share of the seconds.",
        highlight=False,
    )
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


def _cells(prediction: Prediction, with_epoch: bool, with_layers: bool) -> list[str]:
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
        f"{prediction.efficiency:.1%}",
        memory,
        f"{prediction.sources['measured']:.0%}",
    ]
