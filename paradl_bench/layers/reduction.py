"""Sums, means and extrema, over all or some dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, nothing_saved
from paradl_bench.spec.network import Attribute


def facts(call: Call) -> Facts:
    """FLOPs: 1 an input element forward; backward spreads the gradient over as many."""
    given = call.bind("input dim keepdim")
    dim = given.get("dim")
    return Facts(
        {
            "function": call.function,
            "dim": tuple(dim) if isinstance(dim, (tuple, list)) else dim if isinstance(dim, int) else None,
            "keepdim": bool(given.get("keepdim", False)),
        },
        fw_flops=call.input_elements,
        bw_input_flops=call.input_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """The function of torch, over the same dims."""
    import torch

    function: Any = getattr(torch, str(attributes["function"]))
    dim, keepdim = attributes["dim"], bool(attributes["keepdim"])
    if dim is None:
        return lambda inputs, parameters: function(inputs[0])
    return lambda inputs, parameters: function(inputs[0], dim, keepdim=keepdim)


KIND = LayerKind(name="reduction", functions=("mean", "sum"), facts=facts, build=build, saves=nothing_saved)
