"""Plan of filter parallelism: outputs are all-gathered forward, input gradients all-reduced backward.

ParaDL, section 3.3 and Table 3. A layer whose input needs no gradient (the first one) has no all-reduce. Where ranks
need no more than their part of the gradient a reduce-scatter can take its place (footnote 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.partition import shard_filters
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.filter.axis import AXIS
from paradl_bench.strategies.splitting.channel_shards import Shards, Splitting, channels_of
from paradl_bench.strategies.splitting.gradient_parts import Parts
from paradl_bench.strategies.splitting.split_planner import SplitPlanner

FILTERS = Splitting(name=AXIS.name, what="filters", cut=shard_filters, splits_outputs=True)


class FilterPlanner(SplitPlanner):
    """Every rank computes some of the filters of each convolution and fully connected layer."""

    def extents(self, network: ModelGraph, layers: Sequence[Layer]) -> list[tuple[str, int]]:
        """Filters of every layer that is split."""
        return [(layer.name, channels_of(layer)[0]) for layer in layers]

    def forward(self, layer: Layer, shards: Shards, place: AxisPlace) -> Collective:
        """An all-gather of the output; uneven parts are sent as long as the longest."""
        positions = math.prod(layer.output_shape) // channels_of(layer)[0]
        longest = max(shard.filters.extent for shard in shards)
        return place.collective("all_gather", longest * positions, batchless=layer.batchless)

    def backward(self, layer: Layer, shards: Shards, place: AxisPlace, parts: Parts | None) -> Collective:
        """An all-reduce of the input's gradient, of which every rank has what its filters make of it.

        Or a reduce-scatter of its parts; uneven ones are sent as long as the longest.
        """
        elements, batchless = math.prod(layer.input_shapes[0]), 0 in layer.batchless_inputs
        if parts is None:
            return place.collective("all_reduce", elements, batchless=batchless)
        longest = max(part.extent for part in parts)
        return place.collective("reduce_scatter", longest * (elements // channels_of(layer)[1]), batchless=batchless)


PLANNER = FilterPlanner(FILTERS)
