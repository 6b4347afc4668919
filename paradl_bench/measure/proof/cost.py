"""What a proof costs: seconds and memory, estimated before it runs."""

from __future__ import annotations

import math
from typing import NamedTuple

from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.measure.proof.parts import Place
from paradl_bench.network.graph import ModelGraph

LIMIT_S = 3.0
"""What a proof that nobody asked for may take."""
_BYTES = 8
"""Of a number in fp64."""
_SLOWER = 3.0
"""How many times as long a sample takes in fp64 as in training: CPUs compute half as many a vector, without oneDNN."""
_BUILD_S = 1e-7
"""Seconds that copies take, a parameter's element."""
_PARAMETER_COPIES = 8
"""Parameters, gradients and momentum of both models, what ranks exchange, and what is compared."""


class Cost(NamedTuple):
    """Of one rank's proof."""

    seconds: float
    bytes: int


def cost_of(
    network: ModelGraph, place: Place, sample_s: float, *, joint: bool, link_bytes_per_s: float = math.inf
) -> Cost:
    """What a proof costs one rank.

    Args:
        sample_s: seconds that forward and backward of one sample take in training.
        joint: whether the serial model reads all replicas' samples.
        link_bytes_per_s: between ranks, where it is known to be slow.
    """
    of_rank = place.steps * place.samples
    read = place.replicas if joint else 1
    # The serial model's samples, the rank's own, and forward to find the dtype and what mixes samples.
    samples = of_rank * read + of_rank + 2 * place.samples
    elements = sum(math.prod(parameter.shape) for parameter in network.parameters)
    sent_s = 4 * _BYTES * elements / link_bytes_per_s
    seconds = samples * sample_s * _SLOWER + elements * _BUILD_S + sent_s
    activations = sum(math.prod(layer.output_shape) for layer in network.layers)
    kept = place.samples * read + of_rank
    return Cost(seconds, _BYTES * (_PARAMETER_COPIES * elements + kept * activations))


def what_forbids(cost: Cost, free_bytes: int, *, limited: bool) -> str:
    """Why a proof is left out; empty where it is not.

    Args:
        free_bytes: of one rank. limited: whether it has to be quick.
    """
    if cost.bytes > free_bytes:
        return f"it needs {format_bytes(cost.bytes)} of memory a rank, and only {format_bytes(free_bytes)} are free"
    if limited and cost.seconds > LIMIT_S:
        return f"it would take about {format_seconds(cost.seconds)}; give --verify to do it"
    return ""
