"""Which batch normalisations take their statistics over several ranks, and what that communicates.

Local statistics are those of the samples and positions that a rank holds: another function than the serial model's.
Synchronised ones are the serial model's: each channel's count, sum and sum of squares are all-reduced in forward, and
the two sums that the input's gradient needs in backward. One answer for the plan and for the run.
"""

from __future__ import annotations

from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import ShardedLayers
from paradl_bench.plan.compute import LayerShard, input_needs_gradient
from paradl_bench.plan.mesh import group_axes, ranks_along
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.spatial.region import region_of

SUMS = 2
"""Sums a channel, in each direction. Forward's are fp64, so that a mean far from 0 costs no digits of the variance."""


def statistics_axes(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> dict[int, tuple[int, ...]]:
    """Per index of a batch normalisation whose mini-batch several ranks hold parts of, the axes that these lie along.

    Ranks along a spatial axis hold parts of it only inside the spatial region.
    """
    everywhere = group_axes(strategy, Trait.DIVIDES_BATCH)
    inside = group_axes(strategy, Trait.REPLICATES)
    cut = _cut_layers(network, strategy, settings)
    axes_by_layer = {}
    for index, layer in enumerate(network.layers):
        axes = inside if index in cut else everywhere
        if layer.kind == "batch_norm" and layer.attributes["training"] and ranks_along(strategy, axes) > 1:
            axes_by_layer[index] = axes
    return axes_by_layer


def _cut_layers(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> set[int]:
    for axis in strategy.axes:
        if axis.has(Trait.CUTS_POSITIONS) and axis.degree > 1:
            return set(region_of(network, axis, settings).layers)
    return set()


def synchronise_norms(
    sharded: ShardedLayers, network: ModelGraph, strategy: Strategy, settings: PlanSettings
) -> ShardedLayers:
    """The layers with the all-reduces of synchronised batch normalisation.

    Their place in the plan is before the layer's forward and behind its backward; in a run they are between the two
    kernels of each. What normalising in two kernels costs more than in one is not modelled.
    """
    differentiated = input_needs_gradient(network)
    shards = dict(sharded.shards)
    for index, axes in statistics_axes(network, strategy, settings).items():
        layer = network.layers[index]
        shard = shards.get(index) or LayerShard(layer)
        ranks = ranks_along(strategy, axes)
        forward, backward = (
            Collective(operation="all_reduce", message_bytes=size, ranks=ranks, axes=axes) for size in _sizes(layer)
        )
        shards[index] = shard._replace(
            before_fw=(*shard.before_fw, forward),
            after_bw=((backward, *shard.after_bw) if differentiated[index] else shard.after_bw),
        )
    return sharded._replace(shards=shards)


def _sizes(layer: Layer) -> tuple[int, int]:
    """Bytes of forward's all-reduce (with the count) and of backward's."""
    channels = layer.output_shape[0]
    return (SUMS * channels + 1) * DTYPE_BYTES["fp64"], SUMS * channels * DTYPE_BYTES[layer.dtype]
