"""A product and a sum in one: what GPT-2's fully connected layers call, with weights stored as inputs times outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import COUNT, TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, TensorArgument, inputs_saved


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the inner dim and 1 for the sum; a product for each gradient.

    ``weights`` says which of the three operands (sum, first and second factor) are parameters.
    """
    added, _, factor = call.tensors[:3]
    inner, out_features = factor.shape
    product = 2 * inner * call.output_elements
    operands = zip(("sum", "first", "second"), call.tensors, strict=False)
    return Facts(
        {"out_features": out_features, "weights": "-".join(name for name, tensor in operands if tensor.parameter)},
        fw_flops=product + call.output_elements,
        bw_input_flops=product,
        bw_weight_flops=product + bool(added.parameter) * call.output_elements,
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``torch.addmm`` over all samples' rows at once."""
    import torch

    weights = str(attributes["weights"]).split("-")

    def run(inputs: list[Any], parameters: list[Any]) -> Any:
        activations, trained = iter(inputs), iter(parameters)
        operands = [next(trained if name in weights else activations) for name in ("sum", "first", "second")]
        of_samples = operands[1].shape[:-1]
        operands[1] = operands[1].flatten(0, -2)
        return torch.addmm(*operands).view(*of_samples, -1)

    return run


def operands(layer: Layer, batch: int) -> Operands | None:
    """As a fully connected layer's; None where other operands than sum and second factor are parameters."""
    if layer.attributes["weights"] != "sum-second" or len(layer.input_shapes) != 1:
        return None
    *rows, in_features = layer.input_shapes[0]
    out_features = layer.output_shape[-1]
    sizes = {"batch": batch * math.prod(rows), "in_features": in_features, "out_features": out_features}
    return Operands(sizes, {"function": "addmm"}, out_features * (in_features + 1))


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    batch, in_features, out_features = (sizes[name] for name in ("batch", "in_features", "out_features"))
    bias, weight = TensorArgument((out_features,), "bias"), TensorArgument((in_features, out_features), "weight")
    return Call("addmm", (bias, TensorArgument((batch, in_features)), weight), {}, ((batch, out_features),), batch)


KIND = LayerKind(
    name="addmm",
    functions=("addmm",),
    facts=facts,
    attributes={"out_features": COUNT, "weights": TEXT},
    build=_build,
    splits_backward=True,
    saves=inputs_saved,
    operands=operands,
    autocast=lambda attributes, device: "lower",
    call=_call,
    like="linear",
)
