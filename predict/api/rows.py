"""Rows of the DataFrames of predictions. A field is a column: its name has the unit, its type the dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from predict.ledger.ledger import Ledger
from predict.prediction.prediction import Prediction
from predict.search.search import Row as Ranked
from predict.validation.validation_report import Pair
from predict.what_if.quantities import FACTORS, shown_value
from predict.what_if.replacing import Replacing
from predict.what_if.what_if import WhatIf

T = TypeVar("T", bound="PredictedRow")
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


class RankedRow(PredictionRow, frozen=True, kw_only=True):
    """A strategy that a search found; fields as of :class:`~predict.search.search.Row`."""

    place: int
    probability_best: float | None
    pareto: bool
    estimate_s: float
    predict_command: str
    train_command: str | None


class WhatIfRow(PredictedRow, frozen=True, kw_only=True):
    """A prediction with other hardware, ranks or batch; fields as of :class:`~predict.what_if.what_if.WhatIf`.

    Attributes:
        varied: in words; empty for the prediction as measured.
        bandwidth, latency, peak_flops, memory_bandwidth: factors on what was measured; 1 where not varied. Factors on
            one level of the network stand in ``varied`` alone.
        device: missing for the measured one.
    """

    varied: str
    bandwidth: float
    latency: float
    peak_flops: float
    memory_bandwidth: float
    device: str | None
    layers_from: str
    speedup_over_base: float
    bound_by: str


class ReplacedRow(PredictedRow, frozen=True, kw_only=True):
    """A prediction with layers as they are or replaced; fields as of :class:`~predict.what_if.replacing.Replacing`.

    Attributes:
        replaced: empty for the network as it is. removed: layers that are gone.
    """

    replaced: str
    removed: str
    parameters: int
    gradient_bytes: int
    model_flops: float
    communication_s: float
    speedup_over_base: float
    scaling_factor: float
    scaling_factor_interval: tuple[float, float]


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a role, or several alike; fields as of :class:`~predict.ledger.ledger.LedgerEntry`.

    Attributes:
        bytes: that it sends or copies; missing of others. group: axes that it communicates over.
        added_s: what all effects together add to ``base_s``.
    """

    role: str
    role_ranks: int
    name: str
    phase: str
    source: str
    bytes: int | None
    group: str
    count: float
    base_s: float
    added_s: float
    total_s: float
    exposed_s: float
    hidden_s: float
    sd_s: float


class PairRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run beside a prediction; fields as of :class:`~predict.validation.validation_report.Pair`.

    Attributes:
        fw_predicted_s, ...: by phase, with what was measured.
        memory_predicted_bytes, memory_measured_bytes: missing where the run did not track memory.
    """

    run: str
    evaluator: str
    model: str
    strategy: str
    ranks: int
    batch: int
    dtype: str
    options: str
    iterations: int
    predicted_s: float
    interval_s: tuple[float, float]
    measured_median_s: float
    measured_iqr_s: float
    noise_floor: float
    error: float
    accuracy: float
    covered: bool
    explained_by: str
    fw_predicted_s: float
    fw_measured_s: float
    bw_predicted_s: float
    bw_measured_s: float
    ge_predicted_s: float
    ge_measured_s: float
    wu_predicted_s: float
    wu_measured_s: float
    memory_predicted_bytes: int | None
    memory_measured_bytes: int | None
    issued_equals_plan: bool | None
    emulated: str
    extrapolated: str


def prediction_row(prediction: Prediction) -> PredictionRow:
    """The row of a prediction."""
    return _filled(PredictionRow, prediction.record())


def ranked_row(ranked: Ranked) -> RankedRow:
    """The row of a strategy that was searched."""
    return _filled(RankedRow, ranked.prediction.record() | msgspec.structs.asdict(ranked))


def what_if_row(row: WhatIf) -> WhatIfRow:
    """The row of a what-if."""
    words = [f"{name} {shown_value(name, value)}" for name, value in row.varied.items()]
    levels = {name.partition("@")[0] for name in row.varied if "@" in name}
    factors = {
        name.replace("-", "_"): float("nan") if name in levels else row.varied.get(name, 1.0) for name in FACTORS
    }
    more = {"varied": ", ".join(words), "device": row.varied.get("device"), **factors}
    return _filled(WhatIfRow, msgspec.structs.asdict(row) | more)


def replaced_row(row: Replacing) -> ReplacedRow:
    """The row of a network with layers replaced."""
    return _filled(ReplacedRow, msgspec.structs.asdict(row))


def _filled(kind: type[T], record: Mapping[str, Any]) -> T:
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


def ledger_rows(ledger: Ledger) -> Iterator[LedgerRow]:
    """A row each entry of each role."""
    for role in ledger.roles:
        for entry in role.entries:
            size, fields = entry.details.get("bytes"), msgspec.structs.asdict(entry)
            yield LedgerRow(
                role=role.role,
                role_ranks=role.ranks,
                bytes=size if isinstance(size, int) else None,
                group=str(entry.details.get("group", "")),
                added_s=entry.total_s - entry.base_s,
                **{name: fields[name] for name in LedgerRow.__struct_fields__ if name in fields},
            )


def pair_row(pair: Pair) -> PairRow:
    """The row of a run and its prediction."""
    fields = msgspec.structs.asdict(pair)
    for name, phase in pair.phases.items():
        fields |= {f"{name.lower()}_{side}_s": getattr(phase, f"{side}_s") for side in ("predicted", "measured")}
    for side in ("predicted", "measured"):
        peak = None if pair.memory is None else getattr(pair.memory, f"{side}_bytes")
        fields[f"memory_{side}_bytes"] = peak
    return PairRow(**{name: in_cell(fields[name]) for name in PairRow.__struct_fields__})
