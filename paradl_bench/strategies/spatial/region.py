"""Where a network runs on blocks of positions, and which halos its windows need; one answer for the plan and the run.

The region starts at the network's input. An operation is in it if all that it reads and changes is, if it reads windows
or single positions, and if every rank owns a position of what it reads and writes. What it reads beside blocks, as a
parameter, is in the kinds below one number a channel. The model's code does nothing else with it: no value is read.
What is outside reads whole activations: the blocks are gathered before it (ParaDL, section 3.2 and "Spatial" in section
4.5: before the first fully connected layer in VGG16 and ResNets). By default it reaches as far as it can; ``until``
ends it earlier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.network.graph import DTYPE_BYTES, RETURNS_INPUT, Layer, ModelGraph
from paradl_bench.network.kinds.kind import LayerKind, layer_kinds
from paradl_bench.network.partition import Box, Halo, Window, cut_box, halos, read_boxes
from paradl_bench.plan.axis_planner import Latest
from paradl_bench.plan.compute import INPUT, operations_of_forward
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.spatial.axis import SpatialOptions

_GIVEN = "so it was asked"
_BY_CHANNEL = ("batch_norm", "activation")
"""Kinds whose parameters and buffers are a number a channel each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayer:
    """An operation that runs on blocks.

    Attributes:
        boxes: per rank, the positions of the output that it computes, over all spatial dims.
        halos: per rank, from what it owns of the input to what its windows read; None for operations by position.
        fill: what windows read outside the tensor.
    """

    boxes: tuple[Box, ...]
    halos: tuple[Halo, ...] | None = None
    fill: float = 0.0


class Region(NamedTuple):
    """The part of a network that runs on blocks.

    Attributes:
        layers: by index in the network.
        gathered: per index of a layer outside, the layers whose blocks are gathered before it; each is gathered once.
        boxes: per rank, of the network's input.
        end: the first layer that could not be in it, and why.
    """

    layers: dict[int, BlockLayer]
    gathered: dict[int, tuple[str, ...]]
    boxes: tuple[Box, ...]
    end: str


def spatial_region(network: ModelGraph, parts: Sequence[int], *, until: str | None = None) -> Region:
    """The region of a network cut in ``parts`` along its first spatial dims.

    Args:
        until: name of the layer before which it ends; None for as late as possible.

    Raises:
        UserError: fewer spatial dims than parts, an extent smaller than its parts before the first layer, or no layer
            called ``until``.
    """
    extents = network.input_shape[1:]
    _check_input(network, parts)
    names = [layer.name for layer in network.layers]
    if until is not None and until not in names:
        raise unknown_choice(f"layer of {network.name} to end spatial parallelism before", until, names)
    last = len(names) if until is None else names.index(until)
    kinds = layer_kinds()
    inside: dict[str, tuple[int, ...]] = {INPUT: extents}
    layers: dict[int, BlockLayer] = {}
    end = ""
    for index, layer in enumerate(network.layers):
        reason = _outside(layer, kinds.get(layer.kind), inside, parts) if index < last else _GIVEN
        if reason is None:
            layers[index] = _block_layer(layer, kinds[layer.kind], parts)
            inside[layer.name] = layer.output_shape[1:]
        elif layer.inputs and not end and any(source in inside for source in layer.inputs):
            end = f"{layer.name}: {reason}"
    if not any(layers[index].halos is not None for index in layers):
        raise UserError(f"spatial parallelism: no layer of {network.name} can be cut {_text(parts)}; {end}")
    return Region(layers, _gathers(network, layers), cut_box(extents, parts), end)


_LATEST: Latest[Region] = Latest()


def region_of(network: ModelGraph, axis: Axis, settings: PlanSettings) -> Region:
    """The region of a spatial axis; every position along it, and every batch norm, asks for the same one.

    Raises:
        UserError: as :func:`spatial_region`.
    """
    parts, until = axis.extents, settings.of(SpatialOptions).spatial_until
    return _LATEST.get(network, (parts, until), lambda: spatial_region(network, parts, until=until))


def _check_input(network: ModelGraph, parts: Sequence[int]) -> None:
    extents = network.input_shape[1:]
    if len(extents) < len(parts):
        raise UserError(
            f"spatial parallelism over {len(parts)} dims: an input of {network.name} has {len(extents)} spatial dims"
        )
    for dim, (extent, count) in enumerate(zip(extents, parts, strict=False)):
        if extent < count:
            raise UserError(
                f"spatial parallelism: the input of {network.name} has {extent} positions along dim {dim},"
                f" fewer than {count} parts"
            )


def _text(parts: Sequence[int]) -> str:
    return "x".join(map(str, parts))


def _outside(
    layer: Layer, kind: LayerKind | None, inside: Mapping[str, tuple[int, ...]], parts: Sequence[int]
) -> str | None:
    """Why a layer is not in the region; None where it is."""
    if kind is None or not layer.inputs or not layer.input_shapes:
        return "it is no operation on positions"
    if any(source not in inside for source in layer.inputs):
        return "it reads what is not cut"
    if any(name not in inside for name, _ in layer.values_written):
        return "it changes in place what is not cut"
    if layer.handled:
        return "the model's code does more with what it returns than operations do"
    spatial = len(inside[layer.inputs[0]])
    if len(layer.output_shape) != spatial + 1 or any(len(shape) != spatial + 1 for shape in layer.input_shapes):
        return f"{layer.kind} changes the number of dims"
    if any(extent < count for extent, count in zip(layer.output_shape[1:], parts, strict=False)):
        return f"its output has {_text(layer.output_shape[1:])} positions, too few to cut {_text(parts)}"
    if kind.windows is not None:
        return None if len(kind.windows(layer.attributes)) == spatial else f"{layer.kind} over other dims"
    return _not_by_position(layer, kind)


def _not_by_position(layer: Layer, kind: LayerKind) -> str | None:
    """Why a position of a layer's output is not made of that position of its inputs alone; None where it is."""
    if not layer.attributes.get(RETURNS_INPUT) and not kind.by_position(layer.attributes):
        return f"{layer.kind} reads all positions"
    if any(shape[1:] != layer.output_shape[1:] for shape in layer.input_shapes):
        return f"{layer.kind} broadcasts over positions"
    if layer.batchless_inputs:
        return f"{layer.kind} reads a constant by position"
    if (layer.parameters or layer.state) and layer.kind not in _BY_CHANNEL:
        return f"{layer.kind} reads {(*layer.parameters, *layer.state)[0]} by position"
    return None


def _block_layer(layer: Layer, kind: LayerKind, parts: Sequence[int]) -> BlockLayer:
    boxes = _cut(layer.output_shape[1:], tuple(parts))
    if kind.windows is None:
        return BlockLayer(boxes=boxes)
    halos_of_ranks = _halos(
        layer.input_shapes[0][1:], layer.output_shape[1:], kind.windows(layer.attributes), tuple(parts)
    )
    return BlockLayer(boxes=boxes, halos=halos_of_ranks, fill=kind.fill(layer.attributes))


# Networks repeat few extents and windows, and every one of many ranks has its halos.
_cut = lru_cache(maxsize=256)(cut_box)


@lru_cache(maxsize=256)
def _halos(
    inputs: tuple[int, ...], outputs: tuple[int, ...], windows: tuple[Window, ...], parts: tuple[int, ...]
) -> tuple[Halo, ...]:
    """What every rank does before windows over so many positions."""
    return halos(_cut(inputs, parts), read_boxes(_cut(outputs, parts), windows))


def most_parts(network: ModelGraph, *, until: str | None = None) -> tuple[tuple[int, ...], str] | None:
    """How many parts each dim can be cut in at most so that some windows run on blocks, and the layer that says so.

    That is the layer with windows that can be cut furthest, and those before it. None where no layer can be cut.
    """
    dims = len(network.input_shape) - 1
    if dims < 1:
        return None
    try:
        region = spatial_region(network, (1,) * dims, until=until)
    except UserError:
        return None
    parts = {INPUT: network.input_shape[1:]}
    possible: list[tuple[int, str]] = []
    for index, block in region.layers.items():
        layer = network.layers[index]
        limits = [layer.output_shape[1:], *(parts[source] for source in layer.inputs)]
        parts[layer.name] = tuple(map(min, *limits))
        if block.halos is not None:
            possible.append((-math.prod(parts[layer.name]), layer.name))
    name = min(possible, key=lambda pair: pair[0])[1]
    return parts[name], name


def _gathers(network: ModelGraph, layers: Mapping[int, BlockLayer]) -> dict[int, tuple[str, ...]]:
    """Which blocks are gathered before which layer: each where it is first read whole.

    The network's input is whole on every rank. Blocks that forward returns are gathered at its end, whoever reads them.
    """
    cut_names = {network.layers[index].name for index in layers}
    seen: set[str] = set()
    gathers: dict[int, tuple[str, ...]] = {}
    end = operations_of_forward(network)
    for index, layer in enumerate(network.layers):
        if index in layers:
            continue
        read = (*network.outputs, *layer.inputs) if index == end else layer.inputs
        needed = tuple(name for name in dict.fromkeys(read) if name in cut_names and name not in seen)
        if needed:
            gathers[index] = needed
            seen.update(needed)
    return gathers


def gathered_bytes(network: ModelGraph, index: int, boxes: Sequence[Box], element_bytes: int) -> int:
    """Bytes per sample that each rank sends when a layer's blocks are gathered: the largest block's.

    Args:
        element_bytes: of what the layer returns, unless that is a mask.
    """
    layer = network.layers[index]
    mask = layer_kinds()[layer.kind].returns_mask(layer.attributes)
    size = DTYPE_BYTES["bool"] if mask else element_bytes
    return size * layer.output_shape[0] * max(math.prod(i.extent for i in box) for box in boxes)
