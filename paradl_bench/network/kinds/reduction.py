"""Sums, means and extrema, over all or some dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import DIMS, FLAG, TEXT
from paradl_bench.network.kinds.kind import Call, Cast, Facts, LayerKind, Operands, TensorArgument, nothing_saved
from paradl_bench.network.kinds.operand_sizes import round_dims


def facts(call: Call) -> Facts:
    """FLOPs: 1 an input element forward; backward spreads the gradient over as many."""
    given = call.bind("input dim keepdim")
    dim = given.get("dim")
    return Facts(
        {
            "function": call.function,
            "dim": tuple(dim) if isinstance(dim, (tuple, list)) else dim if isinstance(dim, int) else None,
            "keepdim": bool(given.get("keepdim", False)),
        },
        fw_flops=call.input_elements,
        bw_input_flops=call.input_elements,
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    import torch

    function: Any = getattr(torch, str(attributes["function"]))
    dim, keepdim = attributes["dim"], bool(attributes["keepdim"])
    if dim is None:
        return lambda inputs, parameters: function(inputs[0])
    return lambda inputs, parameters: function(inputs[0], dim, keepdim=keepdim)


def operands(layer: Layer, batch: int) -> Operands | None:
    """``batch`` is what lies before the dims that are summed, ``width`` those, ``inner`` what lies behind."""
    if layer.batchless_inputs:
        return None
    sizes = round_dims(layer.input_shapes[0], batch, layer.attributes["dim"])
    return None if sizes is None else Operands(sizes, {"function": str(layer.attributes["function"])})


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    batch, width, inner = (sizes[name] for name in ("batch", "width", "inner"))
    tensor = TensorArgument((batch, width, inner))
    return Call(settings["function"], (tensor,), {"dim": 1}, ((batch, inner),), batch)


def autocast(attributes: Mapping[str, Attribute], device: str) -> Cast:
    """A GPU adds up in fp32; means are of what they read."""
    return "fp32" if device == "cuda" and attributes["function"] == "sum" else "widest"


KIND = LayerKind(
    name="reduction",
    functions=("mean", "sum"),
    facts=facts,
    attributes={"function": TEXT, "dim": DIMS, "keepdim": FLAG},
    build=_build,
    saves=nothing_saved,
    # The gradient of a sum is spread without a copy.
    passes_gradient=lambda layer: layer.attributes["function"] == "sum",
    operands=operands,
    autocast=autocast,
    call=_call,
)
