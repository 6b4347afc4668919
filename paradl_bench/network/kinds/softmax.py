"""Softmax and log-softmax over one dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import DIM, TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, TensorArgument, output_saved
from paradl_bench.network.kinds.operand_sizes import round_dims


def facts(call: Call) -> Facts:
    """FLOPs an element: 4 forward (maximum, subtract and exponentiate, sum, divide), 4 backward."""
    given = call.bind("input dim")
    return Facts(
        {"function": call.function, "dim": int(given.get("dim", -1))},
        fw_flops=4 * call.output_elements,
        bw_input_flops=4 * call.output_elements,
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    import torch.nn.functional as F

    function: Any = getattr(F, str(attributes["function"]))
    return lambda inputs, parameters: function(inputs[0], dim=attributes["dim"])


def operands(layer: Layer, batch: int) -> Operands | None:
    """``batch`` is what lies before the dim (samples, heads, rows), ``inner`` what lies behind it."""
    sizes = round_dims(layer.input_shapes[0], batch, layer.attributes["dim"])
    return None if sizes is None else Operands(sizes, {"function": str(layer.attributes["function"])})


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    shape = (sizes["batch"], sizes["width"], sizes["inner"])
    return Call(settings["function"], (TensorArgument(shape),), {"dim": 1}, (shape,), sizes["batch"])


KIND = LayerKind(
    name="softmax",
    functions=("softmax", "log_softmax"),
    facts=facts,
    attributes={"function": TEXT, "dim": DIM},
    build=_build,
    saves=output_saved,
    operands=operands,
    autocast=lambda attributes, device: "fp32" if device == "cuda" else "widest",
    call=_call,
)
