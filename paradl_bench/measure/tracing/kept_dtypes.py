"""Layers that compute in fp32 whatever the model's weights are, as norms that convert what they read.

A trace in fp32 sees that ``x.to(dtype)`` did nothing. It does not see whether fp32 or another tensor's dtype was meant.
So forward runs once more without memory, with weights and input in bf16, and products in bf16 as under autocast. What
is fp32 then, the model wants in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from paradl_bench.measure.tracing.layouts import FAILS_WITHOUT_VALUES, tensor_leaves
from paradl_bench.network.graph import RETURNS_INPUT, Layer
from paradl_bench.network.kinds.autocast import KEEPS_FP32, READS_LOWER
from paradl_bench.network.kinds.kind import kind_of_function
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.strategies.running.autocast import CONVERSIONS
from paradl_bench.strategies.running.operations import function_name, is_operation, output_of, shaped


class _Dtypes(TorchFunctionMode):
    """Notes the name of each operation, the dtype of what it returned first, and whether it was given bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.dtype, bool]] = []
        self._kinds = kind_of_function()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function_name(function)[0], kwargs or {}
        kind = self._kinds.get(name)
        if kind is not None and kind.autocast({"function": name}, "cpu") == "lower":
            args, kwargs = tree_map_only(torch.Tensor, _lowered, (args, kwargs))
        result = shaped(function)(*args, **kwargs)
        if is_operation(function, result):
            first = tensor_leaves(output_of(function, args, result))[0]
            lower = any(tensor.dtype == torch.bfloat16 for tensor in tensor_leaves((args, kwargs)))
            self.made.append((name, first.dtype, lower))
        return result


def _lowered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def with_kept_dtypes(
    layers: tuple[Layer, ...], functions: Sequence[str], model: LoadedModel, inputs: torch.Tensor
) -> tuple[Layer, ...]:
    """Layers that say whether they compute in fp32 whatever they are given.

    They come back as they are where a forward in bf16 fails, or calls other operations. It may convert to bf16 where
    one in fp32 converts nothing: a norm that computes in fp32 gives back the dtype of its weight.

    Args:
        functions: that the layers were traced from. model: one that has not run, and is changed.
    """
    if not any(layer.attributes.get(RETURNS_INPUT) for layer in layers):
        # A model that converts nothing in vain converts nothing to fp32.
        return layers
    mode, module = _Dtypes(), model.module.to(torch.bfloat16)
    lowered = _lowered(inputs)
    try:
        with torch.no_grad(), mode:
            module(lowered)
    except FAILS_WITHOUT_VALUES:
        return layers
    told, place = list(layers), 0
    # Layers of the loss are not among these.
    for name, dtype, lower in mode.made:
        if place == len(functions) or name != functions[place]:
            if name in CONVERSIONS and dtype == torch.bfloat16:
                continue
            return layers
        layer = layers[place]
        if dtype == torch.float32 and layer.dtype == "fp32" and not layer.attributes.get(RETURNS_INPUT):
            kept = {KEEPS_FP32: True} | ({READS_LOWER: True} if lower else {})
            told[place] = msgspec.structs.replace(layer, attributes=layer.attributes | kept)
        place += 1
    return tuple(told)
