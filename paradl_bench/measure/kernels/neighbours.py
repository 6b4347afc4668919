"""Kernels of given models: their layers' distinct shapes, what shards of them are, and shapes near those.

First come the shapes as they are, then halves and quarters along each size that a strategy shares out (filters,
channels, rows, batch), then shapes within a factor of two in every size, in turn round the models' own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.measure.kernels.design import SweptKernel, sobol_points
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kinds.kernel_shape import kernel_shape

OPTIMIZERS = ("sgd", "adam")
SHARDS = (2, 4)
# What strategies share out.
_SHARED = (
    "batch", "out_channels", "in_channels", "channels", "out_features", "in_features", "in_height", "positions",
    "elements", "heads",
)  # fmt: skip
# What neighbours differ in besides.
_NEAR = (*_SHARED, "in_width", "in_depth", "rows", "columns", "inner", "width", "queries", "keys", "bytes")
_DIMS = ("depth", "height", "width")
_WITHIN = 2.0


class Asked(NamedTuple):
    """What is asked for of the models; batches are local ones."""

    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]


def kernels_of_models(networks: Sequence[ModelGraph], asked: Asked, *, seed: int = 0) -> Iterator[SweptKernel]:
    """Kernels of networks, then of their shards, then near them, without end; some come more than once."""
    whole = [
        kernel
        for network in networks
        for dtype in asked.dtypes
        for batch in asked.batches
        for kernel in kernels_of(network, batch, dtype, asked)
    ]
    whole = list({kernel.key: kernel for kernel in whole}.values())
    yield from whole
    for parts in SHARDS:
        for kernel in whole:
            yield from shards_of(kernel, parts)
    if whole:
        yield from _near(whole, seed)


def kernels_of(network: ModelGraph, batch: int, dtype: str, asked: Asked) -> Iterator[SweptKernel]:
    """What a network's layers run on a local batch, its optimizer's step and a copy of its parameters."""

    def kernel(kind: str, sizes: dict[str, int], settings: dict[str, str]) -> SweptKernel:
        return SweptKernel(kind=kind, sizes=sizes, settings=settings, dtype=dtype, origin=network.name)

    for layer in network.layers:
        shape = kernel_shape(layer, "FW", batch, dtype) if layer.kind in asked.kinds and layer.kind != "copy" else None
        if shape is not None and layer.input_shapes:
            yield kernel(shape.kind, shape.sizes, shape.settings)
    tensors, elements = len(network.parameters), network.parameter_elements
    for function in OPTIMIZERS if "optimizer" in asked.kinds and elements else ():
        yield kernel("optimizer", {"elements": elements, "tensors": tensors}, {"function": function})
    if "copy" in asked.kinds and elements:
        yield kernel("copy", {"bytes": elements * DTYPE_BYTES[dtype], "tensors": tensors}, {})


def shards_of(kernel: SweptKernel, parts: int) -> Iterator[SweptKernel]:
    """One of ``parts`` ranks' shares along each size that can be shared out."""
    for name in _SHARED:
        if kernel.sizes.get(name, 0) >= parts:
            sizes = rescaled(kernel.kind, kernel.sizes, {name: 1 / parts})
            if sizes is not None:
                origin = f"{kernel.origin}, {name} over {parts}"
                yield msgspec.structs.replace(kernel, sizes=sizes, origin=origin)


def _near(whole: Sequence[SweptKernel], seed: int) -> Iterator[SweptKernel]:
    for index, point in enumerate(sobol_points(len(_NEAR), seed)):
        kernel = whole[index % len(whole)]
        factors = {name: _WITHIN ** (2 * unit - 1) for name, unit in zip(_NEAR, point, strict=True)}
        sizes = rescaled(kernel.kind, kernel.sizes, factors)
        if sizes is not None:
            yield msgspec.structs.replace(kernel, sizes=sizes, origin=f"near {kernel.origin}")


def rescaled(kind: str, sizes: Mapping[str, int], factors: Mapping[str, float]) -> dict[str, int] | None:
    """Sizes times factors, kept whole and such that the kernel exists; None where it can't.

    Outputs follow from inputs and window; sizes of 1 (a dim that is not there, say) stay.
    """
    scaled = {
        name: max(1, round(value * factors.get(name, 1.0))) if value > 1 else value for name, value in sizes.items()
    }
    if sizes.get("groups", 1) > 1:
        scaled |= _grouped(kind, sizes, factors)
    if "smaller_elements" in sizes:
        scaled["smaller_elements"] = max(1, scaled["elements"] * sizes["smaller_elements"] // sizes["elements"])
        scaled["elements"] = scaled["smaller_elements"] * (sizes["elements"] // sizes["smaller_elements"])
    if kind == "copy":
        # Whole numbers of 8 bytes in every tensor.
        scaled["bytes"] = max(1, scaled["bytes"] // (8 * scaled["tensors"])) * 8 * scaled["tensors"]
    if "kernel_width" in sizes:
        return _slid(scaled)
    if kind == "adaptive_pool" and any(scaled[f"in_{dim}"] < scaled[f"out_{dim}"] for dim in _DIMS):
        return None
    return scaled


def _grouped(kind: str, sizes: Mapping[str, int], factors: Mapping[str, float]) -> dict[str, int]:
    """Channels of grouped kernels: groups stay as wide as they are, and change in number."""
    groups = sizes["groups"]
    scale = factors.get("in_channels", factors.get("out_channels", factors.get("channels", 1.0)))
    if kind == "norm":
        return {"groups": groups, "channels": max(1, round(sizes["channels"] * scale / groups)) * groups}
    number = max(1, round(groups * scale))
    return {"groups": number, **{n: sizes[n] // groups * number for n in ("in_channels", "out_channels")}}


def _slid(sizes: dict[str, int]) -> dict[str, int] | None:
    for dim in _DIMS:
        reach = sizes[f"dilation_{dim}"] * (sizes[f"kernel_{dim}"] - 1) + 1
        room = sizes[f"in_{dim}"] + 2 * sizes[f"padding_{dim}"] - reach
        if room < 0:
            return None
        stride = sizes[f"stride_{dim}"]
        steps = math.ceil(room / stride) if sizes.get("ceil_mode") else room // stride
        # torch leaves out a window that would begin behind the input and its padding.
        if sizes.get("ceil_mode") and steps * stride >= sizes[f"in_{dim}"] + sizes[f"padding_{dim}"]:
            steps -= 1
        sizes[f"out_{dim}"] = steps + 1
    return sizes
