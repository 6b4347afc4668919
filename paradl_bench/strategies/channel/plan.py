"""Plan of channel parallelism: partial sums are all-reduced forward, input gradients all-gathered backward.

ParaDL, section 3.4 and Table 3. The first layer is split only where the input has channels enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.partition import shard_channels
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.compute import input_needs_gradient
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.channel.axis import AXIS
from paradl_bench.strategies.splitting.channel_shards import Shards, Splitting, channels_of
from paradl_bench.strategies.splitting.gradient_parts import Parts
from paradl_bench.strategies.splitting.split_planner import SplitPlanner

CHANNELS = Splitting(name=AXIS.name, what="channels", cut=shard_channels, splits_outputs=False)


class ChannelPlanner(SplitPlanner):
    """Every rank computes with some of the input channels of each convolution and fully connected layer."""

    def extents(self, network: ModelGraph, layers: Sequence[Layer]) -> list[tuple[str, int]]:
        """Input channels of every layer that is split, the first ones aside.

        Layers that read what no parameter has touched, as images of 3 channels, run whole where they have too few.
        """
        differentiated = zip(network.layers, input_needs_gradient(network), strict=True)
        first = {layer.name for layer, needed in differentiated if not needed}
        counting = [layer for layer in layers if layer.name not in first] or layers
        return [(layer.name, channels_of(layer)[1]) for layer in counting]

    def forward(self, layer: Layer, shards: Shards, place: AxisPlace) -> Collective:
        """An all-reduce of partial sums of the output."""
        return place.collective("all_reduce", math.prod(layer.output_shape), batchless=layer.batchless)

    def backward(self, layer: Layer, shards: Shards, place: AxisPlace, parts: Parts | None) -> Collective:
        """An all-gather of the input's gradient; uneven parts are sent as long as the longest."""
        positions = math.prod(layer.input_shapes[0]) // channels_of(layer)[1]
        longest = max(shard.channels.extent for shard in shards)
        return place.collective("all_gather", longest * positions, batchless=0 in layer.batchless_inputs)


PLANNER = ChannelPlanner(CHANNELS)
