"""Operations that move data and compute nothing: copies, padding, rolling, conversions."""

from __future__ import annotations

from paradl_bench.layers.kind import Call, Facts, LayerKind


def facts(call: Call) -> Facts:
    """No FLOPs; the output's shape tells one from another."""
    return Facts({"function": call.function, "output": call.output_shapes[0][1:]})


KIND = LayerKind(
    name="copy",
    functions=("contiguous", "clone", "pad", "roll", "to", "float", "type_as", "repeat", "swapaxes"),
    facts=facts,
)
