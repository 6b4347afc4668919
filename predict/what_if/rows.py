"""Rows of a what-if's DataFrame, of which CSV and Parquet are made."""

from __future__ import annotations

import msgspec

from predict.prediction.presentation import PredictedRow, filled_row
from predict.what_if.quantities import FACTORS, shown_value
from predict.what_if.replacing import Replacing
from predict.what_if.what_if import WhatIf


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


def what_if_row(row: WhatIf) -> WhatIfRow:
    """The row of a what-if."""
    words = [f"{name} {shown_value(name, value)}" for name, value in row.varied.items()]
    levels = {name.partition("@")[0] for name in row.varied if "@" in name}
    factors = {
        name.replace("-", "_"): float("nan") if name in levels else row.varied.get(name, 1.0) for name in FACTORS
    }
    more = {"varied": ", ".join(words), "device": row.varied.get("device"), **factors}
    return filled_row(WhatIfRow, msgspec.structs.asdict(row) | more)


def replaced_row(row: Replacing) -> ReplacedRow:
    """The row of a network with layers replaced."""
    return filled_row(ReplacedRow, msgspec.structs.asdict(row))
