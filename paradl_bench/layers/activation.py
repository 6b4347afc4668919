"""Pointwise activations, in place or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, always
from paradl_bench.spec.network import Attribute

_FUNCTIONS = (
    "relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid",
    "mish", "softplus", "prelu", "celu", "selu",
)  # fmt: skip


def facts(call: Call) -> Facts:
    """FLOPs: 1 an element in each direction (transcendental functions count 1 as well)."""
    in_place = call.in_place or bool(call.keywords.get("inplace", False))
    return Facts(
        {"function": call.function, "in_place": in_place},
        fw_flops=call.output_elements,
        bw_input_flops=call.output_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """The function of ``torch.nn.functional``; in place it runs on a copy that autograd may overwrite."""
    import torch
    import torch.nn.functional as F

    name = str(attributes["function"])
    function: Any = getattr(F, name, None) or getattr(torch, name)
    settings = (
        {"inplace": True} if attributes["in_place"] and name not in ("gelu", "sigmoid", "tanh", "softplus") else {}
    )
    return lambda inputs, parameters: function(inputs[0], *parameters, **settings)


KIND = LayerKind(name="activation", functions=_FUNCTIONS, facts=facts, build=build, by_position=always)
