"""Operations that change shape or strides and move no data: flatten, view, permute, split, indexing by slices."""

from __future__ import annotations

from paradl_bench.layers.kind import Call, Facts, LayerKind, nothing_saved
from paradl_bench.spec.network import Layer


def facts(call: Call) -> Facts:
    """No FLOPs. The output's shape tells one view from another."""
    return Facts({"function": call.function, "output": call.output_shape})


# Their gradients are put together in a tensor of the input's size.
_PARTS = ("chunk", "split", "unbind", "getitem", "narrow", "select", "expand", "expand_as")


def passes_gradient(layer: Layer) -> bool:
    """Views of all of a tensor do."""
    return layer.attributes["function"] not in _PARTS


KIND = LayerKind(
    name="view",
    functions=(
        "flatten", "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "expand", "chunk", "split",
        "unflatten", "getitem", "t", "narrow", "select", "unbind", "detach", "view_as", "expand_as", "movedim",
    ),
    facts=facts,
    view=True,
    saves=nothing_saved,
    passes_gradient=passes_gradient,
)  # fmt: skip
