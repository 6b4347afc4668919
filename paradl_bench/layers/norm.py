"""Layer, group, instance and local response normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, Saved
from paradl_bench.spec.network import Attribute, Layer


def facts(call: Call) -> Facts:
    """FLOPs an element: 7 forward, 11 backward, as batch normalisation."""
    given = call.bind("input size weight bias")
    size = given.get("normalized_shape", given.get("num_groups", given.get("size")))
    return Facts(
        {
            "function": call.function,
            "size": tuple(size) if isinstance(size, (list, tuple)) else size if isinstance(size, int) else None,
            "affine": any(tensor.parameter for tensor in call.tensors),
        },
        fw_flops=7 * call.output_elements,
        bw_input_flops=8 * call.output_elements,
        bw_weight_flops=3 * call.output_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``layer_norm`` or ``group_norm``."""
    import torch.nn.functional as F

    function: Any = getattr(F, str(attributes["function"]))
    return lambda inputs, parameters: function(inputs[0], attributes["size"], *parameters)


def saves(layer: Layer) -> Saved:
    """Inputs, with mean and deviation of each row or group; what local response normalisation keeps is not known."""
    function, size = layer.attributes["function"], layer.attributes["size"]
    if function == "group_norm":
        assert isinstance(size, int)
        return Saved(inputs=True, elements=2 * size)
    if function == "layer_norm":
        assert isinstance(size, tuple)
        return Saved(inputs=True, elements=2 * layer.input_elements // math.prod(size))
    return Saved(inputs=True, output=True)


KIND = LayerKind(
    name="norm",
    functions=("layer_norm", "group_norm", "instance_norm", "local_response_norm", "rms_norm"),
    facts=facts,
    build=build,
    saves=saves,
)
