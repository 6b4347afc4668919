"""What regressors of kernels read of a shape: sizes, work, and how well the work fills tiles.

KernelMLP reads the logarithm of the operand sizes and nothing else. Trees split on one number at a time, so they are
also given what decides a kernel's rate: FLOPs, bytes and their ratio (Williams et al. 2009), the matrix product that a
convolution or a linear layer comes down to, how full its tiles are (the last one of a row is padded), and by which
powers of two sizes can be divided (vector loads, tensor cores).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paradl_bench.core.statistics import Floats
from paradl_bench.network.kernel import KernelShape

_TILES = (32, 64, 128)
_TILE_PAIRS = ((64, 64), (128, 64), (64, 128), (128, 128), (128, 32), (256, 128), (128, 256))
_WINDOW_TILES = (2, 4, 6, 8, 16, 30)
_ALIGNMENTS = (2, 4, 8, 16, 32)


class Kernels(NamedTuple):
    """Shapes of one kind and stage as arrays of equal length."""

    sizes: dict[str, Floats]
    flops: Floats
    bytes: Floats


def kernels_of(shapes: Sequence[KernelShape]) -> Kernels:
    """Shapes as arrays; all have the names of the first."""
    names = shapes[0].sizes if shapes else ()
    return Kernels(
        {name: np.array([shape.sizes[name] for shape in shapes], float) for name in names},
        np.array([shape.flops for shape in shapes], float),
        np.array([shape.bytes for shape in shapes], float),
    )


def log_sizes(kernels: Kernels, names: Sequence[str]) -> Floats:
    """Columns of log(1 + size): the paper takes log, which sizes that may be 0 (padding) do not have."""
    return np.log1p(np.column_stack([kernels.sizes[name] for name in names]))


def log_sizes_and_flops(kernels: Kernels, names: Sequence[str]) -> Floats:
    """What untuned trees are given: sizes and FLOPs (bytes where there are none)."""
    work = np.where(kernels.flops > 0, kernels.flops, kernels.bytes)
    return np.column_stack([log_sizes(kernels, names), np.log1p(work)])


def roofline_features(kernels: Kernels, names: Sequence[str]) -> tuple[tuple[str, ...], Floats]:
    """Names and columns of everything that trees read; ``names`` are of sizes that differ: others teach nothing."""
    columns = {f"log {name}": np.log1p(kernels.sizes[name]) for name in names}
    columns["log flops"], columns["log bytes"] = np.log1p(kernels.flops), np.log1p(kernels.bytes)
    columns["log intensity"] = columns["log flops"] - columns["log bytes"]
    product = _matrix_product(kernels.sizes)
    for name, values in product.items():
        columns[f"log {name}"] = np.log1p(values)
    for one, other in (("rows", "columns"), ("rows", "depth"), ("columns", "depth")):
        if product:
            columns[f"log {one} {other}"] = columns[f"log {one}"] + columns[f"log {other}"]
    aligned = {name: kernels.sizes[name] for name in names if name not in ("batch", "bias")} | product
    for name, values in aligned.items():
        columns[f"alignment {name}"] = sum((values % by == 0).astype(float) for by in _ALIGNMENTS) + 0.0
        for tile in _TILES:
            columns[f"{name} in tiles of {tile}"] = values / (np.maximum(np.ceil(values / tile), 1) * tile)
    if product:
        for high, wide in _TILE_PAIRS:
            tiles = np.ceil(product["rows"] / high) * np.ceil(product["columns"] / wide)
            columns[f"log tiles {high}x{wide}"] = np.log1p(tiles)
    columns |= _windows(kernels.sizes)
    return tuple(columns), np.column_stack(list(columns.values()))


def process_features(kernels: Kernels, names: Sequence[str]) -> Floats:
    """What the Gaussian process reads: logs of sizes and work, and what makes a library take another way.

    Work is split into what is read, written and held in weights, since libraries bring each into a layout of their own.
    Channels are padded to vectors of 8 or 16 numbers there; a window that is no window, or moves by one, has kernels of
    its own; and torch on a CPU takes its own convolution in the place of oneDNN's where :func:`_torchs_own` says.
    """
    sizes = kernels.sizes
    columns = [np.log1p(sizes[name]) for name in names]
    columns += [np.log1p(kernels.flops), np.log1p(kernels.bytes), np.log1p(kernels.flops) - np.log1p(kernels.bytes)]
    product = _matrix_product(sizes)
    if "out_channels" in sizes and product:
        extents = _product([sizes[name] for name in sizes if name.startswith("in_") and name != "in_channels"])
        columns.append(np.log(sizes["batch"] * sizes["in_channels"] * extents))
        columns.append(np.log(product["rows"] * sizes["out_channels"]))
        columns.append(np.log(product["columns"] * product["depth"] * sizes["groups"]))
        for name in ("in_channels", "out_channels"):
            columns += [_padding(sizes[name], 8), *((sizes[name] % by == 0) + 0.0 for by in (8, 16))]
        columns.append(_padding(sizes["out_width"], 8))
        for name, one in (("kernel_height", 1), ("stride_height", 1), ("padding_height", 0), ("batch", 1)):
            columns.append((sizes[name] == one) + 0.0)
        columns.append(_torchs_own(sizes))
    elif product:
        columns += [
            np.log(product[a] * product[b]) for a, b in (("rows", "depth"), ("rows", "columns"), ("columns", "depth"))
        ]
        columns += [_padding(values, by) for values in product.values() for by in (8, 16)]
        columns.append((product["rows"] == 1) + 0.0)
    return np.column_stack(columns)


def _padding(values: Floats, by: int) -> Floats:
    return np.asarray(np.log(np.ceil(values / by) * by / values))


def _torchs_own(sizes: Mapping[str, Floats]) -> Floats:
    """1 where torch on one thread of a CPU convolves by im2col: the conditions are ATen's, in Convolution.cpp."""
    kernel, stride = ([sizes[name] for name in sizes if name.startswith(prefix)] for prefix in ("kernel_", "stride_"))
    elements = _product([sizes[name] for name in sizes if name.startswith("in_")]) * sizes["batch"]
    # Of three dims the first is 1 where there are fewer.
    pointwise = np.max(kernel, axis=0) == 1
    strided = np.max(stride, axis=0) > 1
    wide = (sizes["kernel_height"] > 3) & (sizes["kernel_width"] > 3)
    large = (sizes["groups"] > 1) | wide | (sizes["batch"] > 1) | (elements > 20480)
    return np.asarray(1.0 - (large & (strided | ~pointwise | (sizes["batch"] >= 16))), float)


def _matrix_product(sizes: Mapping[str, Floats]) -> dict[str, Floats]:
    """rows x depth times depth x columns: what convolution (by im2col) and linear layers compute."""
    if {"in_features", "out_features"} <= sizes.keys():
        return {"rows": sizes["batch"], "columns": sizes["out_features"], "depth": sizes["in_features"]}
    if {"in_channels", "out_channels", "groups"} <= sizes.keys():
        extents = _product([sizes[name] for name in sizes if name.startswith("out_") and name != "out_channels"])
        window = _product([sizes[name] for name in sizes if name.startswith("kernel_")])
        return {
            "rows": sizes["batch"] * extents,
            "columns": sizes["out_channels"] / sizes["groups"],
            "depth": sizes["in_channels"] / sizes["groups"] * window,
        }
    return {}


def _windows(sizes: Mapping[str, Floats]) -> dict[str, Floats]:
    """How full tiles of the output are, as Winograd's and Fourier transforms cut it."""
    if "out_width" not in sizes:
        return {}
    columns = {}
    for name in ("out_height", "out_width"):
        for tile in _WINDOW_TILES:
            columns[f"{name} in tiles of {tile}"] = sizes[name] / (np.ceil(sizes[name] / tile) * tile)
    for tile in (2, 4):
        tiles = np.ceil(sizes["out_height"] / tile) * np.ceil(sizes["out_width"] / tile)
        columns[f"log tiles of {tile}"] = np.log(sizes["batch"] * tiles)
    return columns


def _product(values: Sequence[Floats]) -> Floats:
    return np.asarray(math.prod(values), float)
