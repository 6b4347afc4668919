"""How far the time of one layer may be off, and times of a layer made of others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.profile.profile import LayerTime
from calibrate.statistics.blocks import next_block_stretch
from predict.costs.compute.layer_roofline import kind_of
from predict.costs.sourced import Cost, Remark


class HostRatio(NamedTuple):
    """Seconds with one number of ranks on the host over those with another, and how far single operations differ."""

    value: float
    relative_sd: float


def own_sd(time: LayerTime) -> float:
    """Of a further block of time, relative; layers' own add up in quadrature."""
    return time.block_relative_sd * next_block_stretch(time.blocks, of_many=True)


def of_single_samples(times: Mapping[int, LayerTime]) -> tuple[Remark, ...]:
    """A remark where no time has more than one sample, and with it no spread."""
    if all(time.time.samples > 1 for time in times.values()):
        return ()
    text = "layers have one sample each (imported?): their spread is not known, and the interval does not cover it"
    return (Remark(text, False),)


def isolated_remark(operation: str) -> Remark:
    """That a time is of the operation by itself."""
    return Remark("the times are those of the operation alone, not inside an iteration", False, kind_of(operation))


def added_up(costs: Sequence[Cost]) -> Cost:
    """One cost of several that follow each other: what is independent adds in squares."""
    return Cost(
        sum(cost.seconds for cost in costs),
        max(cost.source for cost in costs),
        math.hypot(*(cost.independent_sd_s for cost in costs)),
        sum(cost.batch_sd_s for cost in costs),
        sum(cost.method_sd_s for cost in costs),
        tuple(dict.fromkeys(remark for cost in costs for remark in cost.remarks)),
        tuple(change for cost in costs for change in cost.adjustments),
        max(cost.origin for cost in costs),
    )


def ratio_of_hosts(pairs: Sequence[tuple[float, float]]) -> HostRatio | None:
    """Ratio of the sums, and the spread of the single ratios round it, each weighed by its time."""
    base = np.array([pair[0] for pair in pairs])
    other = np.array([pair[1] for pair in pairs])
    if not base.sum():
        return None
    value = float(other.sum() / base.sum())
    known = base > 0
    deviations = other[known] / base[known] - value
    variance = float(np.average(deviations**2, weights=base[known]))
    return HostRatio(value, math.sqrt(variance) / value if value else 0.0)
