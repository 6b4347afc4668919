"""Dropout in training mode, elementwise or by channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import FLAG, IN_PLACE, SHARE, TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, Saved, TensorArgument


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


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """The dropout function of ``torch.nn.functional``, out of place."""
    import torch.nn.functional as F

    function: Any = getattr(F, str(attributes["function"]))
    return lambda inputs, parameters: function(inputs[0], attributes["p"], bool(attributes["training"]))


def saves(layer: Layer) -> Saved:
    """The mask by which the output was multiplied: an element each, or one a channel; what drops all draws none."""
    by_channel = layer.attributes["function"] not in ("dropout", "alpha_dropout")
    drawn = layer.output_shape[0] if by_channel else layer.output_elements
    draws = layer.attributes["training"] and layer.attributes["p"] not in (0, 1)
    return Saved(mask=drawn if draws else 0)


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch and elements of a sample; how likely an element is dropped does not matter, but for never."""
    if layer.attributes["function"] != "dropout":
        return None
    drops = int(bool(layer.attributes["training"] and layer.attributes["p"]))
    in_place = int(bool(layer.attributes.get("in_place", False)))
    sizes = {"batch": batch, "elements": layer.output_elements, "drops": drops, "in_place": in_place}
    return Operands(sizes, {"function": "dropout"})


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    """``dropout`` of a tenth of the elements, or of none."""
    shape, p = (sizes["batch"], sizes["elements"]), 0.1 if sizes["drops"] else 0.0
    given = {"p": p, "training": True, "inplace": bool(sizes["in_place"])}
    return Call("dropout", (TensorArgument(shape),), given, (shape,), sizes["batch"])


KIND = LayerKind(
    name="dropout",
    functions=("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
    facts=facts,
    attributes={"function": TEXT, "training": FLAG, "in_place": IN_PLACE, "p": SHARE},
    build=_build,
    by_position=lambda attributes: True,
    by_element=lambda attributes: True,
    saves=saves,
    operands=operands,
    call=_call,
)
