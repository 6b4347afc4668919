"""What the plans of filter and channel parallelism have in common: which layers are split, and what each rank holds.

ParaDL, sections 3.3 and 3.4, and Table 3. Convolutions and fully connected layers are split; what is between them runs
whole on every rank, on gathered or summed activations. The folders say what is communicated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.autocast import widths_of
from paradl_bench.plan.axis_planner import AxisPlace, Latest, PartsHeld, ShardedLayers, shard_label
from paradl_bench.plan.compute import LayerShard, input_needs_gradient
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.splitting.channel_shards import (
    Shards,
    SplitLayers,
    Splitting,
    check_extent,
    fewest,
    notes_on,
    shard_layer,
    splittable,
    with_parameter_shapes,
)
from paradl_bench.strategies.splitting.gradient_parts import Parts
from paradl_bench.strategies.splitting.options import FilterOptions, SplitOptions


class SplitPlanner(ABC):
    """Plans an axis whose ranks split the same layers."""

    def __init__(self, splitting: Splitting) -> None:
        self.name = splitting.name
        self._splitting = splitting
        self._latest: Latest[SplitLayers] = Latest()

    @abstractmethod
    def extents(self, network: ModelGraph, layers: Sequence[Layer]) -> list[tuple[str, int]]:
        """Names of the layers that limit the axis, and how many filters or channels each has."""

    @abstractmethod
    def forward(self, layer: Layer, shards: Shards, place: AxisPlace) -> Collective:
        """What is communicated after forward of a layer that is split."""

    @abstractmethod
    def backward(self, layer: Layer, shards: Shards, place: AxisPlace, parts: Parts | None) -> Collective:
        """What is communicated after its backward, if backward makes a gradient of its input.

        Args:
            parts: of that gradient, which ranks need; None for all of it.
        """

    def check(self, network: ModelGraph, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: a layer that counts has fewer filters or channels than the axis has ranks, no layer can be split so
            often, or those that were chosen are not there.
        """
        if not network.layers:
            return
        check_extent(network, strategy, axis, self.limit(network, settings))
        split = self._split(network, strategy.axes[axis].degree, settings)
        if not split.shards:
            name, why = next(iter(split.whole.items()))
            raise UserError(f"strategy {strategy}: {strategy.axes[axis]} would split no layer; of {name}, {why}")

    def limit(self, network: ModelGraph, settings: PlanSettings) -> Limit:
        """The fewest filters or channels of any layer that counts (ParaDL, Table 3)."""
        extents = self.extents(network, splittable(network, settings.of(SplitOptions).split))
        return fewest(network, self.name, self._splitting.what, extents)

    def _split(self, network: ModelGraph, ranks: int, settings: PlanSettings) -> SplitLayers:
        key = ranks, settings.of(SplitOptions).split, settings.of(FilterOptions).filter_backward
        return self._latest.get(network, key, lambda: self._splitting.layers(network, ranks, settings))

    def parts_held(self, network: ModelGraph, axis: Axis, position: int, settings: PlanSettings) -> PartsHeld:
        """See :class:`~paradl_bench.plan.axis_planner.ShardingPlanner`."""
        parts: PartsHeld = {}
        for index, of_ranks in self._split(network, axis.degree, settings).shards.items():
            held = self._splitting.parameter_parts(network.layers[index], of_ranks[position])
            parts |= {name: tuple(slice(*interval) for interval in intervals) for name, intervals in held.items()}
        return parts

    def shard(self, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
        """See :class:`~paradl_bench.plan.axis_planner.ShardingPlanner`."""
        split = self._split(network, place.axis.degree, settings)
        differentiated = input_needs_gradient(network)
        of_parameters = {tensor.name: tensor.shape for tensor in network.parameters}
        label = shard_label(place.axis, settings)
        widths = widths_of(network, settings.dtype, settings.device)
        shards, shapes = {}, {}
        for index, of_ranks in split.shards.items():
            layer, shard = network.layers[index], of_ranks[place.position]
            place = place._replace(element_bytes=widths[index].runs)
            for name, held in self._splitting.parameter_parts(layer, shard).items():
                extents = tuple(interval.extent for interval in held)
                shapes[name] = (*extents, *of_parameters[name][len(extents) :])
            backward = self.backward(layer, of_ranks, place, split.gradients.parts.get(index))
            shards[index] = LayerShard(
                shard_layer(layer, shard),
                label,
                after_fw=(self.forward(layer, of_ranks, place),),
                after_bw=(backward,) if differentiated[index] else (),
            )
        of_rank = with_parameter_shapes(network, shapes)
        if not self._splitting.splits_outputs:
            of_rank = _biases_first(of_rank, [network.layers[index] for index in split.shards])
        return ShardedLayers(shards, of_rank, notes_on(self.name, split))


def _biases_first(network: ModelGraph, layers: Sequence[Layer]) -> ModelGraph:
    """The network with gradients in the order of a run whose layers add their whole biases behind the communication."""
    bias_of = {weight: bias for layer in layers for weight, *bias in (layer.parameters,)}
    later = {name for bias in bias_of.values() for name in bias}
    order = [
        parameter
        for name in network.gradient_order
        if name not in later
        for parameter in (*bias_of.get(name, ()), name)
    ]
    return msgspec.structs.replace(network, gradient_order=tuple(order))
