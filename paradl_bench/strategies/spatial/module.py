"""Spatially parallel layers: blocks of positions, halos exchanged before every window, gathered where the region ends.

Weights are replicated, and every rank's gradient of them covers its own block. Gradients are then *averaged* over all
ranks that replicate, as torch's DistributedDataParallel does, so inside the region they are made as many times larger
as there are blocks: the mean of these is the sum over blocks. Outside the region all ranks compute alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from paradl_bench.network.graph import RETURNS_INPUT, Layer, ModelGraph
from paradl_bench.network.kinds.kind import LayerKind, layer_kinds
from paradl_bench.network.partition import Box, Interval, Window
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.running.group_functions import (
    Group,
    Slices,
    gather,
    slices_of,
    take,
    with_halo,
)
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.sharded_module import (
    WHOLE,
    Call,
    Rule,
    Sharding,
    beside,
    bind,
    functions_of,
    instead,
)
from paradl_bench.strategies.spatial.region import BlockLayer, Region, region_of

_MARK = "_paradl_blocks"
_LEADING = 2
"""Dims before the spatial ones: samples and channels."""


class _Blocks(NamedTuple):
    """What a tensor is one block of."""

    boxes: tuple[Box, ...]
    extents: tuple[int, ...]

    @property
    def slices(self) -> tuple[Slices, ...]:
        return tuple(slices_of(box, leading=_LEADING) for box in self.boxes)


class SpatialRunner:
    """Runs a module on blocks; no parameter is changed.

    Outputs are those of the serial model; parameter gradients are, after the mean over all ranks; so is the input's
    gradient. Batch normalisation takes the statistics of its own block.
    """

    name = "spatial"

    def shard(
        self, module: torch.nn.Module, network: ModelGraph, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """See :class:`~paradl_bench.strategies.running.axis_runners.AxisRunner`."""
        return _shard(network, region_of(network, axis, settings), group)


RUNNER = SpatialRunner()


def _shard(network: ModelGraph, region: Region, group: Group) -> Sharding:
    kinds = layer_kinds()
    gathering, random = _Gathering(group), OwnRandomness(group)
    rules = {}
    for index, block in region.layers.items():
        layer = network.layers[index]
        kind = kinds[layer.kind]
        run: Any = _BlockOperation(layer, kind, block, group, random)
        if layer.attributes.get(RETURNS_INPUT):
            # The block that it returns is marked already, and may have been gathered.
            run = _as_it_is
        rules[index] = Rule(functions_of(layer), run)
    whole = _Blocks(region.boxes, tuple(network.input_shape[1:]))

    def enter(inputs: torch.Tensor) -> torch.Tensor:
        # Inside the region gradients are as many times larger as there are blocks; the input's shall not be.
        block = _mark(take(inputs, whole.slices, group, scale=1 / group.size), whole)
        # What is outside of the region and reads the input reads what every rank has.
        setattr(block, WHOLE, inputs)
        return block

    def receive(index: int, _: int, value: torch.Tensor) -> torch.Tensor:
        block = region.layers.get(index)
        return (
            value
            if block is None
            else _mark(value, _Blocks(block.boxes, tuple(network.layers[index].output_shape[1:])))
        )

    def own_part(tensor: torch.Tensor, whole_tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
        blocks: _Blocks | None = getattr(tensor, _MARK, None)
        return (whole_tensor, 1.0) if blocks is None else (whole_tensor[blocks.slices[group.rank]], float(group.size))

    return Sharding(
        rules,
        network,
        enter=enter,
        leave=gathering,
        whole_shape=_whole_shape,
        whole=gathering,
        receive=receive,
        randomness=(random,),
        own_part=own_part,
    )


def _as_it_is(function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _mark(tensor: torch.Tensor, blocks: _Blocks) -> torch.Tensor:
    setattr(tensor, _MARK, blocks)
    # An operation in place has changed what was gathered before.
    setattr(tensor, WHOLE, None)
    return tensor


def _whole_shape(tensor: torch.Tensor) -> torch.Size | None:
    blocks: _Blocks | None = getattr(tensor, _MARK, None)
    return None if blocks is None else torch.Size((*tensor.shape[:_LEADING], *blocks.extents))


class _Gathering:
    """Replaces every block in a value by the whole tensor; each block is gathered once."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, value: Any) -> Any:
        return tree_map_only(torch.Tensor, self._gather, value)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        blocks: _Blocks | None = getattr(tensor, _MARK, None)
        if blocks is None:
            return tensor
        whole: torch.Tensor | None = getattr(tensor, WHOLE, None)
        if whole is None:
            shape = (*tensor.shape[:_LEADING], *blocks.extents)
            # The first to read it may want no gradient; others may.
            with torch.inference_mode(mode=False), torch.enable_grad():
                whole = gather(tensor, blocks.slices, shape, self._group, scale=self._group.size)
            setattr(tensor, WHOLE, whole)
        return whole


def _draws_by_position(layer: Layer) -> bool:
    """Whether a layer draws a number for each position; dropout of whole channels draws the same on every rank."""
    return layer.kind == "dropout" and layer.attributes["function"] in ("dropout", "alpha_dropout")


class _BlockOperation:
    """Runs one operation of the region on this rank's block."""

    def __init__(self, layer: Layer, kind: LayerKind, block: BlockLayer, group: Group, random: OwnRandomness) -> None:
        self._layer, self._kind, self._block, self._group = layer, kind, block, group
        self._blocks = _Blocks(block.boxes, tuple(layer.output_shape[1:]))
        self._halo = block.halos[group.rank] if block.halos is not None else None
        self._random = random if _draws_by_position(layer) else None
        self._pooling = _without_padding(layer, kind) if block.halos is not None and layer.kind != "conv" else None

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if self._random is not None:
            with self._random.used(args[0] if args else kwargs["input"]):
                return _mark(function(*args, **kwargs), self._blocks)
        if self._halo is None:
            return _mark(function(*args, **kwargs), self._blocks)
        if self._layer.kind == "conv":
            given = bind(self._layer, args, kwargs)
            given["input"] = with_halo(given["input"], self._halo, self._block.fill, self._group)
            given["padding"] = 0
            return _mark(function(**given), self._blocks)
        return _mark(self._pool(function, args, kwargs), self._blocks)

    def _pool(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Pooling without padding of what the windows read; averages are divided by what torch divides by."""
        assert self._halo is not None
        assert self._pooling is not None
        inputs = args[0] if args else kwargs["input"]
        read = with_halo(inputs, self._halo, self._block.fill, self._group)
        pooled: torch.Tensor = instead(function, self._pooling)([read], [])
        if not str(self._layer.attributes["function"]).startswith("avg"):
            return pooled
        divisors = self._divisors(args, kwargs, inputs)
        if divisors is None:
            return pooled
        averaged: torch.Tensor = beside(function, torch.mul)(pooled, math.prod(_kernel(self._layer)) / divisors)
        return averaged

    def _divisors(self, args: tuple[Any, ...], kwargs: dict[str, Any], like: torch.Tensor) -> torch.Tensor | None:
        """By how much torch divides at each position of this rank's output; None where that is the kernel's size."""
        names = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("divisor_override") is not None:
            return torch.tensor(float(given["divisor_override"]), dtype=like.dtype, device=like.device)
        assert self._kind.windows is not None
        windows, box = self._kind.windows(self._layer.attributes), self._block.boxes[self._group.rank]
        include = bool(given.get("count_include_pad", True))
        counts = [
            _window_counts(window, interval, extent, include=include)
            for window, interval, extent in zip(windows, box, self._layer.input_shapes[0][1:], strict=True)
        ]
        if all(
            count == window.kernel for window, dim_counts in zip(windows, counts, strict=True) for count in dim_counts
        ):
            return None
        return _outer([torch.tensor(dim_counts, dtype=like.dtype, device=like.device) for dim_counts in counts])


def _kernel(layer: Layer) -> tuple[int, ...]:
    kernel = layer.attributes["kernel"]
    assert isinstance(kernel, tuple)
    return kernel


def _without_padding(layer: Layer, kind: LayerKind) -> Call:
    """A pool of what the windows read, called with its operands and no parameters."""
    assert kind.build is not None
    return kind.build({**layer.attributes, "padding": (0,) * len(_kernel(layer)), "ceil_mode": False})


def _window_counts(window: Window, outputs: Interval, extent: int, *, include: bool) -> list[float]:
    """Positions that an average counts, per output along one dim: with padding, but never beyond it, or without."""
    counts = []
    for output in range(outputs.start, outputs.stop):
        start = output * window.stride - window.padding
        stop = min(start + window.kernel, extent + window.padding)
        if not include:
            start, stop = max(start, 0), min(stop, extent)
        counts.append(float(stop - start))
    return counts


def _outer(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Product of one vector a dim."""
    result = vectors[0]
    for vector in vectors[1:]:
        result = result.unsqueeze(-1) * vector
    return result
