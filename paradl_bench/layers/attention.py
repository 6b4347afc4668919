"""Scaled dot-product attention, alone or inside the multi-head function (with its projections)."""

from __future__ import annotations

import math

from paradl_bench.layers.kind import Call, Facts, LayerKind


def facts(call: Call) -> Facts:
    """FLOPs of the two products over all query-key pairs, and of the projections where weights are among the arguments.

    Softmax is left out (below 1% of the products at usual head sizes).
    """
    query, key = call.tensors[0].shape, call.tensors[1].shape
    if call.function == "scaled_dot_product_attention":
        heads, pairs, width = math.prod(query[:-2]) // call.batch, query[-2] * key[-2], query[-1]
        products = 4 * heads * pairs * width
        return Facts({"function": call.function}, fw_flops=products, bw_input_flops=2 * products)
    given = call.bind("query key value embed_dim_to_check num_heads")
    width, length = query[-1], call.output_elements // query[-1]
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
    name="attention", functions=("scaled_dot_product_attention", "multi_head_attention_forward"), facts=facts
)
