"""Fully connected layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, inputs_saved
from paradl_bench.spec.network import Attribute


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


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``torch.nn.functional.linear``."""
    import torch.nn.functional as F

    return lambda inputs, parameters: F.linear(inputs[0], *parameters)


KIND = LayerKind(
    name="linear", functions=("linear",), facts=facts, build=build, splits_backward=True, saves=inputs_saved
)
