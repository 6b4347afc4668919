"""Memory of one rank: what is held in each phase of an iteration, and the paper's formula.

Per phase (the default): parameters, buffers, optimizer state, exchange buckets and the input are held throughout.
Forward adds the output of every operation; backward walks the layers in reverse, releases an output when its layer is
done, adds the layer's gradients, and holds the gradients of its output and inputs while it works; the weight update
holds all gradients. The peak is the largest of these sums.

Approximated: every output that owns memory counts as saved until its layer's backward, whether backward reads it or
not; views and in-place operations own none. What operations save beside outputs (masks, indices, statistics),
workspaces, the allocator's fragments, and the device's context are left out. Gradients are released by zero_grad before
forward (torch's default); data parallelism holds them a second time in its buckets, in every phase
(``gradient_as_bucket_view`` is off by default).

The paper's formula (MODELS.md, "ParaDL", memory; rho = 1): e times the sum over layers of
2 b (x + y) + 2 w + bias, b the local batch; every tensor counts twice, and the bias once, as printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paradl_bench.layers.kind import layer_kinds
from paradl_bench.spec.errors import unknown_choice
from paradl_bench.spec.network import DTYPE_BYTES, Layer, Network
from predict.costs import Ints

STATE_COPIES: Mapping[str, int] = {"sgd": 1, "adam": 2}
"""Tensors of a parameter's size that an optimizer keeps: SGD's momentum; Adam's two moments."""


class MemoryUse(NamedTuple):
    """Bytes of one rank at the peak, and what they consist of."""

    peak_bytes: int
    parts_bytes: dict[str, int]


def per_phase_memory(
    network: Network, local_batch: int, optimizer: str, *, ranks: int, dtype: str = "fp32"
) -> MemoryUse:
    """Peak over forward, backward and weight update of serial or data parallel training.

    Raises:
        UserError: an optimizer whose state is not known.
    """
    if optimizer not in STATE_COPIES:
        raise unknown_choice("optimizer", optimizer, STATE_COPIES)
    parameters = network.parameter_bytes
    fixed = {
        "parameters": parameters,
        "optimizer": STATE_COPIES[optimizer] * parameters,
        "buckets": parameters if ranks > 1 else 0,
        "buffers": sum(buffer.bytes for buffer in network.buffers),
        "input": local_batch * int(np.prod(network.input_shape)) * DTYPE_BYTES[dtype],
    }
    activations, gradients = _largest_moment(network, local_batch, dtype)
    parts = fixed | {"gradients": gradients, "activations": activations}
    return MemoryUse(sum(parts.values()), parts)


def _largest_moment(network: Network, local_batch: int, dtype: str) -> tuple[int, int]:
    """(activations and their gradients, gradients of parameters) in bytes, at the moment when they are largest."""
    layers = network.layers
    if not layers:
        return 0, network.parameter_bytes
    scale = local_batch * DTYPE_BYTES[dtype]
    owned = np.array([layer.output_elements if _owns_output(layer) else 0 for layer in layers], np.int64) * scale
    in_flight = np.array([layer.input_elements + layer.output_elements for layer in layers], np.int64) * scale
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
