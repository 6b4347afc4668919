"""Products of groups of rows with a matrix each, as of tokens with the weights of the expert that they are sent to."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paradl_bench.network.graph import Layer
from paradl_bench.network.kinds.attributes import TEXT
from paradl_bench.network.kinds.kind import (
    Call,
    Facts,
    LayerKind,
    Operands,
    TensorArgument,
    inputs_saved,
    per_sample,
)


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the inner dim, whichever matrix a row meets; as many a gradient.

    Bytes are those of the rows, read and written. The matrices are read as often for any batch: they count where their
    parameter is read.
    """
    rows, weight = call.tensors[0].shape, call.tensors[1]
    products = 2 * rows[-1] * call.output_elements
    # Matrices that were computed, as a view of a parameter is, are an input too.
    of_inputs = products if weight.parameter else 2 * products
    return Facts(
        {"function": "grouped_mm", "groups": weight.shape[0], "out_features": weight.shape[-1]},
        fw_flops=products,
        bw_input_flops=of_inputs,
        bw_weight_flops=products if weight.parameter else 0,
        moved_elements=math.prod(per_sample(rows, call.batch)) + call.output_elements,
    )


def operands(layer: Layer, batch: int) -> Operands | None:
    """``batch`` is the rows of all groups; how they are shared out is not described. None without weights to train."""
    groups, out_features = layer.attributes.get("groups"), layer.attributes.get("out_features")
    if not isinstance(groups, int) or not isinstance(out_features, int):
        return None
    if len(layer.parameters) != 1:
        return None
    # A sample has one row, or those of its tokens.
    *rows, in_features = layer.input_shapes[0]
    sizes = {
        "batch": batch * math.prod(rows),
        "groups": groups,
        "in_features": in_features,
        "out_features": out_features,
    }
    return Operands(sizes, {"function": "grouped_mm"}, groups * in_features * out_features)


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    batch, groups, in_features, out_features = (
        sizes[name] for name in ("batch", "groups", "in_features", "out_features")
    )
    weight = TensorArgument((groups, in_features, out_features), "weight")
    return Call("grouped_mm", (TensorArgument((batch, in_features)), weight), {}, ((batch, out_features),), batch)


KIND = LayerKind(
    name="grouped_matmul",
    functions=("grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
    facts=facts,
    attributes={"function": TEXT},
    splits_backward=True,
    saves=inputs_saved,
    operands=operands,
    # Autocast converts nothing of it.
    autocast=lambda attributes, device: "input",
    call=_call,
)
