"""Concatenation and stacking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import DIM, TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, TensorArgument, nothing_saved
from paradl_bench.network.kinds.operand_sizes import round_dims


def facts(call: Call) -> Facts:
    """Moves data, computes nothing."""
    given = call.bind("tensors dim")
    return Facts({"function": call.function, "dim": int(given.get("dim", given.get("axis", 0)))})


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    import torch

    function: Any = torch.stack if attributes["function"] == "stack" else torch.cat
    return lambda inputs, parameters: function(inputs, attributes["dim"])


def by_position(attributes: Mapping[str, Attribute]) -> bool:
    """Concatenation along channels is; along positions, or stacking, is not."""
    return attributes["dim"] == 1 and attributes["function"] != "stack"


def operands(layer: Layer, batch: int) -> Operands | None:
    """``batch`` is what lies before the dim, ``elements`` what lies along it and behind, of all ``tensors``."""
    if layer.attributes["function"] == "stack" or layer.batchless_inputs or layer.parameters:
        return None
    sizes = round_dims(layer.output_shape, batch, layer.attributes["dim"])
    if sizes is None or len(layer.input_shapes) < 2:
        return None
    elements = sizes["width"] * sizes["inner"]
    return Operands(
        {"batch": sizes["batch"], "elements": elements, "tensors": len(layer.input_shapes)}, {"function": "cat"}
    )


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    """Of tensors as equal as they can be."""
    batch, elements, tensors = (sizes[name] for name in ("batch", "elements", "tensors"))
    parts = [elements // tensors + (index < elements % tensors) for index in range(tensors)]
    tensors_read = tuple(TensorArgument((batch, part)) for part in parts)
    return Call("cat", (tensors_read, 1), {}, ((batch, elements),), batch)


KIND = LayerKind(
    name="cat",
    functions=("cat", "concat", "stack"),
    facts=facts,
    attributes={"function": TEXT, "dim": DIM},
    build=_build,
    by_position=by_position,
    saves=nothing_saved,
    passes_gradient=lambda layer: True,
    operands=operands,
    call=_call,
)
