"""What a rank holds at least of tensors, where axes share layers: as parts of those of whole layers.

A tensor belongs to the layer that makes it. A rank holds no less of it than the least of what the layer makes, of what
is left of that once ranks have put it together, and of what a layer that reads it takes. So each layer has three
numbers: for tensors that its operation makes, for copies of its inputs in another dtype, and for copies of its
parameters. Layers that ranks run whole have ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.kind import LayerKind, layer_kinds
from paradl_bench.plan.compute import LayerShard, held_layer
from paradl_bench.strategies.memory.gpu_kernels import layers_on_gpu
from paradl_bench.strategies.memory.rank_operations import shares_input
from predict.costs.sourced import Floats

KINDS = 3
MADE, CONVERTED, COPIED = range(KINDS)
"""Rows of :func:`held_parts`."""


class LayerParts(NamedTuple):
    """A rank's part of one layer.

    Attributes:
        computed: of its FLOPs, else of its output. held: of its output, when ranks have put that together.
        read: the least of its inputs. first_read: of the first input. made: the least of what is there while it runs.
        keeps: whether autograd keeps the same tensors as of the whole layer.
    """

    computed: float
    held: float
    read: float
    first_read: float
    made: float
    keeps: bool


class PartsOfLayers:
    """Parts of the layers of one network, each kind of which is looked at once: blocks repeat theirs."""

    def __init__(self, network: ModelGraph) -> None:
        self._network, self._known = network, dict[Hashable, LayerParts]()

    def of(self, index: int, shard: LayerShard) -> LayerParts:
        """The part of the layer with that index."""
        whole, run = self._network.layers[index], shard.layer
        held = held_layer(whole, shard).output_shape
        if run.memory is not whole.memory:
            # What one rank's part was found to hold has no key.
            return _part_of(whole, run, held)
        of_run = run.input_shapes, run.output_shape, run.fw_flops
        key = whole.operation, whole.fw_flops, whole.output_shape, id(whole.memory), of_run, held
        if key not in self._known:
            self._known[key] = _part_of(whole, run, held)
        return self._known[key]

    @functools.cached_property
    def passes_on(self) -> list[bool]:
        """Whether a layer's output may be memory of what it reads, on whatever device."""
        layers = self._network.layers
        kinds = [layer_kinds().get(layer.kind) for layer in layers]
        on_gpu = layers_on_gpu(layers, kinds)
        return [
            any(map(shares_input, either, (kind, kind))) for *either, kind in zip(layers, on_gpu, kinds, strict=True)
        ]

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Of each layer, by name."""
        return {layer.name: index for index, layer in enumerate(self._network.layers)}


def held_parts(network: ModelGraph, parts: Mapping[int, LayerParts], held: ModelGraph, known: PartsOfLayers) -> Floats:
    """The least that a rank holds of whole layers' tensors, as parts; of shape (3, layers).

    Args:
        parts: of the layers that ranks share, by index. held: the network with the shapes of the rank's parameters.
    """
    count = len(network.layers)
    made, read, converted = [1.0] * count, [1.0] * count, [1.0] * count
    shared_inputs = set[str]()
    for index, part in parts.items():
        layer = network.layers[index]
        made[index] = part.made if part.keeps else 0.0
        sources = [known.index[name] for name in layer.inputs if name in known.index]
        for source in sources:
            read[source] = min(read[source], part.read if part.keeps else 0.0)
        alone = len(layer.inputs) == len(layer.input_shapes) == 1
        least = min([made[index], *(parts[source].held for source in sources if source in parts)])
        converted[index] = part.first_read if alone else least
        # Layers that read the same may share its copy.
        if not part.keeps or shared_inputs.intersection(layer.inputs):
            converted[index] = 0.0
        shared_inputs.update(layer.inputs)
    for index in range(count - 1, -1, -1):
        if known.passes_on[index]:
            for name in network.layers[index].inputs:
                if name in known.index:
                    read[known.index[name]] = min(read[known.index[name]], read[index])
    return np.array([np.minimum(made, read), converted, _copied(network, held)])


def _copied(network: ModelGraph, held: ModelGraph) -> list[float]:
    """Per layer, the least part of one of its parameters that the rank holds."""
    whole = {tensor.name: tensor.elements for tensor in network.parameters}
    parts = {
        tensor.name: tensor.elements / whole[tensor.name] for tensor in held.parameters if whole.get(tensor.name, 0)
    }
    return [min((parts.get(name, 0.0) for name in layer.parameters), default=1.0) for layer in network.layers]


def _part_of(whole: Layer, run: Layer, held: tuple[int, ...]) -> LayerParts:
    kind = layer_kinds().get(whole.kind)
    inputs = [_ratio(part, full) for part, full in zip(run.input_shapes, whole.input_shapes, strict=False)]
    output, of_held = _ratio(run.output_shape, whole.output_shape), _ratio(held, whole.output_shape)
    flops = run.fw_flops / whole.fw_flops if whole.fw_flops else None
    saved, keeps = _saved(whole, run, kind)
    read = min(inputs, default=1.0)
    return LayerParts(
        computed=output if flops is None else flops,
        held=of_held,
        read=read,
        first_read=inputs[0] if inputs else 1.0,
        made=min(read, output, of_held, saved, 1.0 if flops is None else flops),
        keeps=keeps,
    )


def _saved(whole: Layer, run: Layer, kind: LayerKind | None) -> tuple[float, bool]:
    """The least part of what autograd keeps beside inputs and output, and whether it keeps the same of these."""
    if whole.memory is not None or run.memory is not None:
        return 1.0, whole.memory == run.memory
    if kind is None:
        return 1.0, True
    of_whole, of_run = kind.saves(whole), kind.saves(run)
    # Behind the first two fields come numbers.
    parts = (part / full for part, full in zip(of_run[2:], of_whole[2:], strict=True) if full)
    return min(parts, default=1.0), of_whole[:2] == of_run[:2]


def _ratio(part: Sequence[int], whole: Sequence[int]) -> float:
    return math.prod(part) / max(math.prod(whole), 1)
