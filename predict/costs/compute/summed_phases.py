"""Forward and backward of which a file of another tool has only the sum (phase ``FWBW``), parted by FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from calibrate.profile.profile import LayerTime
from paradl_bench.core.statistics import Summary
from paradl_bench.network.graph import Layer
from predict.costs.sourced import Cost, Remark, Source

_FORWARD_SHARE = 1 / 3
"""Of an operation that counts no FLOPs: its backward takes about twice as long, as that of a product does."""


def parted(times: Iterable[LayerTime], layers: Mapping[str, Layer]) -> list[LayerTime]:
    """Forward and backward of each time that is the sum of both; ``layers`` by their operation."""
    phases = []
    for time in times:
        share = _forward_share(layers.get(time.operation))
        phases.append(msgspec.structs.replace(time, phase="FW", time=_scaled(time.time, share)))
        phases.append(msgspec.structs.replace(time, phase="BW", time=_scaled(time.time, 1 - share)))
    return phases


def parted_cost(cost: Cost, operation: str) -> Cost:
    """The cost of a part, which says what it is: no measured time."""
    remark = Remark("forward and backward were imported as one time, which is split by FLOPs", True, operation)
    return cost._replace(source=max(cost.source, Source.SCALED), remarks=(*cost.remarks, remark))


def _forward_share(layer: Layer | None) -> float:
    if layer is None or not layer.fw_flops:
        return _FORWARD_SHARE
    return layer.fw_flops / (layer.fw_flops + layer.bw_input_flops + layer.bw_weight_flops)


def _scaled(time: Summary, share: float) -> Summary:
    return Summary(
        median_s=time.median_s * share,
        typical_s=time.typical_s * share,
        iqr_s=time.iqr_s * share,
        minimum_s=time.minimum_s * share,
        samples=time.samples,
    )
