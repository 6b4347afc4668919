"""Which dtype each operation of a network runs in under torch's autocast, without torch.

Training in a lower dtype (``--dtype bf16``) is mixed: parameters, their gradients, the optimizer's state and the input
stay fp32; autocast converts what an operation reads as its kind says (:data:`paradl_bench.network.kinds.kind.Cast`),
and activations with their gradients are of the dtype that the operation ran in. So gradients are exchanged in fp32.

With ``bf16-weights`` input, parameters, buffers and gradients are bf16 too, under the same autocast. The optimizer
keeps fp32 copies of the parameters beside its fp32 state, updates those, and writes them back
(:mod:`paradl_bench.measure.execution.master_weights`). Ranks that hold shards of the parameters hold these in fp32,
and gather them as bf16: their optimizer updates the shards themselves.

A model may compute in other dtypes by itself: each layer has the one that it was traced in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.core.cache_keys import Same
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph, Tensor
from paradl_bench.network.kinds.kind import LayerKind, layer_kinds

WEIGHTS_DTYPE = "bf16-weights"
"""bf16 by autocast, with parameters and gradients in bf16, of which the optimizer has fp32 copies."""
AUTOCAST_DTYPES: Mapping[str, str] = {"bf16": "bf16", WEIGHTS_DTYPE: "bf16"}
"""What is trained in by autocast, and the dtype that products run in."""
KEPT_DTYPE = "fp32"
"""What the input is under autocast, and parameters, gradients and optimizer state unless they are lowered too."""
KEEPS_FP32 = "keeps_fp32"
"""Attribute of a layer that computes in fp32 whatever the model's weights are, since the model converts to it."""
READS_LOWER = "reads_lower"
"""Attribute of such a layer that is given bf16 beside what was converted, and reads it as it is."""
TRAINED_DTYPES = (KEPT_DTYPE, *AUTOCAST_DTYPES)
"""Dtypes that can be measured and trained in."""


def is_autocast(dtype: str) -> bool:
    """Whether a dtype is trained in by autocast."""
    return dtype in AUTOCAST_DTYPES


def kept_dtype(dtype: str) -> str:
    """Dtype that is trained in without autocast in the place of ``dtype``, and that optimizers keep their state in."""
    return KEPT_DTYPE if is_autocast(dtype) else dtype


def given_dtype(dtype: str) -> str:
    """Dtype of the input, of parameters and of their gradients where ``dtype`` is trained in."""
    return computed_in(dtype) if has_masters(dtype) else kept_dtype(dtype)


def computed_in(dtype: str) -> str:
    """Dtype that products run in where ``dtype`` is trained in."""
    return AUTOCAST_DTYPES.get(dtype, dtype)


def has_masters(dtype: str) -> bool:
    """Whether parameters and gradients are in the lower dtype, and the optimizer has fp32 copies of parameters."""
    return dtype == WEIGHTS_DTYPE


def as_held(network: ModelGraph, dtype: str) -> ModelGraph:
    """The network with parameters and buffers in the dtype that ranks hold them in; the same one each time."""
    return _as_held(Same(network), computed_in(dtype)) if has_masters(dtype) else network


# A plan asks, its memory, and a search for thousands of them: caches below know a network by what it is.
@functools.lru_cache(maxsize=16)
def _as_held(same: Same[ModelGraph], lower: str) -> ModelGraph:
    def held(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(msgspec.structs.replace(t, dtype=lower) if t.dtype == KEPT_DTYPE else t for t in tensors)

    network = same.thing
    given = network.parameters, network.buffers, network.frozen
    parameters, buffers, frozen = map(held, given)
    if (parameters, buffers, frozen) == given:
        return network
    return msgspec.structs.replace(network, parameters=parameters, buffers=buffers, frozen=frozen)


def as_sharded(parameter: Tensor, dtype: str) -> Tensor:
    """A parameter as ranks hold shards of it, which take the place of fp32 copies: see the module."""
    is_copy = has_masters(dtype) and parameter.dtype == computed_in(dtype)
    return msgspec.structs.replace(parameter, dtype=KEPT_DTYPE) if is_copy else parameter


class Width(NamedTuple):
    """Bytes of an element of what an operation works on.

    Attributes:
        reads: of each of its inputs, as the layers that made them left them. runs: of what it reads and makes itself.
        converts: whether what it reads is converted to that first; else it reads tensors as they are.
        lowers_parameters: whether it reads its parameters in the lower dtype.
        by_model: whether the model itself converts what it reads, once for all that read it.
    """

    reads: tuple[int, ...]
    runs: int
    converts: bool = False
    lowers_parameters: bool = False
    by_model: bool = False


def widths_of(
    network: ModelGraph, dtype: str, device: str, in_what_they_read: frozenset[str] = frozenset()
) -> Sequence[Width]:
    """Per layer, how wide the elements are that it works on.

    Whole numbers (token ids, positions) count as the input does; no gradient passes through them.

    Args:
        device: kind of the device: ``cpu`` or ``cuda``.
        in_what_they_read: kinds of layers whose kernels read and write the dtype of their input, whatever autocast has.
    """
    return _widths(Same(network), dtype, device, in_what_they_read)


# Plans ask for them at every place along an axis, and for every stage.
@functools.lru_cache(maxsize=16)
def _widths(same: Same[ModelGraph], dtype: str, device: str, in_what_they_read: frozenset[str]) -> tuple[Width, ...]:
    network = same.thing
    kept, lower = DTYPE_BYTES[kept_dtype(dtype)], DTYPE_BYTES[computed_in(dtype)]
    given = DTYPE_BYTES[given_dtype(dtype)]
    kinds = layer_kinds()
    of_parameters = {tensor.name: DTYPE_BYTES[tensor.dtype] for tensor in network.held_parameters}
    made: dict[str, int] = {}
    masks: set[str] = set()
    single = {tensor.name for tensor in network.held_parameters if not tensor.shape}
    single |= {layer.name for layer in network.layers if layer.batchless and not layer.output_shape}
    own = None if in_what_they_read else _OwnConversions(network, dtype, lower, kept)
    widths = []
    for layer in network.layers:
        reads = tuple(made.get(name, given) for name in layer.inputs)
        parameter_bytes = tuple(of_parameters.get(name, given) for name in layer.parameters)
        if layer.kind in in_what_they_read and reads and layer.dtype == KEPT_DTYPE:
            width = Width(reads, reads[0])
        elif is_autocast(dtype):
            given_back = own.given_back(layer, reads) if own else reads
            kind, read = kinds.get(layer.kind), [*zip(layer.inputs, given_back, strict=True)]
            widening = _widening([*read, *zip(layer.parameters, parameter_bytes, strict=True)], masks, single)
            width = _width(layer, kind, given_back, widening, parameter_bytes, lower, kept, device)
            width = own.of(layer, width, reads) if own else width
        else:
            width = Width(reads, kept if layer.dtype == KEPT_DTYPE else DTYPE_BYTES[layer.dtype])
        made[layer.name] = width.runs
        if _returns_mask(layer, kinds.get(layer.kind), masks):
            masks.add(layer.name)
        widths.append(width)
    return tuple(widths)


def _returns_mask(layer: Layer, kind: LayerKind | None, masks: set[str]) -> bool:
    """Whether a layer returns truths, or a view of some."""
    if kind is None:
        return False
    return kind.returns_mask(layer.attributes) or (kind.view and bool(layer.inputs) and masks.issuperset(layer.inputs))


def _widening(read: Sequence[tuple[str, int]], masks: set[str], single: set[str]) -> tuple[int, ...]:
    """Of what is read, by name, bytes of an element of what a result is as wide as.

    Truths make nothing wider, and a single number (a tensor without dims) nothing that has dims.
    """
    numbers = [(name, size) for name, size in read if name not in masks]
    return tuple(size for name, size in numbers if name not in single) or tuple(size for _, size in numbers)


class _OwnConversions:
    """Conversions to fp32 and back that the model makes itself, which a trace in fp32 does not show as layers."""

    def __init__(self, network: ModelGraph, dtype: str, lower: int, kept: int) -> None:
        self._keeping = {layer.name for layer in network.layers if layer.attributes.get(KEEPS_FP32)}
        self._lower, self._kept, self._gives_back = lower, kept, has_masters(dtype)

    def given_back(self, layer: Layer, reads: tuple[int, ...]) -> tuple[int, ...]:
        """Bytes of an element of what a layer reads, once what was kept in fp32 has been converted back for it.

        A model whose weights are fp32 converts back to fp32, in most places.
        """
        if layer.name in self._keeping or not self._gives_back:
            return reads
        read = zip(layer.inputs, reads, strict=True)
        return tuple(min(size, self._lower) if name in self._keeping else size for name, size in read)

    def of(self, layer: Layer, width: Width, reads: tuple[int, ...]) -> Width:
        """The width of a layer that reads ``reads`` as they were made."""
        if layer.name in self._keeping and not width.converts:
            converts = not layer.attributes.get(READS_LOWER)
            return width._replace(runs=max(width.runs, self._kept), converts=converts, by_model=converts)
        if reads != width.reads:
            return width._replace(reads=reads, converts=True, by_model=True)
        return width


def _width(
    layer: Layer,
    kind: LayerKind | None,
    reads: tuple[int, ...],
    widening: tuple[int, ...],
    parameter_bytes: tuple[int, ...],
    lower: int,
    kept: int,
    device: str,
) -> Width:
    """Of a layer under autocast.

    Args:
        widening: as of :func:`_widening`. parameter_bytes: bytes of an element of each parameter.
    """
    cast = "widest" if kind is None else kind.autocast(layer.attributes, device)
    if layer.dtype == "fp64":
        # Autocast leaves it alone.
        return Width(reads, DTYPE_BYTES[layer.dtype])
    if cast == "lower":
        return Width(reads, lower, True, any(size > lower for size in parameter_bytes))
    if cast == "fp32":
        return Width(reads, kept, True)
    if cast == "parameters" and parameter_bytes:
        return Width(reads, max(parameter_bytes))
    if reads and (cast == "input" or layer.attributes.get("in_place", False)):
        return Width(reads, reads[0])
    if layer.dtype != KEPT_DTYPE:
        return Width(reads, DTYPE_BYTES[layer.dtype])
    return Width(reads, max(widening, default=kept))


def dtype_made(layer: Layer, width: Width, dtype: str) -> str:
    """Dtype of what a layer of these widths returns where ``dtype`` is trained in."""
    if not is_autocast(dtype):
        return dtype if layer.dtype == KEPT_DTYPE else layer.dtype
    return next(name for name in (computed_in(dtype), KEPT_DTYPE, "fp64") if DTYPE_BYTES[name] == width.runs)
