"""Memory of one rank: what is held in each phase of an iteration, and the paper's formula.

Per phase (the default): parameters, buffers, optimizer state, exchange buckets and the input are held throughout.
Forward adds the output of every operation; backward walks the layers in reverse, releases an output when its layer is
done, adds the layer's gradients, and holds the gradients of its output and inputs while it works; the weight update
holds all gradients. The peak is the largest of these sums.

Approximated: every output that owns memory counts as saved until its layer's backward, whether backward reads it or
not; views and in-place operations own none. What operations save beside outputs (masks, indices, statistics),
workspaces, the allocator's fragments, and the device's context are left out, and so are buffers of communication for
layers, which live as long as it. Gradients are released by zero_grad before forward (torch's default); where they are
exchanged a second copy stays in DDP's buckets, in every phase (``gradient_as_bucket_view`` is off by default).

Where ranks share layers each holds its own shapes: parameters of its shards, activations whole behind what is gathered
or summed, blocks with their halos inside a spatial region.

The paper's formula (MODELS.md, "ParaDL", memory; rho = 1): e times the sum over layers of
2 b (x + y) + 2 w + bias, b the local batch; every tensor counts twice, and the bias once, as printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paradl_bench.layers.kind import layer_kinds
from paradl_bench.spec.errors import unknown_choice
from paradl_bench.spec.network import DTYPE_BYTES, Layer, Network
from paradl_bench.spec.plan import Collective, HaloExchange, PlanSettings
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.compute import LayerShard
from paradl_bench.strategies.mesh import REPLICATING, degree_of
from predict.costs import Ints

STATE_COPIES: Mapping[str, int] = {"sgd": 1, "adam": 2}
"""Tensors of a parameter's size that an optimizer keeps: SGD's momentum; Adam's two moments."""


class MemoryUse(NamedTuple):
    """Bytes of one rank at the peak, and what they consist of."""

    peak_bytes: int
    parts_bytes: dict[str, int]


def per_phase_memory(
    network: Network,
    local_batch: int,
    optimizer: str,
    *,
    exchanged: bool,
    dtype: str = "fp32",
    shards: Mapping[int, LayerShard] | None = None,
) -> MemoryUse:
    """Peak over forward, backward and weight update on one rank.

    Args:
        network: with the shapes that parameters have on the rank.
        exchanged: whether gradients are exchanged, which holds them a second time.
        shards: what the rank runs of layers, by index; all of those that are missing.

    Raises:
        UserError: an optimizer whose state is not known.
    """
    if optimizer not in STATE_COPIES:
        raise unknown_choice("optimizer", optimizer, STATE_COPIES)
    parameters = network.parameter_bytes
    fixed = {
        "parameters": parameters,
        "optimizer": STATE_COPIES[optimizer] * parameters,
        "buckets": parameters if exchanged else 0,
        "buffers": sum(buffer.bytes for buffer in network.buffers),
        "input": network.input_bytes(local_batch, dtype),
    }
    held = [hold(layer, (shards or {}).get(index)) for index, layer in enumerate(network.layers)]
    activations, gradients = _largest_moment(network, held, local_batch * DTYPE_BYTES[dtype])
    parts = fixed | {"gradients": gradients, "activations": activations}
    return MemoryUse(sum(parts.values()), parts)


def planned_memory(network: Network, strategy: Strategy, settings: PlanSettings, *, dtype: str = "fp32") -> MemoryUse:
    """The peak of the rank that needs most, of all that share a replica's layers.

    Raises:
        UserError: a limit is exceeded, or an optimizer whose state is not known.
    """
    exchanged = degree_of(strategy, *REPLICATING) > 1
    shares = planner_for(strategy).shares(network, strategy, settings).distinct
    of_ranks = [
        per_phase_memory(
            shared.network,
            settings.batch // degree_of(strategy, "data"),
            settings.optimizer,
            exchanged=exchanged,
            dtype=dtype,
            shards=shared.shards,
        )
        for shared in shares
    ]
    return max(of_ranks, key=lambda use: use.peak_bytes)


class Held(NamedTuple):
    """Elements per sample: kept from a layer's forward to its backward, and gradients while that works."""

    kept: int
    in_flight: int


def hold(layer: Layer, shard: LayerShard | None = None) -> Held:
    """What a rank holds of a layer.

    What is gathered or summed behind a shard is whole; a shard that reads a slice, or a block with its halo, reads a
    copy; blocks that are gathered before a layer become a tensor of their own.
    """
    if shard is None:
        return Held(layer.output_elements if _owns_output(layer) else 0, layer.input_elements + layer.output_elements)
    run = layer if shard.after_fw else shard.layer
    reads_slice = bool(shard.after_fw) and shard.layer.input_elements < layer.input_elements
    reads_halo = any(isinstance(work, HaloExchange) for work in shard.before_fw)
    copied = shard.layer.input_elements if reads_slice or reads_halo else 0
    gathered = layer.input_elements if any(isinstance(work, Collective) for work in shard.before_fw) else 0
    output = run.output_elements if _owns_output(layer) else 0
    return Held(output + copied + gathered, run.input_elements + run.output_elements)


def _largest_moment(network: Network, held: Sequence[Held], scale: int) -> tuple[int, int]:
    """(activations and their gradients, gradients of parameters) in bytes, at the moment when they are largest.

    Args:
        scale: bytes of an element of each sample.
    """
    if not held:
        return 0, network.parameter_bytes
    owned = np.array([layer.kept for layer in held], np.int64) * scale
    in_flight = np.array([layer.in_flight for layer in held], np.int64) * scale
    saved = np.cumsum(owned)
    gradients = _gradients_after(network)
    in_backward = saved + in_flight + gradients
    worst = int(np.argmax(in_backward))
    moments = {
        int(saved[-1]): (int(saved[-1]), 0),
        int(in_backward[worst]): (int(in_backward[worst] - gradients[worst]), int(gradients[worst])),
        network.parameter_bytes: (0, network.parameter_bytes),
    }
    return moments[max(moments)]


def _owns_output(layer: Layer) -> bool:
    kind = layer_kinds().get(layer.kind)
    return not (kind is not None and kind.view) and not layer.attributes.get("in_place", False)


def _gradients_after(network: Network) -> Ints:
    """Bytes of parameter gradients that are there once backward of each layer is done."""
    size = {parameter.name: parameter.bytes for parameter in network.parameters}
    complete_with = {name: layer for layer in reversed(network.layers) for name in layer.parameters}
    own = [
        sum(size.get(name, 0) for name in dict.fromkeys(layer.parameters) if complete_with[name] is layer)
        for layer in network.layers
    ]
    return np.cumsum(np.array(own[::-1], np.int64))[::-1]


def paradl_memory(network: Network, local_batch: int, *, dtype: str = "fp32") -> MemoryUse:
    """The paper's sum for serial and data, with a reuse factor of 1."""
    element = DTYPE_BYTES[dtype]
    activations = 2 * local_batch * element * sum(x.input_elements + x.output_elements for x in network.layers)
    bias = sum(parameter.bytes for parameter in network.parameters if parameter.name.rpartition(".")[2] == "bias")
    weights = 2 * (network.parameter_bytes - bias)
    parts = {"activations": activations, "weights": weights, "bias": bias}
    return MemoryUse(sum(parts.values()), parts)
