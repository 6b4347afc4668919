"""Where filter parallelism may reduce-scatter the gradient of a layer's input instead of all-reducing it.

Each rank needs that gradient only for its own filters of the layer that made the input (ParaDL, footnote 2), if between
the two each channel goes its own way back: through operations that read channel by channel and train nothing. Branches
may join, by element and where all of them come from layers whose filters are cut alike. Elsewhere the gradients of
other channels are needed too. One answer for the plan and for the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.network.partition import ChannelShard, Interval
from paradl_bench.plan.compute import layers_with_gradient

Parts = tuple[Interval, ...]
"""Per rank, channels (or features) of a layer's input."""

_RESHAPES = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten")


class GradientParts(NamedTuple):
    """What each rank needs of the gradients of layers' inputs.

    Attributes:
        parts: by index of the layer that reads the input.
        whole: by name of a layer whose input's gradient every rank needs all of, why.
    """

    parts: dict[int, Parts]
    whole: dict[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """How many there are, and where the others are."""
        if not self.parts and not self.whole:
            return ()
        shown = [f"{name} ({why})" for name, why in list(self.whole.items())[:3]]
        more = [f"{len(self.whole) - len(shown)} more"] if len(self.whole) > len(shown) else []
        rest = f"; it all-reduces those of {', '.join([*shown, *more])}" if shown else ""
        count = f"{len(self.parts)} of {len(self.parts) + len(self.whole)}"
        return (f"filter parallelism reduce-scatters {count} input gradients{rest}",)


class _Place(NamedTuple):
    """Where the filters of ranks are in a tensor: the dim of a sample, and each rank's positions along it."""

    dim: int
    parts: Parts


def gradient_parts(network: ModelGraph, shards: Mapping[int, tuple[ChannelShard, ...]]) -> GradientParts:
    """What each rank needs of the gradient of what each layer reads.

    Args:
        shards: every rank's filters of the layers that are split, by index in the network.
    """
    places = _places(network, shards)
    parts: dict[int, Parts] = {}
    whole: dict[str, str] = {}
    for index in shards:
        layer = network.layers[index]
        place = _common([places[name] for name in layer.inputs if name in places])
        if isinstance(place, str):
            whole[layer.name] = place
        elif place is not None and place.dim != channel_dim(layer, layer.input_shapes[0]):
            whole[layer.name] = "its channels are another dim than the filters before it"
        elif place is not None:
            parts[index] = place.parts
    return GradientParts(parts, whole)


def _places(network: ModelGraph, shards: Mapping[int, tuple[ChannelShard, ...]]) -> dict[str, _Place | str | None]:
    """Per layer, where the filters of ranks are in its output, else why nowhere; None where it needs no gradient."""
    made = layers_with_gradient(network)
    places: dict[str, _Place | str | None] = {}
    for index, layer in enumerate(network.layers):
        if not made[index]:
            places[layer.name] = None
        elif index in shards:
            filters = tuple(shard.filters for shard in shards[index])
            places[layer.name] = _Place(channel_dim(layer, layer.output_shape), filters)
        else:
            places[layer.name] = _behind(layer, _common([places[name] for name in layer.inputs if name in places]))
    return places


def _common(places: Sequence[_Place | str | None]) -> _Place | str | None:
    """The place that several tensors have in common, or the first reason why they have none."""
    known = dict.fromkeys(place for place in places if place is not None)
    reason = next((place for place in known if isinstance(place, str)), None)
    if reason is None and len(known) > 1:
        return "it reads unlike filters"
    return reason or next(iter(known), None)


def channel_dim(layer: Layer, shape: tuple[int, ...]) -> int:
    """The dim that holds a convolution's channels, or a fully connected layer's features, in a sample's shape.

    What lies before them is as good as the batch: frames of a film, say.
    """
    kernel = layer.attributes.get("kernel", ())
    return len(shape) - 1 - (len(kernel) if layer.kind == "conv" and isinstance(kernel, tuple) else 0)


def _behind(layer: Layer, place: _Place | str | None) -> _Place | str:
    """The place in an operation's output; why there is none, where channels mix or parameters are trained."""
    if layer.parameters:
        return f"{layer.name} has parameters"
    if place is None or isinstance(place, str):
        return place or f"{layer.name} has no input"
    kind = layer_kinds().get(layer.kind)
    if kind is not None and kind.view:
        return _reshaped(layer, place) or f"{layer.name} moves channels"
    if kind is not None and kind.by_element(layer.attributes) and set(layer.input_shapes) == {layer.output_shape}:
        return place
    if kind is not None and kind.by_channel(layer.attributes) and place.dim == 0:
        return place
    return f"{layer.name} mixes channels"


def _reshaped(layer: Layer, place: _Place) -> _Place | None:
    """The place in a view that keeps the order of elements; None where channels are no part of one dim any more."""
    inputs, output = layer.input_shapes[0], layer.output_shape
    if layer.attributes.get("function") not in _RESHAPES or math.prod(inputs) != math.prod(output):
        return None
    if inputs == output:
        return place
    if place.dim != 0 or not output:
        return None
    of_input, of_output = math.prod(inputs[1:]), math.prod(output[1:])
    if any(bound * of_input % of_output for part in place.parts for bound in part):
        return None
    scaled = (Interval(*(bound * of_input // of_output for bound in part)) for part in place.parts)
    return _Place(0, tuple(scaled))
