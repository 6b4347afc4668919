"""Pointwise activations, in place or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import IN_PLACE, TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, Saved, TensorArgument

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
    return Facts(attributes, fw_flops=call.output_elements, bw_input_flops=call.output_elements)


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """The function of ``torch.nn.functional``; in place it runs on a copy that autograd may overwrite."""
    import torch
    import torch.nn.functional as F

    name = str(attributes["function"])
    function: Any = getattr(F, name, None) or getattr(torch, name)
    settings: dict[str, Any] = {}
    if attributes.get("in_place", False) and name not in ("gelu", "sigmoid", "tanh", "softplus"):
        settings["inplace"] = True
    if "approximate" in attributes:
        settings["approximate"] = attributes["approximate"]
    return lambda inputs, parameters: function(inputs[0], *parameters, **settings)


def saves(layer: Layer) -> Saved:
    """What the derivative is taken from (torch's derivatives.yaml)."""
    function, in_place = layer.attributes["function"], layer.attributes.get("in_place", False)
    if function in _DERIVED_FROM_OUTPUT or (in_place and function in _EITHER):
        return Saved(output=True)
    return Saved(elements=layer.input_elements) if in_place else Saved(inputs=True)


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch and elements of a sample; None for one with a parameter (PReLU), whose channels count as well."""
    if layer.parameters or len(layer.input_shapes) != 1:
        return None
    settings = {"function": str(layer.attributes["function"])}
    if "approximate" in layer.attributes:
        settings["approximate"] = str(layer.attributes["approximate"])
    in_place = int(bool(layer.attributes.get("in_place", False)))
    return Operands({"batch": batch, "elements": layer.output_elements, "in_place": in_place}, settings)


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    shape = (sizes["batch"], sizes["elements"])
    approximate = {"approximate": settings["approximate"]} if "approximate" in settings else {}
    return Call(
        settings["function"], (TensorArgument(shape),), approximate, (shape,), sizes["batch"], bool(sizes["in_place"])
    )


KIND = LayerKind(
    name="activation",
    functions=_FUNCTIONS,
    facts=facts,
    attributes={"function": TEXT, "in_place": IN_PLACE},
    build=_build,
    by_position=lambda attributes: True,
    by_element=lambda attributes: True,
    saves=saves,
    # Backward makes a gradient of its weight for every element, and adds them up.
    watched=lambda call: call.function == "prelu",
    operands=operands,
    call=_call,
)
