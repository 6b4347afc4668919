"""Which dtype each operation of a network runs in under torch's autocast, without torch.

Training in a lower dtype (``--dtype bf16``) is mixed: parameters, their gradients, the optimizer's state and the input
stay fp32; autocast converts what an operation reads as its kind says (:data:`paradl_bench.network.kinds.kind.Cast`),
and activations with their gradients are of the dtype that the operation ran in. So gradients are exchanged in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from paradl_bench.core.cache_keys import Same
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph
from paradl_bench.network.kinds.kind import LayerKind, layer_kinds

AUTOCAST_DTYPES = ("bf16",)
"""Dtypes that are trained in by autocast."""
KEPT_DTYPE = "fp32"
"""What parameters, gradients, optimizer state and input are under autocast."""
TRAINED_DTYPES = (KEPT_DTYPE, *AUTOCAST_DTYPES)
"""Dtypes that can be measured and trained in."""


def is_autocast(dtype: str) -> bool:
    """Whether a dtype is trained in by autocast."""
    return dtype in AUTOCAST_DTYPES


def kept_dtype(dtype: str) -> str:
    """Dtype of parameters, their gradients and the input where ``dtype`` is trained in."""
    return KEPT_DTYPE if is_autocast(dtype) else dtype


class Width(NamedTuple):
    """Bytes of an element of what an operation works on.

    Attributes:
        reads: of each of its inputs, as the layers that made them left them. runs: of what it reads and makes itself.
        converts: whether what it reads is converted to that first; else it reads tensors as they are.
        lowers_parameters: whether it reads its parameters in the lower dtype.
    """

    reads: tuple[int, ...]
    runs: int
    converts: bool = False
    lowers_parameters: bool = False


def widths_of(network: ModelGraph, dtype: str, device: str) -> Sequence[Width]:
    """Per layer, how wide the elements are that it works on.

    Whole numbers (token ids, positions) count as the input does; no gradient passes through them.

    Args:
        device: kind of the device: ``cpu`` or ``cuda``.
    """
    return _widths(Same(network), dtype, device)


# Plans ask for them at every place along an axis, and for every stage.
@functools.lru_cache(maxsize=16)
def _widths(same: Same[ModelGraph], dtype: str, device: str) -> tuple[Width, ...]:
    network = same.thing
    kept, lower = DTYPE_BYTES[kept_dtype(dtype)], DTYPE_BYTES[dtype]
    kinds = layer_kinds()
    made: dict[str, int] = {}
    widths = []
    for layer in network.layers:
        reads = tuple(made.get(name, kept) for name in layer.inputs)
        width = _width(layer, kinds.get(layer.kind), reads, lower, kept, device)
        made[layer.name] = width.runs
        widths.append(width)
    return tuple(widths)


def _width(layer: Layer, kind: LayerKind | None, reads: tuple[int, ...], lower: int, kept: int, device: str) -> Width:
    cast = "widest" if kind is None else kind.autocast(layer.attributes, device)
    if cast == "lower":
        return Width(reads, lower, True, lower < kept)
    if cast == "fp32":
        return Width(reads, kept, True)
    if reads and (cast == "input" or layer.attributes.get("in_place", False)):
        return Width(reads, reads[0])
    return Width(reads, max((*reads, kept) if layer.parameters else reads, default=kept))
