"""What an iteration makes of its ranks: FLOPs, samples and tokens a rank, hours and cost."""

from __future__ import annotations

import math
from typing import NamedTuple

from paradl_bench.core.units import LARGEST_FACTOR, check_bounds
from paradl_bench.network.graph import ModelGraph
from predict.costs.hardware.what_if_device import Peak
from predict.workload import Configuration

TOKEN_IDS = "int64"  # nosec B105  # tokens of texts
"""What the input of models of token sequences holds."""
SECONDS_AN_HOUR = 3600.0
MILLION_SAMPLES = 1e6


class Effort(NamedTuple):
    """Hours of all ranks, and what they cost, by epoch and by million samples."""

    rank_hours_per_epoch: float | None
    rank_hours_per_million_samples: float
    cost_per_epoch: float | None
    cost_per_million_samples: float | None


def model_flops(network: ModelGraph, batch: int) -> float:
    """FLOPs of forward and backward of a mini-batch, each operation once; what holds no batch counts once.

    Recomputation, redundant layers of shards and the weight update are no part of them; nor are gradients that backward
    has no use for: those of the network's input, and of what no parameter had a part in.
    """
    learning: set[str] = set()
    flops = 0
    for layer in network.layers:
        needs_gradient = not learning.isdisjoint(layer.inputs)
        if needs_gradient or layer.parameters:
            learning.add(layer.name)
        of_input = layer.bw_input_flops if needs_gradient else 0
        flops += (layer.fw_flops + of_input + layer.bw_weight_flops) * (1 if layer.batchless else batch)
    return float(flops)


def utilisation(network: ModelGraph, point: Configuration, iteration_s: float, peak: Peak) -> float | None:
    """Model FLOPs utilisation: model FLOPs / (iteration x ranks x peak FLOP/s); None without a peak."""
    if peak.flops is None:
        return None
    return model_flops(network, point.settings.batch) / (iteration_s * point.strategy.ranks * peak.flops)


def tokens_per_sample(network: ModelGraph) -> int | None:
    """Tokens that a sample holds, over all of its sequences; None of models that read none."""
    return math.prod(network.input_shape) if network.input_dtype == TOKEN_IDS else None


def effort(point: Configuration, iteration_s: float, epoch_s: float | None, price: float | None) -> Effort:
    """Hours of all ranks together, and their cost at ``price`` a rank-hour."""
    ranks = point.strategy.ranks
    epoch = None if epoch_s is None else epoch_s * ranks / SECONDS_AN_HOUR
    million = MILLION_SAMPLES / point.settings.batch * iteration_s * ranks / SECONDS_AN_HOUR
    if price is None:
        return Effort(epoch, million, None, None)
    return Effort(epoch, million, None if epoch is None else epoch * price, million * price)


def check_price(price: float | None) -> None:
    """Raise a UserError of a price that is not finite, negative, or beyond what anything costs."""
    check_bounds(price, "--price", "give a finite price of a rank-hour", most=LARGEST_FACTOR)
