"""Batch normalisation in training mode, with running statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import FLAG
from paradl_bench.network.kinds.kind import BUFFER, Call, Facts, LayerKind, Operands, Saved, TensorArgument


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


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``torch.nn.functional.batch_norm`` over fresh running statistics."""
    import torch
    import torch.nn.functional as F

    state: dict[int, tuple[Any, Any]] = {}

    def run(inputs: list[Any], parameters: list[Any]) -> Any:
        channels = inputs[0].shape[1]
        if attributes["running"] and channels not in state:
            made = {"device": inputs[0].device, "dtype": inputs[0].dtype}
            state[channels] = (torch.zeros(channels, **made), torch.ones(channels, **made))
        mean, variance = state.get(channels, (None, None))
        weight, bias = parameters if attributes["affine"] else (None, None)
        return F.batch_norm(inputs[0], mean, variance, weight, bias, bool(attributes["training"]))

    return run


def saves(layer: Layer) -> Saved:
    """Inputs, and mean and deviation of each channel."""
    return Saved(inputs=True, statistics=2 * layer.output_shape[0])


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch, channels and positions."""
    channels, *positions = layer.output_shape
    settings = {name: int(bool(layer.attributes[name])) for name in ("affine", "training", "running")}
    sizes = {"batch": batch, "channels": channels, "positions": math.prod(positions), **settings}
    return Operands(sizes, {"function": "batch_norm"}, 2 * channels * settings["affine"])


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    batch, channels, positions = (sizes[name] for name in ("batch", "channels", "positions"))
    shape = (batch, channels, positions)
    buffers = (f"{BUFFER}mean", f"{BUFFER}variance") if sizes["running"] else ()
    parameters = ("weight", "bias") if sizes["affine"] else ()
    running = tuple(TensorArgument((channels,), name) for name in buffers) or (None, None)
    trained = tuple(TensorArgument((channels,), name) for name in parameters) or (None, None)
    arguments = (TensorArgument(shape), *running, *trained, bool(sizes["training"]))
    return Call("batch_norm", arguments, {}, (shape,), batch)


KIND = LayerKind(
    name="batch_norm",
    functions=("batch_norm",),
    facts=facts,
    reads_dims=1,
    attributes={"affine": FLAG, "training": FLAG, "running": FLAG},
    build=_build,
    by_position=lambda attributes: True,
    by_channel=lambda attributes: True,
    saves=saves,
    operands=operands,
    # Statistics and parameters stay fp32.
    autocast=lambda attributes, device: "input",
    call=_call,
)
