"""Filter parallel layers: all of the input, some of the filters, outputs gathered (ParaDL, section 3.3)."""

from __future__ import annotations

from typing import Any

import torch

from paradl_bench.layers.kind import layer_kinds
from paradl_bench.spec.network import Layer, Network
from paradl_bench.spec.partition import shard_filters
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import Axis
from paradl_bench.strategies.channel_shards import Shards, split_layers
from paradl_bench.strategies.group_functions import (
    Group,
    axis_slices,
    gather,
    reduce_gradient,
)
from paradl_bench.strategies.sharded_module import (
    Call,
    Rule,
    Sharding,
    bind,
    channel_dim,
    replace_parameter,
    with_shapes_of,
)


class FilterRunner:
    """Replaces weights and biases by this rank's filters of them.

    Outputs, input gradients and the gradients of all parameters are those of the serial model.
    """

    name = "filter"

    def shard(
        self, module: torch.nn.Module, network: Network, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """See :class:`~paradl_bench.strategies.sharded_module.AxisRunner`."""
        return Sharding(_shard(module, network, group), with_shapes_of(network, module))


RUNNER = FilterRunner()


def _shard(module: torch.nn.Module, network: Network, group: Group) -> dict[int, Rule]:
    kinds = layer_kinds()
    rules = {}
    for index, shards in split_layers(network, group.size, shard_filters).shards.items():
        layer = network.layers[index]
        own = shards[group.rank].filters
        for name in layer.parameters:
            replace_parameter(module, name, module.get_parameter(name)[own.start : own.stop])
        rules[index] = Rule(frozenset(kinds[layer.kind].functions), _FilterLayer(layer, shards, group))
    return rules


class _FilterLayer:
    """One layer: forward all-gather of outputs, backward all-reduce of the input's gradient."""

    def __init__(self, layer: Layer, shards: Shards, group: Group) -> None:
        self._layer, self._group = layer, group
        self._own = shards[group.rank]
        self._filters = [shard.filters for shard in shards]

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        given = bind(self._layer, args, kwargs)
        whole = reduce_gradient(given["input"], self._group)
        dim = channel_dim(self._layer, whole)
        channels = self._own.channels
        given["input"] = whole
        if channels.extent < whole.shape[dim]:
            given["input"] = whole.narrow(dim, channels.start, channels.extent)
        if self._layer.kind == "conv":
            given["groups"] = self._own.groups
        part = function(**given)
        shape = list(part.shape)
        shape[dim] = self._filters[-1].stop
        return gather(part, axis_slices(self._filters, dim), shape, self._group)
