"""Softmax and log-softmax over one dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, output_saved
from paradl_bench.spec.network import Attribute


def facts(call: Call) -> Facts:
    """FLOPs an element: 4 forward (maximum, subtract and exponentiate, sum, divide), 4 backward."""
    given = call.bind("input dim")
    return Facts(
        {"function": call.function, "dim": int(given.get("dim", -1))},
        fw_flops=4 * call.output_elements,
        bw_input_flops=4 * call.output_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``softmax`` or ``log_softmax``."""
    import torch.nn.functional as F

    function: Any = getattr(F, str(attributes["function"]))
    return lambda inputs, parameters: function(inputs[0], dim=attributes["dim"])


KIND = LayerKind(name="softmax", functions=("softmax", "log_softmax"), facts=facts, build=build, saves=output_saved)
