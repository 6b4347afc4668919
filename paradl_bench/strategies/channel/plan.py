"""Plan of channel parallelism: partial sums are all-reduced forward, input gradients all-gathered backward.

ParaDL, section 3.4 and Table 3. Convolutions and fully connected layers are split, the first one only where the input
has channels enough; what is between them runs whole on every rank.
"""

from __future__ import annotations

import math

from paradl_bench.spec.network import DTYPE_BYTES, Network
from paradl_bench.spec.partition import shard_channels
from paradl_bench.spec.plan import Collective, Limit, PlanSettings
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.axis_planner import Latest, SharedLayers
from paradl_bench.strategies.channel_shards import (
    SplitLayers,
    channels_of,
    check_extent,
    fewest,
    input_needs_gradient,
    notes_on,
    shard_layer,
    split_layers,
    splittable,
    with_parameter_shapes,
)
from paradl_bench.strategies.compute import LayerShard

_ELEMENT_BYTES = DTYPE_BYTES["fp32"]


class ChannelPlanner:
    """Every rank computes with some of the input channels of each convolution and fully connected layer."""

    name = "channel"

    def __init__(self) -> None:
        self._latest: Latest[SplitLayers] = Latest()

    def check(self, network: Network, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: a layer behind the first one has fewer channels than the axis has ranks.
        """
        check_extent(network, strategy, axis, self.limit(network, settings))

    def limit(self, network: Network, settings: PlanSettings) -> Limit:
        """The fewest input channels of any layer behind the first ones (ParaDL, Table 3).

        Layers that read what no parameter has touched, as images of 3 channels, run whole where they have too few.
        """
        differentiated = zip(network.layers, input_needs_gradient(network), strict=True)
        first = {layer.name for layer, needed in differentiated if not needed}
        layers = splittable(network)
        counting = [layer for layer in layers if layer.name not in first] or layers
        return fewest(network, "channel", "channels", [(layer.name, channels_of(layer)[1]) for layer in counting])

    def share(self, network: Network, strategy: Strategy, axis: int, position: int, local_batch: int) -> SharedLayers:
        """See :class:`~paradl_bench.strategies.axis_planner.SharingPlanner`."""
        parts = strategy.axes[axis].degree
        split = self._latest.get(network, parts, lambda: split_layers(network, parts, shard_channels))
        differentiated = input_needs_gradient(network)
        weights = {tensor.name: tensor for tensor in network.parameters}
        shards, shapes = {}, {}
        for index, of_ranks in split.shards.items():
            layer = network.layers[index]
            own = of_ranks[position]
            weight = weights[layer.parameters[0]]
            shapes[weight.name] = (own.filters.extent, own.group_channels.extent, *weight.shape[2:])
            positions = math.prod(layer.input_shapes[0]) // channels_of(layer)[1]
            longest = max(shard.channels.extent for shard in of_ranks) * positions
            after_bw = (_collective("all_gather", longest * local_batch, parts, axis),)
            shards[index] = LayerShard(
                shard_layer(layer, own),
                f"c{parts}",
                after_fw=(_collective("all_reduce", math.prod(layer.output_shape) * local_batch, parts, axis),),
                after_bw=after_bw if differentiated[index] else (),
            )
        return SharedLayers(shards, with_parameter_shapes(network, shapes), notes_on("channel", split))


PLANNER = ChannelPlanner()


def _collective(operation: str, elements: int, ranks: int, axis: int) -> Collective:
    return Collective(operation=operation, message_bytes=elements * _ELEMENT_BYTES, ranks=ranks, axes=(axis,))
