"""Convolution over 1, 2 or 3 dims, with bias or without; groups, stride, padding and dilation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import COUNT, COUNTS, FLAG, PADDING, or_default
from paradl_bench.network.kinds.kind import (
    Call,
    Facts,
    LayerKind,
    Operands,
    TensorArgument,
    as_tuple,
    inputs_saved,
    windows_of,
)
from paradl_bench.network.kinds.operand_sizes import spatial_of, window_sizes


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the kernel's window and its group's channels; bias is 1 more.

    Input gradient and weight gradient each cost as many multiply-adds as forward.
    """
    given = call.bind("input weight bias stride padding dilation groups")
    out_channels, group_channels, *kernel = given["weight"].shape
    dims = len(kernel)
    padding = given.get("padding", 0)
    per_output = 2 * group_channels * math.prod(kernel)
    bias = given.get("bias") is not None
    multiply_adds = per_output * call.output_elements
    return Facts(
        {
            "kernel": tuple(kernel),
            "stride": as_tuple(given.get("stride", 1), dims),
            "padding": padding if isinstance(padding, str) else as_tuple(padding, dims),
            "dilation": as_tuple(given.get("dilation", 1), dims),
            "groups": int(given.get("groups", 1)),
            "out_channels": out_channels,
            "bias": bias,
        },
        fw_flops=multiply_adds + bias * call.output_elements,
        bw_input_flops=multiply_adds,
        bw_weight_flops=multiply_adds + bias * call.output_elements,
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    import torch.nn.functional as F

    kernel = attributes["kernel"]
    assert isinstance(kernel, tuple)
    function: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
    settings = {name: attributes[name] for name in ("stride", "padding", "dilation", "groups")}
    return lambda inputs, parameters: function(
        inputs[0], parameters[0], parameters[1] if len(parameters) > 1 else None, **settings
    )


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch, channels, groups, windows and extents; convolutions of 1 and 2 dims have the others' extents at 1."""
    windows = window_sizes(layer)
    if windows is None:
        return None
    in_channels, out_channels = layer.input_shapes[0][0], layer.output_shape[0]
    groups, bias = layer.attributes.get("groups", 1), layer.attributes.get("bias", len(layer.parameters) > 1)
    kernel = layer.attributes["kernel"]
    assert isinstance(kernel, tuple)
    assert isinstance(groups, int)
    sizes = {"batch": batch, "in_channels": in_channels, "out_channels": out_channels, "groups": groups, **windows}
    return Operands(
        {**sizes, "bias": int(bool(bias))},
        {"function": f"conv{len(kernel)}d"},
        out_channels * (in_channels // groups * math.prod(kernel) + bool(bias)),
    )


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    dims = int(settings["function"][-2])
    batch, out_channels, groups = (sizes[name] for name in ("batch", "out_channels", "groups"))
    weight = (out_channels, sizes["in_channels"] // groups, *spatial_of("kernel", sizes, dims))
    given = {name: spatial_of(name, sizes, dims) for name in ("stride", "padding", "dilation")}
    bias = {"bias": TensorArgument((out_channels,), "bias")} if sizes["bias"] else {}
    inputs = TensorArgument((batch, sizes["in_channels"], *spatial_of("in", sizes, dims)))
    return Call(
        settings["function"],
        (inputs, TensorArgument(weight, "weight")),
        {**bias, **given, "groups": groups},
        ((batch, out_channels, *spatial_of("out", sizes, dims)),),
        batch,
    )


KIND = LayerKind(
    name="conv",
    functions=("conv1d", "conv2d", "conv3d"),
    facts=facts,
    reads_dims=1,
    attributes={
        "kernel": COUNTS,
        "stride": or_default(COUNTS),
        "padding": or_default(PADDING),
        "dilation": or_default(COUNTS),
        "groups": or_default(COUNT),
        "out_channels": or_default(COUNT),
        "bias": or_default(FLAG),
    },
    build=_build,
    splits_backward=True,
    windows=windows_of,
    saves=inputs_saved,
    operands=operands,
    autocast=lambda attributes, device: "lower",
    call=_call,
)
