"""Matrix products of two activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, TensorArgument, inputs_saved


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the inner dim; two such products backward."""
    inner = call.tensors[0].shape[-1]
    flops = 2 * inner * call.output_elements
    return Facts({"function": call.function}, fw_flops=flops, bw_input_flops=2 * flops)


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    import torch

    return lambda inputs, parameters: torch.matmul(*inputs, *parameters)


def operands(layer: Layer, batch: int) -> Operands | None:
    """``batch`` is the products made at once (samples times heads); None where one of the two is shared by several."""
    if len(layer.input_shapes) != 2 or layer.batchless_inputs or layer.parameters:
        return None
    first, second = layer.input_shapes
    if min(len(first), len(second)) < 2 or first[:-2] != second[:-2]:
        return None
    sizes = {"batch": batch * math.prod(first[:-2]), "rows": first[-2], "inner": first[-1], "columns": second[-1]}
    return Operands(sizes, {"function": "matmul"})


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    batch, rows, inner, columns = (sizes[name] for name in ("batch", "rows", "inner", "columns"))
    factors = TensorArgument((batch, rows, inner)), TensorArgument((batch, inner, columns))
    return Call("matmul", factors, {}, ((batch, rows, columns),), batch)


KIND = LayerKind(
    name="matmul",
    functions=("matmul", "bmm", "mm"),
    facts=facts,
    build=_build,
    saves=inputs_saved,
    operands=operands,
    autocast=lambda attributes, device: "lower",
    call=_call,
)
