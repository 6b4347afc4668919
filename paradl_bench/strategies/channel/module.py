"""Channel parallel layers: some channels of the input, partial sums of all filters, reduced (ParaDL, section 3.4)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from paradl_bench.layers.kind import layer_kinds
from paradl_bench.spec.network import Layer, Network
from paradl_bench.spec.partition import shard_channels
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import Axis
from paradl_bench.strategies.channel_shards import Shards, channels_of, split_layers
from paradl_bench.strategies.group_functions import Group, axis_slices, reduce, take
from paradl_bench.strategies.sharded_module import (
    Call,
    Rule,
    Sharding,
    bind,
    channel_dim,
    replace_parameter,
    with_shapes_of,
)


class ChannelRunner:
    """Replaces weights by this rank's input channels of them; biases stay whole.

    Outputs, input gradients and the gradients of all parameters are those of the serial model.
    """

    name = "channel"

    def shard(
        self, module: torch.nn.Module, network: Network, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """See :class:`~paradl_bench.strategies.sharded_module.AxisRunner`."""
        return Sharding(_shard(module, network, group), with_shapes_of(network, module))


RUNNER = ChannelRunner()


def _shard(module: torch.nn.Module, network: Network, group: Group) -> dict[int, Rule]:
    kinds = layer_kinds()
    rules = {}
    for index, shards in split_layers(network, group.size, shard_channels).shards.items():
        layer = network.layers[index]
        own = shards[group.rank]
        weight = module.get_parameter(layer.parameters[0])
        part = weight[own.filters.start : own.filters.stop, own.group_channels.start : own.group_channels.stop]
        replace_parameter(module, layer.parameters[0], part)
        rules[index] = Rule(frozenset(kinds[layer.kind].functions), _ChannelLayer(layer, shards, group))
    return rules


class _ChannelLayer:
    """One layer: forward all-reduce of partial sums, backward all-gather of the input's gradient.

    Where ranks hold whole groups their filters differ; each adds zeros for those of others.
    """

    def __init__(self, layer: Layer, shards: Shards, group: Group) -> None:
        self._layer, self._group = layer, group
        self._own = shards[group.rank]
        self._channels = [shard.channels for shard in shards]
        self._filters = channels_of(layer)[0]

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        given = bind(self._layer, args, kwargs)
        bias = given.pop("bias", None)
        dim = channel_dim(self._layer, given["input"])
        given["input"] = take(given["input"], axis_slices(self._channels, dim), self._group)
        if self._layer.kind == "conv":
            given["groups"] = self._own.groups
        partial = function(**given)
        behind = partial.dim() - dim - 1
        own = self._own.filters
        if own.extent < self._filters:
            partial = F.pad(partial, (0, 0) * behind + (own.start, self._filters - own.stop))
        whole = reduce(partial, self._group)
        return whole if bias is None else whole + bias.view(-1, *(1,) * behind)
