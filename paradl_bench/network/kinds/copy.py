"""Operations that move data and compute nothing: copies, padding, rolling, conversions."""

from __future__ import annotations

from collections.abc import Mapping

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, nothing_saved


def facts(call: Call) -> Facts:
    """No FLOPs; the output's shape tells one from another."""
    return Facts({"function": call.function, "output": call.output_shape})


def by_position(attributes: Mapping[str, Attribute]) -> bool:
    """Plain copies and conversions are."""
    return attributes["function"] in ("contiguous", "clone", "float")


def passes_gradient(layer: Layer) -> bool:
    """Copies and conversions to the same type do."""
    return layer.attributes["function"] in ("contiguous", "clone", "to", "float", "type_as")


KIND = LayerKind(
    name="copy",
    functions=("contiguous", "clone", "pad", "roll", "to", "float", "type_as", "repeat", "swapaxes"),
    facts=facts,
    attributes={"function": TEXT},
    by_position=by_position,
    by_element=by_position,
    saves=nothing_saved,
    watched=lambda call: call.function == "pad",
    passes_gradient=passes_gradient,
)
