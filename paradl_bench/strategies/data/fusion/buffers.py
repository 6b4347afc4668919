"""Which gradients of a network are sent together, by a rule, and when each is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.compute import backward_layers, gradient_layers, layers_with_gradient
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.tasks import Compute, Phase, Plan
from paradl_bench.strategies.data.fusion.layerwise_plan import Sends, gradient_bytes
from paradl_bench.strategies.data.fusion.rules import (
    AllReduceSeconds,
    Fusion,
    Gradients,
    last_of_buffers,
    waits_for_next,
)
from paradl_bench.strategies.exchange.buckets import total_bytes
from paradl_bench.strategies.exchange.gradients import GradientBuckets


class Buffers(NamedTuple):
    """What is sent together.

    Attributes:
        layers: those with gradients, by index, in the order of backward.
        last: per buffer, which of ``layers`` completes it. bytes: of each buffer.
        full: per buffer, whether it is sent because the gradient behind its last one came and had no room in it; empty
            where no rule looks at that.
    """

    layers: tuple[int, ...]
    last: tuple[int, ...]
    bytes: tuple[int, ...]
    full: tuple[bool, ...] = ()

    @property
    def sends(self) -> Sends:
        """As :func:`~paradl_bench.strategies.data.fusion.layerwise_plan.layerwise_plan` takes them."""
        sizes_by_layer: dict[int, tuple[int, ...]] = {}
        for index, size in zip(self.last, self.bytes, strict=True):
            layer = self.layers[index]
            sizes_by_layer[layer] = (*sizes_by_layer.get(layer, ()), size)
        return sizes_by_layer


def backward_order(network: ModelGraph) -> tuple[int, ...]:
    """Layers that backward runs, by index, in its order."""
    return backward_layers(network, layers_with_gradient(network))


def fused(network: ModelGraph, fusion: Fusion, ready_of: dict[int, float], all_reduce_s: AllReduceSeconds) -> Buffers:
    """Buffers of a rule of fusion.

    Args:
        ready_of: seconds at which backward of a layer is done, by its index, since any one moment.
        all_reduce_s: seconds of an all-reduce of so many bytes.
    """
    order = backward_order(network)
    sizes = gradient_bytes(network, order)
    layers = tuple(layer for layer in order if sizes.get(layer))
    layer_bytes = tuple(sizes[layer] for layer in layers)
    gradients = Gradients(np.array([ready_of[layer] for layer in layers]), layer_bytes)
    last = last_of_buffers(fusion, gradients, all_reduce_s)
    starts = (0, *(index + 1 for index in last[:-1]))
    sizes_of_buffers = tuple(sum(layer_bytes[a : b + 1]) for a, b in zip(starts, last, strict=False))
    return Buffers(layers, last, sizes_of_buffers, waits_for_next(fusion, gradients, last))


def fused_as_ddp(network: ModelGraph, settings: PlanSettings) -> Buffers:
    """DDP's buckets, or the messages of the settings: each is sent behind its last gradient and the one before it."""
    order = backward_order(network)
    layer_of = gradient_layers(network, order)
    place = {layer: index for index, layer in enumerate(order)}
    layers = tuple(layer for layer in order if layer in set(layer_of.values()))
    buckets = [bucket for bucket in GradientBuckets(network, settings).rebuilt if total_bytes(bucket)] if layers else []
    complete = np.maximum.accumulate(
        [max(place[layer_of.get(parameter.name, layers[0])] for parameter in bucket) for bucket in buckets] or [0]
    )
    at = {place[layer]: index for index, layer in enumerate(layers)}
    last = tuple(at[position] for position in complete.tolist()) if buckets else ()
    return Buffers(layers, last, tuple(total_bytes(bucket) for bucket in buckets))


def backward_tasks(plan: Plan, network: ModelGraph) -> dict[int, int]:
    """Per layer that backward runs, by index, its task in the plan's one role."""
    (role,) = plan.roles
    computes = [
        task
        for task, (phase, work) in enumerate(zip(role.phase.tolist(), role.work.tolist(), strict=True))
        if phase == Phase.BW and isinstance(plan.works[work], Compute)
    ]
    return dict(zip(backward_order(network), computes, strict=True))


def ready_seconds(plan: Plan, network: ModelGraph, seconds: NDArray[np.float64]) -> dict[int, float]:
    """Since the start of backward, when each layer's backward is done, by its index."""
    (role,) = plan.roles
    done = np.cumsum(np.where(role.phase == Phase.BW, seconds[role.work], 0.0))
    return {layer: float(done[task]) for layer, task in backward_tasks(plan, network).items()}


def describe(fusion: Fusion, buffers: Sequence[int], gradients: int, fused_by: str = "") -> str:
    """What was fused, in words, for a report.

    Args:
        fused_by: what found the messages of a run, in the place of the rule; empty for the rule.
    """
    count = f"{len(buffers)} all-reduce{'s' * (len(buffers) != 1)} of the gradients of {gradients} layers"
    rules = {
        "none": "layer by layer",
        "buffer": f"a buffer of {format_bytes(fusion.buffer_bytes)}, timeout {format_seconds(fusion.timeout_s)}",
        "ada": "adaFusion",
        "mg-wfbp": "MG-WFBP",
        "ddp": "DDP's buckets",
    }
    return f"{fused_by or rules[fusion.rule]}: {count}"
