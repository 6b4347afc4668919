"""Dropout in training mode, elementwise or by channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, Saved, always
from paradl_bench.spec.network import Attribute, Layer


def facts(call: Call) -> Facts:
    """FLOPs: draw, compare and scale forward (3 an element), scale backward (1)."""
    given = call.bind("input p training inplace")
    return Facts(
        {
            "function": call.function,
            "training": bool(given.get("training", True)),
            "in_place": bool(given.get("inplace", False)),
            "p": float(given.get("p", 0.5)),
        },
        fw_flops=3 * call.output_elements,
        bw_input_flops=call.output_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """The dropout function of ``torch.nn.functional``, out of place."""
    import torch.nn.functional as F

    function: Any = getattr(F, str(attributes["function"]))
    return lambda inputs, parameters: function(inputs[0], attributes["p"], bool(attributes["training"]))


def saves(layer: Layer) -> Saved:
    """The mask by which the output was multiplied: an element each, or one a channel."""
    by_channel = layer.attributes["function"] not in ("dropout", "alpha_dropout")
    drawn = layer.output_shape[0] if by_channel else layer.output_elements
    return Saved(mask=drawn if layer.attributes["training"] and layer.attributes["p"] else 0)


KIND = LayerKind(
    name="dropout",
    functions=("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
    facts=facts,
    build=build,
    by_position=always,
    by_element=always,
    saves=saves,
)
