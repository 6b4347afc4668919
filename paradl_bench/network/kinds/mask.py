"""Comparisons, and what is chosen by them: masks, and tensors under masks."""

from __future__ import annotations

from collections.abc import Mapping

from paradl_bench.network.graph import Layer
from paradl_bench.network.kinds.attributes import IN_PLACE, TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, Saved, TensorArgument

_CHOOSING = ("where", "masked_fill", "tril", "triu")


def facts(call: Call) -> Facts:
    """FLOPs: 1 an output element; backward of a choice 1 as well, of a comparison, which has none, 0."""
    chooses = call.function in _CHOOSING
    return Facts(
        {"function": call.function, "in_place": call.in_place},
        fw_flops=call.output_elements,
        bw_input_flops=chooses * call.output_elements,
    )


def saves(layer: Layer) -> Saved:
    """A choice keeps its mask, a byte an element."""
    if layer.attributes["function"] in ("where", "masked_fill"):
        return Saved(elements=layer.output_elements // 4)
    return Saved()


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch, elements of a sample, and how many tensors are read, all as large as the output (a mask is one of them).

    None of a comparison, which has no backward, and of a triangle, whose shape decides how much of it is kept.
    """
    function = str(layer.attributes["function"])
    if function not in ("where", "masked_fill") or layer.parameters or layer.batchless_inputs:
        return None
    if set(layer.input_shapes) != {layer.output_shape}:
        return None
    in_place = int(bool(layer.attributes.get("in_place", False)))
    sizes = {"batch": batch, "elements": layer.output_elements, "tensors": len(layer.input_shapes)}
    return Operands({**sizes, "in_place": in_place}, {"function": function})


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    """The function of its name on tensors that are all as large as the output."""
    shape = (sizes["batch"], sizes["elements"])
    tensors = tuple(TensorArgument(shape) for _ in range(sizes["tensors"]))
    return Call(settings["function"], tensors, {}, (shape,), sizes["batch"], bool(sizes["in_place"]))


KIND = LayerKind(
    name="mask",
    functions=("gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", *_CHOOSING),
    facts=facts,
    attributes={"function": TEXT, "in_place": IN_PLACE},
    by_position=lambda attributes: attributes["function"] not in ("tril", "triu"),
    returns_mask=lambda attributes: attributes["function"] not in _CHOOSING,
    saves=saves,
    watched=lambda call: not call.in_place,
    operands=operands,
    call=_call,
)
