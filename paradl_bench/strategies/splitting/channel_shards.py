"""Which layers filter and channel parallelism split, and into what; one answer for the plan and for the run.

Convolutions and fully connected layers with parameters of their own are split (ParaDL, section 3.3 and Table 4); all
others run whole on every rank, on gathered activations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.partition import ChannelShard, Interval
from paradl_bench.plan.axis_planner import part_of_layer
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.splitting.gradient_parts import GradientParts, channel_dim, gradient_parts
from paradl_bench.strategies.splitting.options import FilterOptions, SplitOptions

SPLIT_KINDS = ("conv", "linear")
NOT_CHOSEN = "it was not chosen"

Shards = tuple[ChannelShard, ...]
Cut = Callable[[int, int, int, int], Shards | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """One way of splitting a layer over ranks.

    Attributes:
        name: the kind of axis whose ranks split layers so.
        what: is split, for messages.
        cut: from filters, channels, groups and ranks to each rank's shard; None where that does not work out.
        splits_outputs: whether each rank computes its filters' part of the output, with their part of the bias; else
            all compute partial sums of all filters.
    """

    name: str
    what: str
    cut: Cut
    splits_outputs: bool

    def layers(self, network: ModelGraph, ranks: int, settings: PlanSettings) -> SplitLayers:
        """What is split over so many ranks.

        Raises:
            UserError: as :func:`split_layers`.
        """
        split = split_layers(network, ranks, self.cut, settings.of(SplitOptions).split)
        if not self.splits_outputs or settings.of(FilterOptions).filter_backward == "all-reduce":
            return split
        return split._replace(gradients=gradient_parts(network, split.shards))

    def parameter_parts(self, layer: Layer, shard: ChannelShard) -> dict[str, tuple[Interval, ...]]:
        """Per parameter of a layer that is split, what a rank holds of it along its first dims."""
        weight, *bias = layer.parameters
        of_bias = dict.fromkeys(bias, (shard.filters,)) if self.splits_outputs else {}
        return {weight: (shard.filters, shard.group_channels), **of_bias}


class SplitLayers(NamedTuple):
    """What is split.

    Attributes:
        shards: of the layers that are split, by index in the network.
        whole: why others of these kinds are not, by name.
        gradients: of inputs, which parts ranks need where they need no more; all of those that are missing.
    """

    shards: dict[int, Shards]
    whole: dict[str, str]
    gradients: GradientParts = GradientParts({}, {})


def channels_of(layer: Layer) -> tuple[int, int, int]:
    """Filters, input channels and groups of a convolution; features of a fully connected layer, as one group."""
    attributes = layer.attributes
    inputs, output = layer.input_shapes[0], layer.output_shape
    filters, groups = ("out_features", 1) if layer.kind == "linear" else ("out_channels", attributes.get("groups", 1))
    return (
        _number(attributes.get(filters, output[channel_dim(layer, output)])),
        inputs[channel_dim(layer, inputs)],
        _number(groups),
    )


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def split_layers(network: ModelGraph, parts: int, cut: Cut, patterns: Sequence[str] = ()) -> SplitLayers:
    """What is split over ``parts`` ranks, by ``cut``.

    Raises:
        UserError: as :func:`choose_layers`, or a layer that is named does not split in ``parts``.
    """
    shards: dict[int, Shards] = {}
    whole: dict[str, str] = {}
    chosen = choose_layers(network, patterns)
    for index, reason in _reasons_against(network).items():
        layer = network.layers[index]
        filters, channels, groups = channels_of(layer)
        if index not in chosen and reason is None:
            whole[layer.name] = NOT_CHOSEN
        elif reason is not None:
            whole[layer.name] = reason
        elif (layer_shards := cut(filters, channels, groups, parts)) is None:
            why = f"{filters} filters, {channels} channels and {groups} groups do not split in {parts}"
            if layer.name in patterns:
                raise UserError(f"split layers: {layer.name} of {network.name} can't be: {why}")
            whole[layer.name] = why
        else:
            shards[index] = layer_shards
    return SplitLayers(shards, whole)


def choose_layers(network: ModelGraph, patterns: Sequence[str]) -> frozenset[int]:
    """Indices of the layers that are to be split, of those that can be, extents aside.

    Args:
        patterns: names of layers, or patterns of them with ``*``, ``?`` and ``[...]``; empty for all.

    Raises:
        UserError: a name that no layer has, of one that can't be split, or a pattern that fits none that can.
    """
    reasons = _reasons_against(network)
    possible = {network.layers[index].name: index for index, reason in reasons.items() if reason is None}
    if not patterns:
        return frozenset(possible.values())
    refused = {network.layers[index].name: reason for index, reason in reasons.items() if reason is not None}
    names = {layer.name for layer in network.layers}
    chosen: set[int] = set()
    for pattern in patterns:
        if pattern in possible:
            chosen.add(possible[pattern])
        elif pattern in names:
            why = refused.get(pattern, "it is neither a convolution nor a fully connected layer")
            raise UserError(f"split layers: {pattern} of {network.name} can't be: {why}")
        elif matching := [name for name in possible if fnmatchcase(name, pattern)]:
            chosen.update(possible[name] for name in matching)
        else:
            raise unknown_choice(f"layer of {network.name} to split", pattern, possible)
    return frozenset(chosen)


def _reasons_against(network: ModelGraph) -> dict[int, str | None]:
    """Per layer of the kinds that are split, by index: why it cannot be, whatever its extents; None where it can."""
    used = Counter(name for layer in network.layers for name in layer.parameters)
    known = {parameter.name for parameter in network.parameters}
    reasons: dict[int, str | None] = {}
    for index, layer in enumerate(network.layers):
        if layer.kind not in SPLIT_KINDS or not layer.input_shapes:
            continue
        if not layer.parameters or not set(layer.parameters) <= known:
            reasons[index] = "its weight is no trained parameter"
        elif len(layer.parameters) != 1 + bool(layer.attributes.get("bias", len(layer.parameters) > 1)):
            reasons[index] = "its weight is computed"
        elif any(used[name] > 1 for name in layer.parameters):
            reasons[index] = "it shares a parameter with another layer"
        else:
            reasons[index] = None
    return reasons


def splittable(network: ModelGraph, patterns: Sequence[str] = ()) -> list[Layer]:
    """Layers that are to be split, of those that can be, extents aside.

    Raises:
        UserError: as :func:`choose_layers`.
    """
    return [network.layers[index] for index in sorted(choose_layers(network, patterns))]


def fewest(network: ModelGraph, axis: str, what: str, extents: Sequence[tuple[str, int]]) -> Limit:
    """The limit that the layer with the fewest filters or channels sets."""
    if not extents:
        return Limit(axis=axis, ranks=1, reason=f"no layer of {network.name} can be split by its {what}")
    name, extent = min(extents, key=lambda pair: pair[1])
    return Limit(axis=axis, ranks=extent, reason=f"fewest {what}, layer {name}")


def check_extent(network: ModelGraph, strategy: Strategy, axis: int, limit: Limit) -> None:
    """Refuse a degree beyond the limit; of a network without layers nothing is known.

    Raises:
        UserError: the degree is larger.
    """
    degree = strategy.axes[axis].degree
    if network.layers and degree > limit.ranks:
        raise UserError(f"strategy {strategy}: {degree} ranks along {strategy.axes[axis]}, but {limit}")


def shard_layer(layer: Layer, shard: ChannelShard) -> Layer:
    """The layer as one rank runs it: its shapes, parameters' shapes aside, and its part of the FLOPs.

    Raises:
        UserError: the layer, of a network's file, has nothing to take a part of.
    """
    filters, channels, groups = channels_of(layer)
    if not filters * (channels // groups):
        raise UserError(f"layer {layer.name} has {channels} channels in {groups} groups and {filters} filters: no part")
    fraction = shard.filters.extent * shard.group_channels.extent / (filters * (channels // groups))
    attributes = dict(layer.attributes)
    if layer.kind == "linear":
        attributes["out_features"] = shard.filters.extent
    else:
        attributes |= {"out_channels": shard.filters.extent, "groups": shard.groups}
    inputs, output = list(layer.input_shapes[0]), list(layer.output_shape)
    inputs[channel_dim(layer, layer.input_shapes[0])] = shard.channels.extent
    output[channel_dim(layer, layer.output_shape)] = shard.filters.extent
    return part_of_layer(
        layer,
        fraction,
        attributes=attributes,
        input_shapes=(tuple(inputs), *layer.input_shapes[1:]),
        output_shape=tuple(output),
        fw_bytes=4 * (math.prod(inputs) + math.prod(output)),
    )


def with_parameter_shapes(network: ModelGraph, shapes: Mapping[str, tuple[int, ...]]) -> ModelGraph:
    """The network with other shapes of some parameters."""
    parameters = tuple(
        msgspec.structs.replace(tensor, shape=shapes.get(tensor.name, tensor.shape)) for tensor in network.parameters
    )
    return msgspec.structs.replace(network, parameters=parameters)


def notes_on(kind: str, split: SplitLayers) -> tuple[str, ...]:
    """Which layers could have been split and were not, and why; those that were not asked for are counted."""
    left = sum(why == NOT_CHOSEN for why in split.whole.values())
    of_choice = (f"{kind} parallelism splits {len(split.shards)} layers, as chosen, and leaves {left} whole",)
    return (
        *(of_choice if left else ()),
        *(
            f"{kind} parallelism does not split layer {name}: {why}"
            for name, why in split.whole.items()
            if why != NOT_CHOSEN
        ),
        *split.gradients.notes,
    )
