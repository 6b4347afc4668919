"""Torch's multi-head attention function: projections, attention and the output's projection in one."""

from __future__ import annotations

import math

from paradl_bench.network.kinds.kind import Call, Facts, LayerKind


def facts(call: Call) -> Facts:
    """FLOPs of the two products over all query-key pairs, and of the projections; softmax is left out."""
    given = call.bind("query key value embed_dim_to_check num_heads")
    width = given["query"].shape[-1]
    length = call.output_elements // width
    products = 4 * length * length * width
    weights = sum(math.prod(tensor.shape) for tensor in call.tensors if tensor.parameter and len(tensor.shape) == 2)
    projections = 2 * length * weights
    return Facts(
        {"function": call.function, "heads": int(given["num_heads"])},
        fw_flops=products + projections,
        bw_input_flops=2 * products + projections,
        bw_weight_flops=projections,
    )


KIND = LayerKind(
    name="multi_head_attention",
    functions=("multi_head_attention_forward",),
    facts=facts,
    watched=lambda call: True,
    autocast=lambda attributes, device: "lower",
)
