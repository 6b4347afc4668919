"""Matrix products of groups of rows, each group with a weight of its own: experts of a mixture."""

from __future__ import annotations

from collections.abc import Mapping

from paradl_bench.network.graph import Layer
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, TensorArgument, inputs_saved


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the inner dim, whichever group a row is of; as many a gradient."""
    weight = call.tensors[1]
    products = 2 * weight.shape[-2] * call.output_elements
    return Facts(
        {"groups": weight.shape[0], "out_features": weight.shape[-1]},
        fw_flops=products,
        bw_input_flops=products,
        bw_weight_flops=products,
    )


def operands(layer: Layer, batch: int) -> Operands | None:
    """``batch`` is the rows of all groups; how they are shared out is not described. None without weights to train."""
    groups, out_features = layer.attributes.get("groups"), layer.attributes.get("out_features")
    if not isinstance(groups, int) or not isinstance(out_features, int):
        return None
    if len(layer.parameters) != 1 or len(layer.input_shapes[0]) != 1:
        return None
    (in_features,) = layer.input_shapes[0]
    sizes = {"batch": batch, "groups": groups, "in_features": in_features, "out_features": out_features}
    return Operands(sizes, {"function": "grouped_mm"}, groups * in_features * out_features)


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    batch, groups, in_features, out_features = (
        sizes[name] for name in ("batch", "groups", "in_features", "out_features")
    )
    weight = TensorArgument((groups, in_features, out_features), "weight")
    return Call("grouped_mm", (TensorArgument((batch, in_features)), weight), {}, ((batch, out_features),), batch)


KIND = LayerKind(
    name="grouped_matmul",
    functions=("grouped_mm", "_grouped_mm"),
    facts=facts,
    splits_backward=True,
    saves=inputs_saved,
    operands=operands,
    autocast=lambda attributes, device: "lower",
    call=_call,
)
