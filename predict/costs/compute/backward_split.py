"""How a layer's backward parts into that of its input and that of its parameters, for schedules that run them apart.

Inside an iteration backward is measured whole, so the two parts are shares of it that add up to one: as each was
measured alone (``paradl-bench layers --isolated split``), else by FLOPs. How far FLOPs are off is read from operations
that were measured in both ways; where none was, any share is as likely. Not modelled: what it costs to start autograd
twice, and what both parts compute (a normalisation's sums).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from paradl_bench.network.graph import Layer
from paradl_bench.network.kinds.kind import layer_kinds
from predict.costs.sourced import UNIFORM_TO_SD, Cost, Remark, Source

SPLIT_MODE = "parts of backward"
_MEASURED = "backward is split between input and parameter gradients by their times measured alone"
_BY_FLOPS = "backward is split between input and parameter gradients by FLOPs"
_COMMAND = "; paradl-bench layers --isolated split measures it"


class MeasuredParts(NamedTuple):
    """Seconds of either part alone, with the standard deviation of each."""

    input_s: float
    input_sd_s: float
    weight_s: float
    weight_sd_s: float

    @property
    def share(self) -> float:
        """Of the input."""
        whole = self.input_s + self.weight_s
        return self.input_s / whole if whole else 0.5

    @property
    def share_sd(self) -> float:
        """Standard deviation of the share, to first order."""
        whole = self.input_s + self.weight_s
        moved = math.hypot(self.weight_s * self.input_sd_s, self.input_s * self.weight_sd_s)
        return moved / whole**2 if whole else 0.0


class BackwardPart(NamedTuple):
    """Cost of one part, and the seconds by which it grows, and the other part shrinks, for one standard deviation."""

    cost: Cost
    moved_s: float


def share_of_flops(layer: Layer) -> float:
    """Share of the input in backward's FLOPs; a half where it has none."""
    whole = layer.bw_input_flops + layer.bw_weight_flops
    return layer.bw_input_flops / whole if whole else 0.5


class BackwardSplit:
    """Shares of backward.

    Args:
        parts: measures of an operation's two parts. known: layers that may have been measured so, to compare FLOPs
            with.
    """

    def __init__(
        self, parts: Callable[[str, str, int, int], MeasuredParts | None], known: Callable[[], Iterable[Layer]]
    ) -> None:
        self._parts, self._known = parts, known
        self._flops_sd: dict[tuple[int, int], float] = {}

    def part(self, whole: Cost, layer: Layer, phase: str, shard: str, batch: int, ranks_on_host: int) -> BackwardPart:
        """One part, ``BW_input`` or ``BW_weight``, of a backward whose parts together cost ``whole``."""
        measured = self._parts(layer.operation, shard, batch, ranks_on_host)
        if measured is not None:
            share, sd, source = measured.share, measured.share_sd, whole.source
            remark = Remark(_MEASURED, False)
        else:
            share, sd = share_of_flops(layer), self._sd_of_flops(batch, ranks_on_host)
            kind = layer_kinds().get(layer.kind)
            text = _BY_FLOPS + (_COMMAND if kind is not None and kind.splits_backward else "")
            source, remark = max(whole.source, Source.SCALED), Remark(text, True, layer.name)
        own_share = share if phase == "BW_input" else 1 - share
        moved_s = whole.seconds * sd
        cost = whole.times(own_share)._replace(source=source, remarks=(*whole.remarks, remark))
        return BackwardPart(cost, moved_s if phase == "BW_input" else -moved_s)

    def _sd_of_flops(self, batch: int, ranks_on_host: int) -> float:
        key = batch, ranks_on_host
        if key not in self._flops_sd:
            errors = []
            for layer in self._known():
                measured = self._parts(layer.operation, "", batch, ranks_on_host)
                if measured is not None:
                    errors.append((measured.share - share_of_flops(layer)) ** 2)
            self._flops_sd[key] = math.sqrt(sum(errors) / len(errors)) if errors else UNIFORM_TO_SD
        return self._flops_sd[key]
