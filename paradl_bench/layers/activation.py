"""Pointwise activations, in place or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, Saved, always
from paradl_bench.spec.network import Attribute, Layer

_FUNCTIONS = (
    "relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid",
    "mish", "softplus", "prelu", "celu", "selu",
)  # fmt: skip
_DERIVED_FROM_OUTPUT = ("relu", "sigmoid", "tanh")
# In place their derivatives are taken from the output; that of others from a copy of what was overwritten.
_EITHER = ("leaky_relu", "elu", "celu", "selu")


def facts(call: Call) -> Facts:
    """FLOPs: 1 an element in each direction (transcendental functions count 1 as well)."""
    in_place = call.in_place or bool(call.keywords.get("inplace", False))
    attributes: dict[str, Attribute] = {"function": call.function, "in_place": in_place}
    if call.keywords.get("approximate", "none") != "none":
        attributes["approximate"] = call.keywords["approximate"]
    return Facts(
        attributes,
        fw_flops=call.output_elements,
        bw_input_flops=call.output_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """The function of ``torch.nn.functional``; in place it runs on a copy that autograd may overwrite."""
    import torch
    import torch.nn.functional as F

    name = str(attributes["function"])
    function: Any = getattr(F, name, None) or getattr(torch, name)
    settings: dict[str, Any] = {}
    if attributes["in_place"] and name not in ("gelu", "sigmoid", "tanh", "softplus"):
        settings["inplace"] = True
    if "approximate" in attributes:
        settings["approximate"] = attributes["approximate"]
    return lambda inputs, parameters: function(inputs[0], *parameters, **settings)


def saves(layer: Layer) -> Saved:
    """What the derivative is taken from (torch's derivatives.yaml)."""
    function, in_place = layer.attributes["function"], layer.attributes["in_place"]
    if function in _DERIVED_FROM_OUTPUT or (in_place and function in _EITHER):
        return Saved(output=True)
    return Saved(elements=layer.input_elements) if in_place else Saved(inputs=True)


KIND = LayerKind(
    name="activation",
    functions=_FUNCTIONS,
    facts=facts,
    build=build,
    by_position=always,
    by_element=always,
    saves=saves,
)
