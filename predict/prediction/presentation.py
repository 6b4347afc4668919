"""Predictions as a table for a person, as JSON, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table_of
from paradl_bench.core.units import format_around, format_bytes, format_seconds
from predict.costs.compute.unmeasured_costs import TAKEN_AS_NONE
from predict.prediction.prediction import Prediction
from predict.prediction.scaling import Sweep


def predictions_json(predictions: Sequence[Prediction]) -> bytes:
    """A JSON array of objects."""
    return encode_pretty([prediction.record() for prediction in predictions])


def predictions_csv(predictions: Sequence[Prediction]) -> bytes:
    """A row a prediction; nested fields as ``breakdown_s.FW``, lists joined by semicolons."""
    return rows_csv([flat_row(prediction.record()) for prediction in predictions])


def flat_row(record: msgspec.Struct | Mapping[str, Any]) -> dict[str, object]:
    """A record's fields in one level."""
    flat: dict[str, object] = {}
    fields = record if isinstance(record, Mapping) else msgspec.structs.asdict(record)
    for name, value in fields.items():
        if name in ("interval_s", "predicted_interval_s", "efficiency_interval", "scaling_factor_interval") or (
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
    """Tables on standard output: the answers, with flags as numbered footnotes and the knee of each sweep; the phases.

    Two, so that each stays within the width of a terminal.
    """

    first = predictions[0]
    shape = "x".join(map(str, first.input_shape))
    footnotes: dict[str, int] = {}
    rows = []
    for prediction in predictions:
        lines = (*prediction.provenance.extrapolated, *prediction.provenance.notes)
        numbers = {footnotes.setdefault(line, len(footnotes) + 1) for line in lines}
        rows.append(_answer(prediction, with_band=bool(sweeps)) | {"see": _ranges(sorted(numbers))})
    console = open_console()
    computed_in = f"{first.dtype} {first.kernel_settings}".rstrip()
    title = f"{first.model} on {shape}, {first.optimizer}, {computed_in}: {first.evaluator}"
    console.print(table_of(rows, title=title))
    phases = [_phases(prediction) for prediction in predictions]
    console.print(table_of(phases))
    for_layers = "for layers: all-gathers, halos and the like that FW and BW wait for. "
    console.print(
        "90%: interval of the iteration. measured: share of the seconds. "
        + (for_layers if any(row["for layers"] for row in phases) else "")
        + ("idle: waiting for other stages. " if any(row["idle"] for row in phases) else "")
        + ("input: waiting for a mini-batch to be read. " if any(row["input"] for row in phases) else "")
        + ("h2d: waiting for it to be copied to the device. " if any(row["h2d"] for row in phases) else "")
        + "GE: what is left of the exchange after the last gradient. exposed: communication that nothing hides.",
        highlight=False,
    )
    for sweep in sweeps:
        console.print(f"knee of {sweep}", highlight=False)
    beyond = {line for prediction in predictions for line in prediction.provenance.extrapolated}
    for line, number in footnotes.items():
        console.print(f"{number}  {'extrapolated: ' if line in beyond else ''}{line}", highlight=False)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, three and more that follow each other as 1-3."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def lacks_parts(prediction: Prediction) -> bool:
    """Whether something that an iteration takes was taken as none, since nothing tells it."""
    return any(TAKEN_AS_NONE in text for text in prediction.provenance.extrapolated)


def interval_cell(prediction: Prediction) -> str:
    """Both ends of the interval in percent; not known where a part of the iteration is not."""
    if lacks_parts(prediction):
        return "not known"
    return format_around(prediction.time.interval_s, prediction.iteration_s)


def memory_cell(peak_bytes: int, interval_bytes: tuple[int, int] | None, fits: bool | None) -> str:
    """The peak, its interval in percent of it, and whether that is more than a rank has."""
    low, high = interval_bytes or (peak_bytes, peak_bytes)
    around = f" {format_around((low, high), peak_bytes)}" if low < high else ""
    return format_bytes(peak_bytes) + around + (" (too much)" if fits is False else "")


def _efficiency_cell(prediction: Prediction, with_band: bool) -> str:
    """In percent, with how many of them the band reaches down and up."""
    low, high = (100 * (end - prediction.use.efficiency) for end in prediction.use.efficiency_interval)
    return f"{prediction.use.efficiency:.1%}" + (f" {low:+.0f} {high:+.0f}" if with_band else "")


def print_use(predictions: Sequence[Prediction]) -> None:
    """A table of what the iterations make of their ranks."""

    console = open_console()
    console.print(table_of([_use_cells(prediction) for prediction in predictions]))
    bases = dict.fromkeys((each.use.peak_flops_basis, each.use.peak_flops_per_rank is not None) for each in predictions)
    for basis, known in bases:
        text = (
            f"MFU: FLOPs of FW and BW over those of all ranks at their peak, {basis}" if known else f"no MFU: {basis}"
        )
        console.print(text, highlight=False)


def _use_cells(prediction: Prediction) -> dict[str, str]:
    """By column; empty where there is nothing to say."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    busy = prediction.use.model_flops_utilisation
    return _configuration(prediction) | {
        "MFU": "" if busy is None else f"{busy:.1%}",
        "samples/s a rank": number(prediction.use.samples_per_s_per_rank),
        "tokens/s a rank": number(prediction.use.tokens_per_s_per_rank),
        "rank-hours/1e6 samples": number(prediction.use.rank_hours_per_million_samples),
        "rank-hours/epoch": number(prediction.use.rank_hours_per_epoch),
        "cost/1e6 samples": number(prediction.use.cost_per_million_samples),
        "cost/epoch": number(prediction.use.cost_per_epoch),
    }


def _configuration(prediction: Prediction) -> dict[str, str]:
    return {
        "strategy": prediction.strategy,
        "ranks": str(prediction.ranks),
        "batch": str(prediction.batch),
    }


def _answer(prediction: Prediction, *, with_band: bool) -> dict[str, str]:
    """By column."""
    memory = prediction.memory
    return _configuration(prediction) | {
        "iteration": format_seconds(prediction.iteration_s),
        "90%": interval_cell(prediction),
        "epoch": "" if prediction.time.epoch_s is None else format_seconds(prediction.time.epoch_s),
        "samples/s": f"{prediction.time.samples_per_s:.4g}",
        "efficiency": _efficiency_cell(prediction, with_band),
        "memory": memory_cell(memory.memory_bytes, memory.memory_interval_bytes, memory.fits),
        "measured": f"{prediction.provenance.sources['measured']:.0%}"
        + (" of layers" if lacks_parts(prediction) else ""),
        **{
            source.replace("_", " "): f"{share:.0%}" if (share := prediction.provenance.sources[source]) else ""
            for source in ("published", "data_sheet")
        },
    }


def _phases(prediction: Prediction) -> dict[str, str]:
    """By column."""
    parts = prediction.time.breakdown_s
    others = ("FW", "BW", "GE", "WU", "pipeline_idle", "input", "h2d", "exposed_communication")
    for_layers_s = sum(seconds for name, seconds in parts.items() if name not in others)

    def where_there(seconds: float) -> str:
        return format_seconds(seconds) if seconds else ""

    return _configuration(prediction) | {
        "FW": format_seconds(parts["FW"]),
        "BW": format_seconds(parts["BW"]),
        "for layers": where_there(for_layers_s),
        "idle": where_there(parts.get("pipeline_idle", 0.0)),
        "input": where_there(parts.get("input", 0.0)),
        "h2d": where_there(parts.get("h2d", 0.0)),
        "GE": format_seconds(parts["GE"]),
        "WU": format_seconds(parts["WU"]),
        "exposed": format_seconds(parts["exposed_communication"]),
    }
