"""Matrix products of two activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, inputs_saved
from paradl_bench.spec.network import Attribute


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the inner dim; two such products backward."""
    inner = call.tensors[0].shape[-1]
    flops = 2 * inner * call.output_elements
    return Facts({"function": call.function}, fw_flops=flops, bw_input_flops=2 * flops)


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``torch.matmul``."""
    import torch

    return lambda inputs, parameters: torch.matmul(*inputs, *parameters)


KIND = LayerKind(name="matmul", functions=("matmul", "bmm", "mm"), facts=facts, build=build, saves=inputs_saved)
