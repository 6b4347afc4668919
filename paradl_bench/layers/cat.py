"""Concatenation and stacking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, nothing_saved
from paradl_bench.spec.network import Attribute


def facts(call: Call) -> Facts:
    """Moves data, computes nothing."""
    given = call.bind("tensors dim")
    return Facts({"function": call.function, "dim": int(given.get("dim", given.get("axis", 0)))})


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``torch.cat`` or ``torch.stack``."""
    import torch

    function: Any = torch.stack if attributes["function"] == "stack" else torch.cat
    return lambda inputs, parameters: function(inputs, attributes["dim"])


def by_position(attributes: Mapping[str, Attribute]) -> bool:
    """Concatenation along channels is; along positions, or stacking, is not."""
    return attributes["dim"] == 1 and attributes["function"] != "stack"


KIND = LayerKind(
    name="cat",
    functions=("cat", "concat", "stack"),
    facts=facts,
    build=build,
    by_position=by_position,
    saves=nothing_saved,
    passes_gradient=lambda layer: True,
)
