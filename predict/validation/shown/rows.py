"""Rows of a validation's DataFrame, of which CSV and Parquet are made."""

from __future__ import annotations

import msgspec

from predict.prediction.presentation import in_cell
from predict.validation.validation_report import Pair


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


def pair_row(pair: Pair) -> PairRow:
    """The row of a run and its prediction."""
    fields = msgspec.structs.asdict(pair)
    for name, phase in pair.phases.items():
        fields |= {f"{name.lower()}_{side}_s": getattr(phase, f"{side}_s") for side in ("predicted", "measured")}
    for side in ("predicted", "measured"):
        peak = None if pair.memory is None else getattr(pair.memory, f"{side}_bytes")
        fields[f"memory_{side}_bytes"] = peak
    return PairRow(**{name: in_cell(fields[name]) for name in PairRow.__struct_fields__})
