"""Plan of filter parallelism: outputs are all-gathered forward, input gradients all-reduced backward.

ParaDL, section 3.3 and Table 3. Convolutions and fully connected layers are split; what is between them runs whole on
every rank, on gathered activations. A layer whose input needs no gradient (the first one) has no all-reduce.
"""

from __future__ import annotations

import math

from paradl_bench.spec.network import DTYPE_BYTES, Network
from paradl_bench.spec.partition import shard_filters
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


class FilterPlanner:
    """Every rank computes some of the filters of each convolution and fully connected layer."""

    name = "filter"

    def __init__(self) -> None:
        self._latest: Latest[SplitLayers] = Latest()

    def check(self, network: Network, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: a layer has fewer filters than the axis has ranks.
        """
        check_extent(network, strategy, axis, self.limit(network, settings))

    def limit(self, network: Network, settings: PlanSettings) -> Limit:
        """The fewest filters of any layer that is split (ParaDL, Table 3)."""
        extents = [(layer.name, channels_of(layer)[0]) for layer in splittable(network)]
        return fewest(network, "filter", "filters", extents)

    def share(self, network: Network, strategy: Strategy, axis: int, position: int, local_batch: int) -> SharedLayers:
        """See :class:`~paradl_bench.strategies.axis_planner.SharingPlanner`."""
        parts = strategy.axes[axis].degree
        split = self._latest.get(network, parts, lambda: split_layers(network, parts, shard_filters))
        differentiated = input_needs_gradient(network)
        shards, shapes = {}, {}
        for index, of_ranks in split.shards.items():
            layer = network.layers[index]
            own = of_ranks[position]
            for parameter in (t for t in network.parameters if t.name in layer.parameters):
                shapes[parameter.name] = (own.filters.extent, *parameter.shape[1:])
            positions = math.prod(layer.output_shape) // channels_of(layer)[0]
            longest = max(shard.filters.extent for shard in of_ranks) * positions
            after_bw = (_collective("all_reduce", math.prod(layer.input_shapes[0]) * local_batch, parts, axis),)
            shards[index] = LayerShard(
                shard_layer(layer, own),
                f"f{parts}",
                after_fw=(_collective("all_gather", longest * local_batch, parts, axis),),
                after_bw=after_bw if differentiated[index] else (),
            )
        return SharedLayers(shards, with_parameter_shapes(network, shapes), notes_on("filter", split))


PLANNER = FilterPlanner()


def _collective(operation: str, elements: int, ranks: int, axis: int) -> Collective:
    return Collective(operation=operation, message_bytes=elements * _ELEMENT_BYTES, ranks=ranks, axes=(axis,))
