"""Max and average pooling over windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import COUNTS, FLAG, PADDING, TEXT
from paradl_bench.network.kinds.kind import (
    Call,
    Facts,
    LayerKind,
    Operands,
    Saved,
    TensorArgument,
    as_tuple,
    windows_of,
)
from paradl_bench.network.kinds.operand_sizes import spatial_of, volumes_in_fp32_on_a_cpu, window_sizes


def facts(call: Call) -> Facts:
    """FLOPs: one an element of the window forward; backward one an output (max) or a window element (average)."""
    dims = int(call.function[-2])
    maximum = call.function.startswith("max")
    names = "input kernel_size stride padding " + ("dilation ceil_mode" if maximum else "ceil_mode count_include_pad")
    given = call.bind(names)
    kernel = as_tuple(given["kernel_size"], dims)
    stride = given.get("stride") or kernel
    window = math.prod(kernel)
    return Facts(
        {
            "function": call.function,
            "kernel": kernel,
            "stride": as_tuple(stride, dims),
            "padding": as_tuple(given.get("padding", 0), dims),
            "dilation": as_tuple(given.get("dilation", 1), dims),
            "ceil_mode": bool(given.get("ceil_mode", False)),
        },
        fw_flops=window * call.output_elements,
        bw_input_flops=call.output_elements * (1 if maximum else window),
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    import torch.nn.functional as F

    name = str(attributes["function"])
    function: Any = getattr(F, name)
    settings = {key: attributes[key] for key in ("stride", "padding", "ceil_mode")}
    if name.startswith("max"):
        settings["dilation"] = attributes["dilation"]
    return lambda inputs, parameters: function(inputs[0], attributes["kernel"], **settings)


def fill(attributes: Mapping[str, Attribute]) -> float:
    """Padding never is a maximum; to an average it adds nothing."""
    return -math.inf if str(attributes["function"]).startswith("max") else 0.0


def saves(layer: Layer) -> Saved:
    """Both keep inputs (an average reads their shape alone); a maximum where it was found as well."""
    maximum = str(layer.attributes["function"]).startswith("max")
    return Saved(inputs=True, indices=layer.output_elements if maximum else 0)


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch, channels, windows and extents."""
    windows = window_sizes(layer)
    if windows is None:
        return None
    sizes = {"batch": batch, "channels": layer.output_shape[0], **windows}
    return Operands(
        {**sizes, "ceil_mode": int(bool(layer.attributes["ceil_mode"]))},
        {"function": str(layer.attributes["function"])},
    )


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    function = settings["function"]
    dims = int(function[-2])
    names = ("stride", "padding", *(("dilation",) if function.startswith("max") else ()))
    given = {name: spatial_of(name, sizes, dims) for name in names}
    of_samples = (sizes["batch"], sizes["channels"])
    return Call(
        function,
        (TensorArgument((*of_samples, *spatial_of("in", sizes, dims))), spatial_of("kernel", sizes, dims)),
        {**given, "ceil_mode": bool(sizes["ceil_mode"])},
        ((*of_samples, *spatial_of("out", sizes, dims)),),
        sizes["batch"],
    )


KIND = LayerKind(
    name="pool",
    functions=("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    facts=facts,
    reads_dims=1,
    attributes={
        "function": TEXT,
        "kernel": COUNTS,
        "stride": COUNTS,
        "padding": PADDING,
        "dilation": COUNTS,
        "ceil_mode": FLAG,
    },
    build=_build,
    by_channel=lambda attributes: True,
    windows=windows_of,
    fill=fill,
    saves=saves,
    operands=operands,
    autocast=volumes_in_fp32_on_a_cpu,
    call=_call,
)
