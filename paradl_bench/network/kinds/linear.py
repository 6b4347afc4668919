"""Fully connected layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import COUNT, FLAG, or_default
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, TensorArgument, inputs_saved


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the input features, 1 more with bias; as many for each gradient."""
    given = call.bind("input weight bias")
    out_features, in_features = given["weight"].shape
    bias = given.get("bias") is not None
    multiply_adds = 2 * in_features * call.output_elements
    return Facts(
        {"out_features": out_features, "bias": bias},
        fw_flops=multiply_adds + bias * call.output_elements,
        bw_input_flops=multiply_adds,
        bw_weight_flops=multiply_adds + bias * call.output_elements,
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    import torch.nn.functional as F

    return lambda inputs, parameters: F.linear(inputs[0], *parameters)


def operands(layer: Layer, batch: int) -> Operands | None:
    """``batch`` is the rows multiplied at once: samples, times tokens where a sample has several."""
    *rows, in_features = layer.input_shapes[0]
    out_features, bias = layer.output_shape[-1], bool(layer.attributes.get("bias", len(layer.parameters) > 1))
    sizes = {"batch": batch * math.prod(rows), "in_features": in_features, "out_features": out_features}
    return Operands({**sizes, "bias": int(bias)}, {"function": "linear"}, out_features * (in_features + bias))


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    batch, in_features, out_features = (sizes[name] for name in ("batch", "in_features", "out_features"))
    bias = {"bias": TensorArgument((out_features,), "bias")} if sizes["bias"] else {}
    weight = TensorArgument((out_features, in_features), "weight")
    return Call("linear", (TensorArgument((batch, in_features)), weight), bias, ((batch, out_features),), batch)


KIND = LayerKind(
    name="linear",
    functions=("linear",),
    facts=facts,
    reads_dims=1,
    attributes={"out_features": or_default(COUNT), "bias": or_default(FLAG)},
    build=_build,
    splits_backward=True,
    saves=inputs_saved,
    operands=operands,
    autocast=lambda attributes, device: "lower",
    call=_call,
)
