"""Layer, group, instance and local response normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import COUNTS_IF_KNOWN, FLAG, TEXT
from paradl_bench.network.kinds.kind import Call, Cast, Facts, LayerKind, Operands, Saved, TensorArgument


def facts(call: Call) -> Facts:
    """FLOPs an element: 7 forward, 11 backward, as batch normalisation."""
    given = call.bind("input size weight bias")
    size = given.get("normalized_shape", given.get("num_groups", given.get("size")))
    return Facts(
        {
            "function": call.function,
            "size": tuple(size) if isinstance(size, (list, tuple)) else size if isinstance(size, int) else None,
            "affine": any(tensor.parameter for tensor in call.tensors),
        },
        fw_flops=7 * call.output_elements,
        bw_input_flops=8 * call.output_elements,
        bw_weight_flops=3 * call.output_elements,
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    import torch.nn.functional as F

    function: Any = getattr(F, str(attributes["function"]))
    return lambda inputs, parameters: function(inputs[0], attributes["size"], *parameters)


def saves(layer: Layer) -> Saved:
    """Inputs, with mean and deviation of each row or group; what local response normalisation keeps is not known."""
    function, size = layer.attributes["function"], layer.attributes["size"]
    if function == "group_norm" and isinstance(size, int):
        return Saved(inputs=True, elements=2 * size)
    if function == "layer_norm" and isinstance(size, tuple):
        return Saved(inputs=True, elements=2 * layer.input_elements // math.prod(size))
    return Saved(inputs=True, output=True)


def operands(layer: Layer, batch: int) -> Operands | None:
    """Of layer and RMS normalisation ``batch`` is the rows and ``channels`` their width; None for other kinds."""
    function, size = str(layer.attributes["function"]), layer.attributes["size"]
    affine = int(bool(layer.attributes["affine"]))
    if function in ("layer_norm", "rms_norm") and isinstance(size, tuple):
        channels = math.prod(size)
        sizes = {"batch": batch * layer.output_elements // channels, "channels": channels, "positions": 1, "groups": 1}
    elif function == "group_norm" and isinstance(size, int):
        channels, *positions = layer.output_shape
        sizes = {"batch": batch, "channels": channels, "positions": math.prod(positions), "groups": size}
    else:
        return None
    biased = 1 if function == "rms_norm" else 2
    return Operands({**sizes, "affine": affine}, {"function": function}, biased * channels * affine)


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    function = settings["function"]
    batch, channels = sizes["batch"], sizes["channels"]
    shape = (batch, channels, sizes["positions"]) if function == "group_norm" else (batch, channels)
    size = sizes["groups"] if function == "group_norm" else (channels,)
    names = ("weight",) if function == "rms_norm" else ("weight", "bias")
    parameters = tuple(TensorArgument((channels,), name) for name in names if sizes["affine"])
    named = "num_groups" if function == "group_norm" else "normalized_shape"
    return Call(
        function, (TensorArgument(shape),), {named: size, **{p.parameter: p for p in parameters}}, (shape,), batch
    )


def autocast(attributes: Mapping[str, Attribute], device: str) -> Cast:
    """Local response normalisation in fp32, on a GPU layer and group normalisation too; others in what they read."""
    function = attributes["function"]
    if function == "local_response_norm" or (device == "cuda" and function in ("layer_norm", "group_norm")):
        return "fp32"
    return "input"


KIND = LayerKind(
    name="norm",
    functions=("layer_norm", "group_norm", "instance_norm", "local_response_norm", "rms_norm"),
    facts=facts,
    attributes={"function": TEXT, "size": COUNTS_IF_KNOWN, "affine": FLAG},
    build=_build,
    saves=saves,
    watched=lambda call: call.function in ("instance_norm", "local_response_norm", "rms_norm"),
    operands=operands,
    autocast=autocast,
    call=_call,
)
