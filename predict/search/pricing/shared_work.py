"""What one rank of axes that share layers runs and sends, a sample: from the planners, or from a region's shapes.

A rank's share of a layer is that of its FLOPs, else of its output. Of spatial parallelism the planner is not asked,
since it cuts the halos of every rank: shares and halos follow from extents, as in the closed form.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.equal_blocks import FewBlocks, without_equal_blocks
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph, Tensor
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import AxisPlace, shard_in_turn
from paradl_bench.plan.compute import input_needs_gradient
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.plan.tasks import Collective, Communication, HaloExchange
from paradl_bench.strategies.spatial.axis import SpatialOptions
from paradl_bench.strategies.spatial.region import spatial_region
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.mesh import Sharing, of_one_sample
from predict.search.pricing.held_parts import KINDS, PartsOfLayers, held_parts

_ELEMENT_BYTES = DTYPE_BYTES["fp32"]
_BY_LAYER = ("share", "held", "gradient_bytes", "bytes_alike")


class Message(NamedTuple):
    """A collective, or a message to a neighbour, that compute of a layer waits for, or else goes on beside.

    Attributes:
        axis: along which it goes, among those that share layers.
        times: how often it is sent.
    """

    layer: int
    phase: Literal["FW", "BW"]
    operation: str
    bytes_per_sample: float
    beside: bool = False
    axis: int = 0
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWork:
    """A rank's part of a network, by layer: of its seconds, and bytes of the gradients that its backward completes.

    Attributes:
        held: its part of each layer's output, which it sends on to a later stage.
        kept: its part of each layer's tensors, at least: see :func:`~predict.search.pricing.held_parts.held_parts`.
            This and ``messages`` are by layers of :attr:`SharedWorks.few`.
        bytes_alike: of those gradients whose parameters all ranks along the axes hold alike, where some they do not.
        parameters: in the shapes that they have on this rank. apart: numbers of those that other ranks along the axes
            hold other parts of.
    """

    share: Floats
    held: Floats
    kept: Floats
    gradient_bytes: Ints
    bytes_alike: Ints
    messages: tuple[Message, ...]
    parameters: tuple[Tensor, ...]
    apart: frozenset[int] = frozenset()


def shared_work(network: ModelGraph, axes: Sequence[Axis], settings: PlanSettings, known: PartsOfLayers) -> SharedWork:
    """The part of the rank at the first position along each axis; all of the network without one."""
    if not axes:
        return SharedWork(
            share=np.ones(len(network.layers)),
            held=np.ones(len(network.layers)),
            kept=np.ones((KINDS, len(network.layers))),
            gradient_bytes=_gradient_bytes(network, network),
            bytes_alike=_gradient_bytes(network, network),
            messages=(),
            parameters=network.parameters,
        )
    if axes[0].has(Trait.CUTS_POSITIONS):
        return _Blocks(network, axes[0].extents, settings).work()
    places = [AxisPlace(axis, number, 0, 1) for number, axis in enumerate(axes)]
    shared = shard_in_turn(network, places, of_one_sample(settings, axes))
    share, held = np.ones((2, len(network.layers)))
    messages: list[Message] = []
    parts = {index: known.of(index, shard) for index, shard in shared.shards.items()}
    for index, shard in shared.shards.items():
        share[index] = len(shard.rounds_fw) * parts[index].computed
        held[index] = parts[index].held
        before_and_behind: tuple[tuple[Literal["FW", "BW"], tuple[Communication, ...]], ...] = (
            ("FW", (*shard.before_fw, *shard.after_fw)),
            ("BW", (*shard.before_bw, *shard.sums, *shard.after_bw)),
        )
        for phase, works in before_and_behind:
            messages += [*_collectives(index, phase, works), *_to_neighbours(index, phase, works)]
        messages += _to_neighbours(index, "FW", shard.rounds_fw, beside=True)
        messages += _to_neighbours(index, "BW", shard.rounds_bw, beside=True)
    gradient_bytes, alike = (_gradient_bytes(network, shared.network, without) for without in ((), shared.apart))
    return SharedWork(
        share=share,
        held=held,
        kept=held_parts(network, parts, shared.network, known),
        gradient_bytes=gradient_bytes,
        bytes_alike=alike,
        messages=tuple(messages),
        parameters=shared.network.parameters,
        apart=frozenset(at for at, parameter in enumerate(shared.network.parameters) if parameter.name in shared.apart),
    )


def _collectives(index: int, phase: Literal["FW", "BW"], works: Sequence[Communication]) -> Iterator[Message]:
    for work in works:
        if isinstance(work, Collective):
            yield Message(index, phase, work.operation, float(work.message_bytes), axis=work.axes[0])


def _to_neighbours(
    index: int, phase: Literal["FW", "BW"], works: Sequence[Communication | None], *, beside: bool = False
) -> Iterator[Message]:
    # Of as many rounds as there are ranks, all but a few are one object.
    distinct = {id(work): work for work in works}
    for key, times in Counter(map(id, works)).items():
        work = distinct[key]
        if isinstance(work, HaloExchange):
            of_axis = work.axes[0]
            for size in work.sends_bytes:
                yield Message(index, phase, "send_recv", float(size), beside, of_axis, times)


def _gradient_bytes(network: ModelGraph, held: ModelGraph, without: Collection[str] = ()) -> Ints:
    """Bytes of gradients by the layer whose backward, the last of those that read a parameter, completes them."""
    size = {parameter.name: parameter.bytes for parameter in held.parameters if parameter.name not in without}
    by_layer = np.zeros(len(network.layers), np.int64)
    for index, layer in enumerate(network.layers):
        by_layer[index] = sum(size.pop(name, 0) for name in dict.fromkeys(layer.parameters))
    # What no layer reads has no gradient, and is updated and exchanged by nobody.
    return by_layer


class _Blocks:
    """Blocks of positions, of so many parts along the first spatial dims."""

    def __init__(self, network: ModelGraph, parts: Sequence[int], settings: PlanSettings) -> None:
        self._network, self._parts = network, parts
        self._region = spatial_region(network, (1,) * len(parts), until=settings.of(SpatialOptions).spatial_until)
        self._inside = self._layers_inside()

    def _layers_inside(self) -> dict[str, int]:
        """By name, layers whose output has positions enough, and which read none that has not."""
        known = {self._network.layers[index].name for index in self._region.layers}
        inside: dict[str, int] = {}
        for index in self._region.layers:
            layer = self._network.layers[index]
            enough = all(extent >= part for extent, part in zip(layer.output_shape[1:], self._parts, strict=False))
            if enough and all(source in inside or source not in known for source in layer.inputs):
                inside[layer.name] = index
        return inside

    def _block(self, extents: Sequence[int]) -> list[int]:
        """The largest block's extents."""
        whole = list(extents)
        return [-(-e // part) for e, part in zip(whole, self._parts, strict=False)] + whole[len(self._parts) :]

    def work(self) -> SharedWork:
        """Shares of the largest block, its halos and the gathers behind the region."""
        network = self._network
        share = np.ones(len(network.layers))
        messages: list[Message] = []
        differentiated = input_needs_gradient(network)
        for index in self._inside.values():
            layer = network.layers[index]
            extents = layer.output_shape[1:]
            share[index] = math.prod(self._block(extents)) / math.prod(extents)
            if self._region.layers[index].halos is not None:
                halos = list(self._halos(layer))
                messages += (Message(index, "FW", "send_recv", size) for size in halos)
                messages += (Message(index, "BW", "send_recv", size) for size in halos if differentiated[index])
        messages += self._gathers()
        gradient_bytes = _gradient_bytes(network, network)
        # On average: some rank has as much at least.
        held = np.full(len(network.layers), 1 / math.prod(self._parts))
        return SharedWork(
            share=share,
            held=held,
            # Parameters are whole.
            kept=np.stack([held, held, np.ones(len(network.layers))]),
            gradient_bytes=gradient_bytes,
            bytes_alike=gradient_bytes,
            messages=tuple(messages),
            parameters=network.parameters,
        )

    def _halos(self, layer: Layer) -> Iterator[float]:
        channels, *extents = layer.input_shapes[0]
        windows = layer_kinds()[layer.kind].windows
        assert windows is not None
        block = self._block(extents)
        for dim, (part, window) in enumerate(zip(self._parts, windows(layer.attributes), strict=False)):
            depth = ((window.kernel - 1) * window.dilation + 1 - window.stride) // 2
            if part > 1 and depth > 0:
                others = math.prod(extent for i, extent in enumerate(block) if i != dim)
                yield from (channels * depth * others * _ELEMENT_BYTES,) * min(part - 1, 2)

    def _gathers(self) -> Iterator[Message]:
        seen: set[str] = set()
        for index, layer in enumerate(self._network.layers):
            if layer.name in self._inside:
                continue
            for name in layer.inputs:
                if name in self._inside and name not in seen:
                    seen.add(name)
                    channels, *extents = self._network.layers[self._inside[name]].output_shape
                    size = channels * math.prod(self._block(extents)) * _ELEMENT_BYTES
                    yield Message(index, "FW", "all_gather", float(size))


class SharedWorks:
    """Parts of one network by what shares its layers (:func:`shared_work`), each found once.

    Attributes:
        network: all of it. few: without equal blocks, where nobody says of which layers ranks run what.
        found: what follows from the parts.
    """

    def __init__(self, network: ModelGraph, settings: PlanSettings) -> None:
        whole = FewBlocks(network, tuple(range(len(network.layers))), tuple(range(len(network.parameters))))
        names = any(options.of_shards for options in settings.axes)
        self.network, self.few = network, whole if names else without_equal_blocks(network)
        self.places: Ints = np.array(self.few.layers, np.int64)
        self.found = Answers()
        self._settings, self._known = settings, PartsOfLayers(self.few.network)
        self.of: Callable[[Sharing], SharedWork] = cache(self._of)
        self.of_all = self.of(((), ()))

    def _of(self, sharing: Sharing) -> SharedWork:
        axes, chosen = sharing
        work = shared_work(self.few.network, axes, self._settings.having(*chosen), self._known)
        by_layer = {name: getattr(work, name)[self.places] for name in _BY_LAYER}
        return replace(work, **by_layer)

    def network_of(self, sharing: Sharing) -> ModelGraph:
        """The network with the shapes that its parameters have on a rank."""
        if not sharing[0]:
            return self.network
        held = self.of(sharing).parameters
        parameters = tuple(
            msgspec.structs.replace(parameter, shape=held[at].shape)
            for parameter, at in zip(self.network.parameters, self.few.parameters, strict=True)
        )
        return msgspec.structs.replace(self.network, parameters=parameters)

    def apart_of(self, sharing: Sharing) -> frozenset[str]:
        """Names of parameters that other ranks along the axes hold other parts of."""
        apart = self.of(sharing).apart
        pairs = zip(self.network.parameters, self.few.parameters, strict=True)
        return frozenset(parameter.name for parameter, at in pairs if at in apart)
