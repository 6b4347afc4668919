"""Plan of spatial parallelism: halos before every window and, for their gradients, behind it; a gather where it ends.

ParaDL, section 3.2 and Table 3. Every rank holds all parameters and computes a block of positions; gradients are then
exchanged as in data parallelism, over all ranks (:mod:`paradl_bench.strategies.nesting.nested_plan`). What is behind
the gather runs whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.autocast import Width, widths_of
from paradl_bench.network.partition import Box, Transfer, box_elements
from paradl_bench.plan.axis_planner import AxisPlace, Latest, PartsHeld, ShardedLayers, part_of_layer, shard_label
from paradl_bench.plan.compute import LayerShard, input_needs_gradient
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.plan.tasks import Collective, Communication, HaloExchange
from paradl_bench.strategies.spatial.axis import SpatialOptions
from paradl_bench.strategies.spatial.region import BlockLayer, Region, gathered_bytes, most_parts, region_of


class SpatialPlanner:
    """Every rank computes a block of positions, up to the layer that needs all of them."""

    name = "spatial"

    def __init__(self) -> None:
        self._layers: Latest[dict[tuple[object, ...], Layer]] = Latest()

    def _block_layer(self, network: ModelGraph, index: int, block: BlockLayer, position: int) -> Layer:
        """The layer as a rank runs it; one object for all ranks that run it alike."""
        known = self._layers.get(network, None, dict)
        read = block.halos[position].read if block.halos is not None else ()
        key = index, _extents(block.boxes[position]), _extents(read)
        if key not in known:
            known[key] = _block_layer(network.layers[index], block, position)
        return known[key]

    def check(self, network: ModelGraph, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: the input has fewer positions than parts, no layer could be cut, or none has the name of the one
            before which the region is to end.
        """
        if network.layers and strategy.axes[axis].degree > 1:
            region_of(network, strategy.axes[axis], settings)

    def limit(self, network: ModelGraph, settings: PlanSettings) -> Limit:
        """One position a rank at least in the layers that can be cut furthest.

        The paper's limit, the fewest positions of any layer, is that of networks that are cut to their end; here the
        region ends before the first layer that has too few.
        """
        most = self.most_parts(network, settings)
        if most is None:
            return Limit(axis="spatial", ranks=1, reason=f"no layer of {network.name} has windows over positions")
        extents, name = most
        text = "x".join(map(str, extents))
        return Limit(axis="spatial", ranks=math.prod(extents), reason=f"at most {text} parts, layer {name}")

    def most_parts(self, network: ModelGraph, settings: PlanSettings) -> tuple[tuple[int, ...], str] | None:
        """See :class:`~paradl_bench.plan.axis_planner.DimsPlanner`."""
        return most_parts(network, until=settings.of(SpatialOptions).spatial_until)

    def parts_held(self, network: ModelGraph, axis: Axis, position: int, settings: PlanSettings) -> PartsHeld:
        """Every parameter is whole on every rank."""
        return {}

    def shard(self, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
        """See :class:`~paradl_bench.plan.axis_planner.ShardingPlanner`."""
        region, label = region_of(network, place.axis, settings), shard_label(place.axis, settings)
        differentiated = input_needs_gradient(network)
        widths = widths_of(network, settings.dtype, settings.device)
        gathers = _gathers(network, region, place, widths)
        shards = {}
        for index, layer in enumerate(network.layers):
            if index in region.layers:
                block = region.layers[index]
                forward, backward = _halos(layer, block, place._replace(element_bytes=widths[index].runs))
                shards[index] = LayerShard(
                    self._block_layer(network, index, block, place.position),
                    label,
                    before_fw=forward,
                    after_bw=backward if differentiated[index] else (),
                )
            elif index in region.gathered:
                shards[index] = LayerShard(layer, before_fw=tuple(gathers[name] for name in region.gathered[index]))
        return ShardedLayers(shards, network, (f"spatial parallelism ends before {region.end}",), gathers)


PLANNER = SpatialPlanner()


def _halos(
    layer: Layer, block: BlockLayer, place: AxisPlace
) -> tuple[tuple[Communication, ...], tuple[Communication, ...]]:
    """The halo before forward, and that of gradients after backward, which goes the other way."""
    if block.halos is None:
        return (), ()
    halo = block.halos[place.position]
    if not halo.sends and not halo.receives:
        return (), ()
    bytes_a_position = layer.input_shapes[0][0] * place.local_batch * place.element_bytes
    sends, receives = (_message_bytes(part, bytes_a_position) for part in (halo.sends, halo.receives))
    return (
        (HaloExchange(sends_bytes=sends, receives_bytes=receives, axes=(place.axis_index,)),),
        (HaloExchange(sends_bytes=receives, receives_bytes=sends, axes=(place.axis_index,)),),
    )


def _message_bytes(transfers: Sequence[Transfer], bytes_a_position: int) -> tuple[int, ...]:
    return tuple(box_elements(transfer.box) * bytes_a_position for transfer in transfers)


def _gathers(
    network: ModelGraph, region: Region, place: AxisPlace, widths: Sequence[Width]
) -> dict[str, Communication]:
    """By name of a layer whose blocks are gathered, what gathers them."""
    of_names = {network.layers[index].name: index for index in region.layers}
    indices = {name: of_names[name] for of_layer in region.gathered.values() for name in of_layer}
    sizes = {
        name: gathered_bytes(network, index, region.layers[index].boxes, widths[index].runs) * place.local_batch
        for name, index in indices.items()
    }
    return {
        name: Collective(operation="all_gather", message_bytes=size, ranks=place.axis.degree, axes=(place.axis_index,))
        for name, size in sizes.items()
    }


def _block_layer(layer: Layer, block: BlockLayer, position: int) -> Layer:
    """The layer as one rank runs it: on what its windows read, which holds their padding already."""
    box = block.boxes[position]
    output = (layer.output_shape[0], *_extents(box))
    attributes = dict(layer.attributes)
    if block.halos is None:
        inputs = tuple((shape[0], *_extents(box)) for shape in layer.input_shapes)
    else:
        inputs = ((layer.input_shapes[0][0], *_extents(block.halos[position].read)),)
        attributes["padding"] = (0,) * len(box)
        if "ceil_mode" in attributes:
            attributes["ceil_mode"] = False
    fraction = math.prod(output) / max(layer.output_elements, 1)
    return part_of_layer(
        layer,
        fraction,
        attributes=attributes,
        input_shapes=inputs,
        output_shape=output,
        fw_bytes=round(layer.fw_bytes * fraction),
    )


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(interval.extent for interval in box)
