"""Operations that change shape or strides and move no data: flatten, view, permute, split, indexing by slices."""

from __future__ import annotations

from paradl_bench.layers.kind import Call, Facts, LayerKind


def facts(call: Call) -> Facts:
    """No FLOPs. The output's shape tells one view from another."""
    return Facts({"function": call.function, "output": call.output_shapes[0][1:]})


KIND = LayerKind(
    name="view",
    functions=(
        "flatten", "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "expand", "chunk", "split",
        "unflatten", "getitem", "t", "narrow", "select", "unbind", "detach", "view_as", "expand_as", "movedim",
    ),
    facts=facts,
    view=True,
)  # fmt: skip
