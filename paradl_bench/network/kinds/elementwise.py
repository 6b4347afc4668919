"""Pointwise arithmetic on one or two tensors: residual additions, gates, scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import IN_PLACE, TEXT
from paradl_bench.network.kinds.kind import Call, Cast, Facts, LayerKind, Operands, Saved, TensorArgument

_IN_ONE_STEP = ("add", "radd", "sub", "neg", "mul", "rmul", "exp")
_OF_ONE = ("neg", "exp", "sqrt", "rsqrt", "log", "abs")


def facts(call: Call) -> Facts:
    """FLOPs: 1 an output element; backward 1 for each tensor read (none for additions, which pass gradients on).

    Powers by a number say which: a square and a cube are other kernels.
    """
    additive = call.function in ("add", "sub", "radd")
    attributes: dict[str, Attribute] = {"function": call.function, "in_place": call.in_place}
    if call.function == "pow" and isinstance(call.arguments[1], (int, float)):
        attributes["exponent"] = call.arguments[1]
    return Facts(
        attributes,
        fw_flops=call.output_elements,
        bw_input_flops=0 if additive else len(call.tensors) * call.output_elements,
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """The function of torch on the inputs; with one input, by a scalar."""
    import torch

    name = str(attributes["function"])
    function: Any = getattr(torch, {"radd": "add", "rmul": "mul", "truediv": "div"}.get(name, name))

    def run(inputs: list[Any], parameters: list[Any]) -> Any:
        operands = [*inputs, *parameters]
        if len(operands) > 1 or name in _OF_ONE:
            return function(*operands)
        return function(operands[0], attributes.get("exponent", 2.0))

    return run


def saves(layer: Layer) -> Saved:
    """Products keep their factors, where there are two; sums nothing."""
    function = layer.attributes["function"]
    if function in ("add", "radd", "sub", "neg"):
        return Saved()
    if function in ("exp", "sqrt", "rsqrt"):
        return Saved(output=True)
    by_number = function in ("mul", "rmul", "div", "truediv") and len(layer.input_shapes) + len(layer.parameters) < 2
    return Saved(inputs=not by_number)


def watched(call: Call) -> bool:
    """What is broadcast gets a gradient of the larger size first, which is then summed; others make one in steps."""
    return call.function not in _IN_ONE_STEP or len({tensor.shape for tensor in call.tensors}) > 1


def passes_gradient(layer: Layer) -> bool:
    """A sum does, where nothing is broadcast."""
    return layer.attributes["function"] in ("add", "radd") and len(set(layer.input_shapes)) == 1


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch, elements of a sample, tensors read, and elements of the smaller tensor where it is spread (a gate)."""
    shapes = layer.input_shapes
    if layer.parameters or layer.batchless_inputs or not 1 <= len(shapes) <= 2:
        return None
    smaller, larger = (min(map(math.prod, shapes)), layer.output_elements)
    if math.prod(max(shapes, key=math.prod)) != larger or not smaller or larger % smaller:
        return None
    settings = {"function": str(layer.attributes["function"])}
    if "exponent" in layer.attributes:
        settings["exponent"] = str(float(str(layer.attributes["exponent"])))
    in_place = int(bool(layer.attributes.get("in_place", False)))
    sizes = {"batch": batch, "elements": larger, "smaller_elements": smaller, "tensors": len(shapes)}
    return Operands({**sizes, "in_place": in_place}, settings)


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    """The function of its name, on one tensor or two of which one may be spread over positions."""
    batch, elements, smaller = (sizes[name] for name in ("batch", "elements", "smaller_elements"))
    shape = (batch, smaller, elements // smaller)
    tensors = (TensorArgument(shape), TensorArgument((batch, smaller, 1 if smaller < elements else shape[2])))
    exponent = (float(settings["exponent"]),) if "exponent" in settings else ()
    arguments = (*tensors[: sizes["tensors"]], *exponent)
    return Call(settings["function"], arguments, {}, (shape,), batch, bool(sizes["in_place"]))


def autocast(attributes: Mapping[str, Attribute], device: str) -> Cast:
    """Powers, exponentials and logarithms are of fp32 on a GPU."""
    return "fp32" if device == "cuda" and attributes["function"] in ("exp", "log", "pow", "rsqrt") else "widest"


KIND = LayerKind(
    name="elementwise",
    functions=(
        "add", "radd", "sub", "mul", "rmul", "div", "truediv", "neg", "exp", "sqrt", "rsqrt", "log", "abs", "pow",
        "maximum", "minimum",
    ),
    facts=facts,
    attributes={"function": TEXT, "in_place": IN_PLACE},
    build=_build,
    by_position=lambda attributes: True,
    by_element=lambda attributes: True,
    saves=saves,
    watched=watched,
    passes_gradient=passes_gradient,
    operands=operands,
    autocast=autocast,
    call=_call,
)  # fmt: skip
