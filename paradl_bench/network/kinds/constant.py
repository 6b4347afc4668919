"""Tensors made from nothing: position ids, zeros, other constants."""

from __future__ import annotations

from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, nothing_saved


def facts(call: Call) -> Facts:
    """Written, not computed."""
    return Facts({"function": call.function, "output": call.output_shape})


KIND = LayerKind(
    name="constant",
    functions=(
        "arange", "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros",
        "new_ones", "new_full", "new_empty",
    ),
    facts=facts,
    saves=nothing_saved,
)  # fmt: skip
