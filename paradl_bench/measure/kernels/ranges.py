"""Ranges that sweeps draw kernels from: those of KernelMLP's Table 3, drawn evenly in the logarithm of each size.

Table 3 takes every combination of a few values; a sweep takes few combinations of many values, and also what lies
between and beside them: batches below 16, as a rank's share of a mini-batch has, and channels that are no power of 2.
A point of the unit cube gives one kernel, or none where the window is larger than what it slides over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paradl_bench.network.graph import DTYPE_BYTES

Point = Sequence[float]


class Drawn(NamedTuple):
    """Sizes and settings as :mod:`paradl_bench.network.kinds.kernel_shape` names them."""

    sizes: dict[str, int]
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class KernelRange:
    """How one kind is drawn, from so many coordinates of the unit cube, for its part (``weight``) of a sweep's time.

    ``most`` bounds its kernels in one sweep; more would teach little.
    """

    kind: str
    coordinates: int
    draw: Callable[[Point, str], Drawn | None]
    weight: float
    most: int


BATCH = (1, 256)
CHANNELS = (3, 512)
EXTENT = (8, 224)
KERNELS = (1, 3, 5, 7, 9)
STRIDES = (1, 2, 4)
FEATURES = (16, 1_280_000)
ROWS = (1, 8192)
_ODD_COLUMNS = 0.15
"""Part of the linear layers whose columns are no multiple of a vector's length."""


def log_whole(unit: float, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, even in its logarithm."""
    return min(high, max(low, round(low * math.exp(unit * math.log(high / low)))))


def channel_count(unit: float, low: int, high: int) -> int:
    """As :func:`log_whole`, in steps that networks have: of 8 from 8 on, of 16 from 64 on, of 32 from 256 on."""
    number = log_whole(unit, low, high)
    step = 1 if number < 8 else 8 if number < 64 else 16 if number < 256 else 32
    return min(high, round(number / step) * step)


def chosen(unit: float, choices: Sequence[tuple[str, float]]) -> str:
    """One of the choices, each as often as its weight says."""
    mark = unit * sum(weight for _, weight in choices)
    for choice, weight in choices:
        mark -= weight
        if mark < 0:
            return choice
    return choices[-1][0]


def _one_of(unit: float, values: Sequence[int]) -> int:
    return values[min(len(values) - 1, int(unit * len(values)))]


def _window(point: Point, kernels: Sequence[int]) -> dict[str, int] | None:
    """Extents and window of two dims from five coordinates: square windows, on rectangles as shards are."""
    height = log_whole(point[0], *EXTENT)
    # Whole images are square; a block of rows that a rank has is wider than high.
    width = height if point[1] < 0.75 else min(EXTENT[1], height * (2 if point[1] < 0.9 else 4))
    kernel, stride = _one_of(point[2], kernels), _one_of(point[3], STRIDES)
    padding = kernel // 2 if point[4] < 0.7 else 0
    sizes = {"in_depth": 1, "in_height": height, "in_width": width}
    for name, value, missing in (
        ("kernel", kernel, 1),
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", 1, 1),
    ):
        sizes |= {f"{name}_depth": missing, f"{name}_height": value, f"{name}_width": value}
    sizes["out_depth"] = 1
    for dim in ("height", "width"):
        room = sizes[f"in_{dim}"] + 2 * padding - kernel
        if room < 0:
            return None
        sizes[f"out_{dim}"] = room // stride + 1
    return sizes


def _conv(point: Point, dtype: str) -> Drawn | None:
    window = _window(point[3:8], KERNELS)
    if window is None:
        return None
    sizes = {
        "batch": log_whole(point[0], *BATCH),
        "in_channels": channel_count(point[1], *CHANNELS),
        "out_channels": channel_count(point[2], *CHANNELS),
        "groups": 1,
        **window,
        "bias": int(point[8] < 0.5),
    }
    return Drawn(sizes, {"function": "conv2d"})


def _linear(point: Point, dtype: str) -> Drawn:
    # Vocabularies are odd: with 50,257 columns an H200 took 8 times as long in bf16 as by regressors of even columns.
    columns = log_whole if point[4] < _ODD_COLUMNS else channel_count
    sizes = {
        "batch": log_whole(point[0], *ROWS),
        "in_features": channel_count(point[1], *FEATURES),
        "out_features": columns(point[2], *FEATURES),
        "bias": int(point[3] < 0.7),
    }
    return Drawn(sizes, {"function": "linear"})


def _batch_norm(point: Point, dtype: str) -> Drawn | None:
    batch, positions = log_whole(point[0], *BATCH), log_whole(point[2], 1, EXTENT[1]) ** 2
    if batch * positions == 1:
        return None  # one value a channel has no variance
    sizes = {"batch": batch, "channels": channel_count(point[1], 3, 2048), "positions": positions}
    return Drawn({**sizes, "affine": 1, "training": 1, "running": 1}, {"function": "batch_norm"})


def _norm(point: Point, dtype: str) -> Drawn:
    sizes = {"batch": log_whole(point[0], 1, 16384), "channels": channel_count(point[1], 32, 8192)}
    return Drawn({**sizes, "positions": 1, "groups": 1, "affine": 1}, {"function": "layer_norm"})


def _pool(point: Point, dtype: str) -> Drawn | None:
    window = _window(point[2:7], (2, *KERNELS[1:]))
    # torch pads a pooling window by at most its half.
    if window is None or window["padding_height"] > window["kernel_height"] // 2:
        return None
    sizes = {"batch": log_whole(point[0], *BATCH), "channels": channel_count(point[1], *CHANNELS)}
    function = chosen(point[7], (("max_pool2d", 1), ("avg_pool2d", 1)))
    return Drawn({**sizes, **window, "ceil_mode": 0}, {"function": function})


_ACTIVATIONS = (("relu", 4), ("gelu", 2), ("silu", 1), ("sigmoid", 1), ("tanh", 1), ("hardswish", 1), ("relu6", 1))
_IN_PLACE = ("relu", "silu", "hardswish", "relu6")


def _activation(point: Point, dtype: str) -> Drawn:
    elements = channel_count(point[1], *CHANNELS) * log_whole(point[2], 1, EXTENT[1]) ** 2
    function = chosen(point[3], _ACTIVATIONS)
    in_place = int(function in _IN_PLACE and point[4] < 0.5)
    sizes = {"batch": log_whole(point[0], *BATCH), "elements": elements, "in_place": in_place}
    return Drawn(sizes, {"function": function})


def _softmax(point: Point, dtype: str) -> Drawn:
    sizes = {"batch": log_whole(point[0], 1, 65536), "width": log_whole(point[1], 8, 65536), "inner": 1}
    return Drawn(sizes, {"function": chosen(point[2], (("softmax", 3), ("log_softmax", 1)))})


def _elementwise(point: Point, dtype: str) -> Drawn:
    elements = channel_count(point[1], *CHANNELS) * log_whole(point[2], 1, EXTENT[1]) ** 2
    sizes = {"batch": log_whole(point[0], *BATCH), "elements": elements, "smaller_elements": elements, "tensors": 2}
    return Drawn({**sizes, "in_place": 0}, {"function": chosen(point[3], (("add", 2), ("mul", 1)))})


def _optimizer(point: Point, dtype: str) -> Drawn | None:
    elements, tensors = log_whole(point[0], 1000, 200_000_000), log_whole(point[1], 1, 256)
    if elements < 8 * tensors:
        return None
    return Drawn({"elements": elements, "tensors": tensors}, {"function": chosen(point[2], (("sgd", 1), ("adam", 1)))})


def _copy(point: Point, dtype: str) -> Drawn | None:
    tensors = log_whole(point[1], 1, 256)
    elements = math.floor(log_whole(point[0], 1024, 2**30) / (DTYPE_BYTES[dtype] * tensors))
    if not elements:
        return None
    return Drawn({"bytes": elements * DTYPE_BYTES[dtype] * tensors, "tensors": tensors}, {})


RANGES = {
    entry.kind: entry
    for entry in (
        KernelRange("conv", 9, _conv, 9.0, 6000),
        KernelRange("linear", 5, _linear, 5.0, 3000),
        KernelRange("batch_norm", 3, _batch_norm, 1.0, 600),
        KernelRange("norm", 2, _norm, 1.0, 600),
        KernelRange("pool", 8, _pool, 1.5, 900),
        KernelRange("activation", 5, _activation, 1.0, 900),
        KernelRange("softmax", 3, _softmax, 1.0, 600),
        KernelRange("elementwise", 4, _elementwise, 1.0, 600),
        KernelRange("optimizer", 3, _optimizer, 1.0, 400),
        KernelRange("copy", 2, _copy, 0.5, 300),
    )
}
"""By kind; ``elementwise`` is no kernel of the paper's, and swept where asked for."""

PAPER_KINDS = tuple(kind for kind in RANGES if kind != "elementwise")
