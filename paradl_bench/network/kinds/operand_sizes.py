"""Sizes that several layer kinds name alike: spatial extents, window settings, the dims round the one worked on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.kind import Cast, windows_of

EXTENTS = ("depth", "height", "width")


def spatial(prefix: str, values: tuple[int, ...], missing: int = 1) -> dict[str, int]:
    """``{"in_depth": 1, "in_height": 56, "in_width": 56}``: one number a spatial dim, dims that are not there first."""
    filled = (missing,) * (len(EXTENTS) - len(values)) + tuple(values)
    return {f"{prefix}_{name}": value for name, value in zip(EXTENTS, filled, strict=True)}


def spatial_of(prefix: str, sizes: Mapping[str, int], dims: int) -> tuple[int, ...]:
    """The inverse of :func:`spatial`."""
    return tuple(sizes[f"{prefix}_{name}"] for name in EXTENTS[-dims:])


def window_sizes(layer: Layer) -> dict[str, int] | None:
    """Extents read and written, kernel, stride, padding and dilation; None where both ends are padded unlike."""
    padding = layer.attributes.get("padding")
    windows = windows_of(layer.attributes)
    if padding == "same" and any(window.dilation * (window.kernel - 1) % 2 for window in windows):
        return None
    return {
        **spatial("in", layer.input_shapes[0][1:]),
        **spatial("kernel", tuple(window.kernel for window in windows)),
        **spatial("stride", tuple(window.stride for window in windows)),
        **spatial("padding", tuple(window.padding for window in windows), missing=0),
        **spatial("dilation", tuple(window.dilation for window in windows)),
        **spatial("out", layer.output_shape[1:]),
    }


def volumes_in_fp32_on_a_cpu(attributes: Mapping[str, Attribute], device: str) -> Cast:
    """What autocast makes of pooling."""
    return "fp32" if device == "cpu" and str(attributes["function"]).endswith("3d") else "widest"


def round_dims(shape: tuple[int, ...], batch: int, dims: Attribute) -> dict[str, int] | None:
    """Of a mini-batch's tensor: ``batch`` (elements before the dims worked on), ``width`` (along them) and ``inner``.

    Args:
        shape: per sample.
        dims: one, some, or None for all, counted with the batch as the first.

    Returns:
        None where the dims do not lie side by side.
    """
    whole = (batch, *shape)
    if dims is None:
        return {"batch": 1, "width": math.prod(whole), "inner": 1}
    named = dims if isinstance(dims, tuple) else (dims,)
    at = sorted(int(dim) % len(whole) for dim in named if isinstance(dim, int))
    if not at or at != list(range(at[0], at[0] + len(at))):
        return None
    return {
        "batch": math.prod(whole[: at[0]]),
        "width": math.prod(whole[at[0] : at[-1] + 1]),
        "inner": math.prod(whole[at[-1] + 1 :]),
    }
