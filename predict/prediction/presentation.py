"""Predictions as a table for a person, as JSON, and as the rows of a DataFrame, of which CSV and Parquet are made."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table_of
from paradl_bench.core.units import format_around, format_bytes, format_input, format_seconds
from predict.costs.compute.unmeasured_costs import TAKEN_AS_NONE
from predict.prediction.confidence import confidence_in
from predict.prediction.prediction import Prediction
from predict.prediction.scaling import Sweep

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T", bound="PredictedRow")
_MEANT = {
    "90%": "the iteration's interval",
    "efficiency": "speed-up over one rank, divided by the ranks",
    "FW": "forward",
    "BW": "backward",
    "for layers": "communication for which forward and backward wait (all-gathers, halos)",
    "idle": "waiting for other stages of a pipeline",
    "input": "waiting for a mini-batch to be read",
    "h2d": "waiting for the mini-batch to be copied to the device",
    "GE": "gradient exchange that goes on after backward",
    "WU": "weight update",
    "exposed": "all communication that is not hidden by compute",
}
"""What columns hold."""


_PARTS = {
    "FW": "fw_s", "BW": "bw_s", "GE": "ge_s", "WU": "wu_s", "pipeline_idle": "pipeline_idle_s", "input": "input_s",
    "h2d": "h2d_s", "exposed_communication": "exposed_communication_s",
}  # fmt: skip
"""Columns of ``breakdown_s``; what else there is, communication for layers by its kind, is one column together."""


class PredictedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What every prediction says; an interval is one of 90%.

    Attributes:
        batch: global mini-batch.
        fw_s, bw_s: without communication that layers wait for, which is ``layer_communication_s``.
        ge_s: what is left of the gradient exchange after the last gradient. wu_s: weight update.
        pipeline_idle_s, input_s, h2d_s: waiting for other stages, for a mini-batch, for its copy to the device.
        exposed_communication_s: what nothing hides. It lies inside of the others, which add up to the iteration.
        memory_bytes: peak of the rank that needs most. fits: missing where no limit is known.
        extrapolated, notes: lines parted by semicolons.
    """

    model: str
    strategy: str
    ranks: int
    batch: int
    evaluator: str
    iteration_s: float
    interval_s: tuple[float, float]
    epoch_s: float | None
    samples_per_s: float
    fw_s: float
    bw_s: float
    layer_communication_s: float
    ge_s: float
    wu_s: float
    pipeline_idle_s: float
    input_s: float
    h2d_s: float
    exposed_communication_s: float
    memory_bytes: int
    memory_interval_bytes: tuple[int, int] | None
    fits: bool | None
    measured_share: float
    extrapolated: str
    notes: str


class PredictionRow(PredictedRow, frozen=True, kw_only=True):
    """A prediction; fields as of :class:`~predict.prediction.prediction.Prediction`.

    Attributes:
        options: those of the strategy that are not the defaults, as ``name=value``.
    """

    local_batch: int
    dtype: str
    optimizer: str
    bucket_cap_bytes: int
    options: str
    speedup: float
    efficiency: float
    efficiency_interval: tuple[float, float]
    knee_ranks: int | None
    samples_per_s_per_rank: float
    tokens_per_s_per_rank: float | None
    model_flops_utilisation: float | None
    rank_hours_per_epoch: float | None
    rank_hours_per_million_samples: float
    cost_per_epoch: float | None
    cost_per_million_samples: float | None


def predictions_frame(predictions: Sequence[Prediction]) -> DataFrame:
    """A row a prediction (:class:`PredictionRow`), under columns that are always the same."""
    from paradl_bench.core.frames import frame_of

    return frame_of(PredictionRow, map(prediction_row, predictions))


def prediction_row(prediction: Prediction) -> PredictionRow:
    """The row of a prediction."""
    return filled_row(PredictionRow, prediction.record())


def filled_row(kind: type[T], record: Mapping[str, Any]) -> T:
    """A row of a record's fields, with those that a row holds in another form."""
    parts = dict.fromkeys(_PARTS.values(), 0.0) | {"layer_communication_s": 0.0}
    for name, seconds in record["breakdown_s"].items():
        parts[_PARTS.get(name, "layer_communication_s")] += seconds
    fields = {**record, **parts, "measured_share": record["sources"]["measured"]}
    return kind(**{name: in_cell(fields[name]) for name in kind.__struct_fields__})


def in_cell(value: Any) -> Any:
    """A value as a cell holds it: texts of a list parted by semicolons, of a mapping as ``name=value``."""
    if isinstance(value, Mapping):
        value = tuple(f"{name}={text}" for name, text in value.items())
    if isinstance(value, tuple) and (not value or isinstance(value[0], str)):
        return "; ".join(value)
    return value


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


def print_table(predictions: Sequence[Prediction], sweeps: Sequence[Sweep] = (), *, why: bool = False) -> None:
    """Tables on standard output: the answers, the phases; then what they rest on, and the knee of each sweep.

    Args:
        why: list every remark, not how many there are.
    """
    first = predictions[0]
    sample = format_input(first.input_shape, tokens=first.use.tokens_per_s_per_rank is not None)
    console = open_console()
    computed_in = f"{first.dtype} {first.kernel_settings}".rstrip()
    title = f"{first.model} on {sample}, {first.optimizer}, {computed_in}: {first.evaluator}{_scaled(sweeps)}"
    answers = [_answer(prediction, with_band=bool(sweeps)) for prediction in predictions]
    console.print(table_of(answers, title=title, keys=3))
    phases = [_phases(prediction) for prediction in predictions]
    console.print(table_of(phases, keys=3))
    rows = [(name, prediction.provenance) for name, prediction in zip(_names(predictions), predictions, strict=True)]
    for line in confidence_in(rows).lines(why=why):
        console.print(line, highlight=False)
    if any(sweep.keeps_samples_a_rank for sweep in sweeps):
        for line in _unlike_serial(predictions):
            console.print(line, highlight=False)
    for sweep in sweeps:
        console.print(f"knee of {sweep}", highlight=False)
    columns = [name for name in _MEANT if name in answers[0] or any(row.get(name) for row in phases)]
    console.print("; ".join(f"{name}: {_MEANT[name]}" for name in columns) + ".", highlight=False)


def _scaled(sweeps: Sequence[Sweep]) -> str:
    """How the mini-batch goes with the ranks, and what each sweep keeps of it."""
    if not sweeps:
        return ""
    how = "weak" if sweeps[0].keeps_samples_a_rank else "strong"
    return f", {how} scaling ({' or '.join(dict.fromkeys(sweep.kept for sweep in sweeps))})"


def _names(predictions: Sequence[Prediction]) -> list[str]:
    """What tells each of them apart."""
    batches = len({prediction.batch for prediction in predictions}) > 1
    return [
        f"{prediction.strategy} on batch {prediction.batch}" if batches else prediction.strategy
        for prediction in predictions
    ]


def _unlike_serial(predictions: Sequence[Prediction]) -> list[str]:
    """That one rank computes more samples than each rank of the others, where a table has both."""
    serial = {prediction.local_batch for prediction in predictions if prediction.ranks == 1}
    others = {
        prediction.local_batch
        for prediction in predictions
        if prediction.ranks > 1 and prediction.local_batch == prediction.batch // prediction.ranks
    }
    if len(serial) != 1 or not others or serial == others:
        return []
    a_rank = " or ".join(map(str, sorted(others)))
    return [f"The serial row has {serial.pop()} samples on its rank, other rows have {a_rank}: compare samples/s."]


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
    console.print(table_of([_use_cells(prediction) for prediction in predictions], keys=3))
    bases = dict.fromkeys(
        (prediction.use.peak_flops_basis, prediction.use.peak_flops_per_rank is not None) for prediction in predictions
    )
    for basis, known in bases:
        text = (
            f"MFU: FLOPs of FW and BW over the FLOPs of all ranks at their peak, {basis}"
            if known
            else f"no MFU: {basis}"
        )
        console.print(text, highlight=False)


def _use_cells(prediction: Prediction) -> dict[str, str]:
    """By column; empty where there is nothing to say."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    busy = prediction.use.model_flops_utilisation
    with_epoch = prediction.time.epoch_s is not None
    return _configuration(prediction) | {
        "samples/s": number(prediction.time.samples_per_s) if with_epoch else "",
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
        **_throughput(prediction),
        "efficiency": _efficiency_cell(prediction, with_band),
        "memory": memory_cell(memory.memory_bytes, memory.memory_interval_bytes, memory.fits),
    }


def _throughput(prediction: Prediction) -> dict[str, str]:
    """An epoch, where its samples are known; ``--wide`` shows samples/s then."""
    epoch_s = prediction.time.epoch_s
    return (
        {"samples/s": f"{prediction.time.samples_per_s:.4g}"} if epoch_s is None else {"epoch": format_seconds(epoch_s)}
    )


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
