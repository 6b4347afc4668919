"""Batch normalisation in training mode, with running statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, Saved, always
from paradl_bench.spec.network import Attribute, Layer


def facts(call: Call) -> Facts:
    """FLOPs an element: 7 forward (mean 1, variance 3, normalise and scale 3), 11 backward, from the formulas."""
    given = call.bind("input running_mean running_var weight bias training momentum eps")
    return Facts(
        {
            "affine": given.get("weight") is not None,
            "training": bool(given.get("training", False)),
            "running": given.get("running_mean") is not None,
        },
        fw_flops=7 * call.output_elements,
        bw_input_flops=8 * call.output_elements,
        bw_weight_flops=3 * call.output_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``torch.nn.functional.batch_norm`` over fresh running statistics."""
    import torch
    import torch.nn.functional as F

    state: dict[int, tuple[Any, Any]] = {}

    def run(inputs: list[Any], parameters: list[Any]) -> Any:
        channels = inputs[0].shape[1]
        if attributes["running"] and channels not in state:
            state[channels] = (
                torch.zeros(channels, device=inputs[0].device),
                torch.ones(channels, device=inputs[0].device),
            )
        mean, variance = state.get(channels, (None, None))
        weight, bias = parameters if attributes["affine"] else (None, None)
        return F.batch_norm(inputs[0], mean, variance, weight, bias, bool(attributes["training"]))

    return run


def saves(layer: Layer) -> Saved:
    """Inputs, and mean and deviation of each channel."""
    return Saved(inputs=True, statistics=2 * layer.output_shape[0])


KIND = LayerKind(
    name="batch_norm",
    functions=("batch_norm",),
    facts=facts,
    build=build,
    by_position=always,
    by_channel=always,
    saves=saves,
)
