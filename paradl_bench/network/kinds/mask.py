"""Comparisons, and what is chosen by them: masks, and tensors under masks."""

from __future__ import annotations

from paradl_bench.network.graph import Layer
from paradl_bench.network.kinds.attributes import TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Saved

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


KIND = LayerKind(
    name="mask",
    functions=("gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", *_CHOOSING),
    facts=facts,
    attributes={"function": TEXT},
    by_position=lambda attributes: attributes["function"] not in ("tril", "triu"),
    returns_mask=lambda attributes: attributes["function"] not in _CHOOSING,
    saves=saves,
    watched=lambda call: not call.in_place,
)
