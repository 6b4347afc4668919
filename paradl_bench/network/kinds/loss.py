"""The loss: cross-entropy over classes."""

from __future__ import annotations

import math

from paradl_bench.network.graph import Layer
from paradl_bench.network.kinds.attributes import TEXT, or_default
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Saved


def facts(call: Call) -> Facts:
    """FLOPs an input element: 5 forward (log-softmax and pick), 4 backward."""
    return Facts({"function": call.function}, fw_flops=5 * call.input_elements, bw_input_flops=4 * call.input_elements)


def saves(layer: Layer) -> Saved:
    """Cross-entropy keeps the logarithms of the probabilities, which are a tensor of its own."""
    if layer.attributes.get("function", "cross_entropy") == "cross_entropy":
        return Saved(elements=math.prod(layer.input_shapes[0]))
    return Saved(inputs=True)


KIND = LayerKind(
    name="loss",
    functions=("cross_entropy", "nll_loss", "mse_loss"),
    facts=facts,
    reads_dims=0,
    attributes={"function": or_default(TEXT)},
    saves=saves,
    # Backward of cross-entropy makes two tensors of the size of the logits.
    watched=lambda call: True,
    autocast=lambda attributes, device: "fp32",
)
