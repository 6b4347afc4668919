"""Plan of expert parallelism: ranks see samples of their own, hold some experts each, and send each other tokens.

All but the experts is data parallel over all ranks, and its gradients are exchanged among them. A rank holds equal,
contiguous parts of every expert layer's matrices. Before the first product of a layer ranks tell each other how many
rows come (a number an expert, of 8 bytes), and send the rows; behind the last one they send back what was made of
them. Backward sends gradients the other way. Experts' gradients are exchanged among the ranks that hold the same ones:
along the other axes of the strategy alone.

A rank sends as many rows as its tokens have experts, wherever the router sends them, and gets as many back: these bytes
are planned, and are what a run is held to. How many rows a rank receives depends on the router. The plan says that all
get as many, or that each gets ``--expert-imbalance`` times as many, as the busiest rank, which all wait for.

Source: Lepikhin et al. 2021, "GShard"; Fedus et al. 2022, "Switch Transformers" (experts inside of data parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph, Tensor
from paradl_bench.network.kinds.autocast import widths_of
from paradl_bench.plan.axis_planner import AxisPlace, Latest, PartsHeld, ShardedLayers, part_of_layer, shard_label
from paradl_bench.plan.compute import LayerShard, layers_with_gradient, shard_within
from paradl_bench.plan.mesh import check_batch
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.expert.axis import ExpertOptions
from paradl_bench.strategies.expert.routes import Routes, find_routes
from paradl_bench.strategies.splitting.channel_shards import check_extent

_LATEST: Latest[Routes] = Latest()


def routes_of(network: ModelGraph) -> Routes:
    """How the rows of expert layers go; found once."""
    return _LATEST.get(network, None, lambda: find_routes(network))


class ExpertPlanner:
    """Every rank holds some experts of each expert layer."""

    name = "expert"

    def __init__(self) -> None:
        self._shards: Latest[ShardedLayers] = Latest()

    def check(self, network: ModelGraph, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: a batch or experts that do not split evenly, no experts, or an exchange that knows nodes.
        """
        ranks = strategy.axes[axis].degree
        if ranks > 1 and network.layers:
            check_extent(network, strategy, axis, self.limit(network, settings))
            _check_even(network, strategy, ranks)
        check_batch(strategy, settings.batch)
        exchange = settings.of(ExchangeOptions).exchange
        if exchange != "flat":
            raise UserError(
                f"strategy {strategy}: --exchange {exchange} knows no parameters that some ranks lack, as experts are;"
                " exchange flat"
            )
        imbalance = settings.of(ExpertOptions).expert_imbalance
        if imbalance > ranks:
            raise UserError(
                f"strategy {strategy}: --expert-imbalance {imbalance:g} is more than the {ranks} ranks that share"
                " tokens out; one rank can't get more than all"
            )

    def limit(self, network: ModelGraph, settings: PlanSettings) -> Limit:
        """An expert a rank, of the layer with the fewest."""
        routes = routes_of(network)
        if routes.refused:
            return Limit(
                axis="expert", ranks=1, reason=f"experts of {network.name} can't be shared out: {routes.refused}"
            )
        fewest = routes.fewest
        if fewest is None:
            return Limit(axis="expert", ranks=1, reason=f"{network.name} has no expert layers (grouped products)")
        layer, experts = network.layers[fewest], routes.products[fewest].experts
        return Limit(axis="expert", ranks=experts, reason=f"{experts} experts, layer {layer.name}")

    def parts_held(self, network: ModelGraph, axis: Axis, position: int, settings: PlanSettings) -> PartsHeld:
        """Experts, along the first dim of their matrices."""
        routes, ranks = routes_of(network), axis.degree
        if ranks == 1:
            return {}
        sizes = {product.weight: product.experts // ranks for product in routes.products.values()}
        return {name: (slice(position * size, (position + 1) * size),) for name, size in sizes.items()}

    def shard(self, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
        """See :class:`~paradl_bench.plan.axis_planner.ShardingPlanner`; alike at every position."""
        key = place._replace(position=0), settings
        return self._shards.get(network, key, lambda: _shard(ShardedLayers({}, network), network, place, settings))

    def shard_further(
        self, sharded: ShardedLayers, network: ModelGraph, place: AxisPlace, settings: PlanSettings
    ) -> ShardedLayers:
        """See :class:`~paradl_bench.plan.axis_planner.FurtherPlanner`; alike at every position."""
        key = place._replace(position=0), settings
        return self._shards.get(sharded, key, lambda: _shard(sharded, network, place, settings))


PLANNER = ExpertPlanner()


def _check_even(network: ModelGraph, strategy: Strategy, ranks: int) -> None:
    for index, product in routes_of(network).products.items():
        if product.experts % ranks:
            raise UserError(
                f"strategy {strategy}: {product.experts} experts of layer {network.layers[index].name} do not split"
                f" evenly over {ranks} ranks; give a number of ranks that divides them"
            )


def _shard(sharded: ShardedLayers, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
    """What the rank runs of each layer, where other axes leave it ``sharded``."""
    routes = routes_of(network)
    left = [sharded.shards.get(index) or LayerShard(layer) for index, layer in enumerate(network.layers)]
    ranks, label = place.axis.degree, shard_label(place.axis, settings)
    imbalance = settings.of(ExpertOptions).expert_imbalance
    _check_sums(network, left, routes, place)
    messages = _Messages(network, left, routes, place, settings)
    shards = dict(sharded.shards)
    for index in sorted({*routes.routed, *routes.views, *routes.returned, *messages.gradients}):
        layer = left[index].layer
        own = LayerShard(layer)
        if index in routes.views:
            own = LayerShard(msgspec.structs.replace(layer, output_shape=_fewer(layer.output_shape, ranks)), label)
        elif index in routes.routed:
            own = LayerShard(_on_own_experts(layer, routes, index, ranks, imbalance), label)
        before, made, behind = messages.of(index)
        given = made if index in messages.scattered else ()
        own = own._replace(before_fw=before, after_fw=made, before_bw=given, after_bw=behind)
        shards[index] = shard_within(left[index], own)
    weights = frozenset(product.weight for product in routes.products.values())
    held = tuple(_part(tensor, ranks) if tensor.name in weights else tensor for tensor in sharded.network.parameters)
    return sharded._replace(
        shards={index: shards[index] for index in sorted(shards)},
        network=msgspec.structs.replace(sharded.network, parameters=held),
        apart=sharded.apart | weights,
        together=(*sharded.together, *_together(network, routes, messages)),
    )


def _check_sums(network: ModelGraph, left: list[LayerShard], routes: Routes, place: AxisPlace) -> None:
    """Refuse what another axis would sum of rows that are with their experts: no rank knows how many these are."""
    back = {source for sources in routes.returned.values() for source in sources}
    for index in routes.routed:
        forward = left[index].after_fw and index not in back
        if forward or (left[index].after_bw and index not in routes.sent):
            raise UserError(
                f"strategy {place.axis}: another axis sums rows of layer {network.layers[index].name}"
                f" {'behind' if forward else 'in backward of'} it, where these are with their experts; leave it whole"
                " there (--split)"
            )


def _together(network: ModelGraph, routes: Routes, messages: _Messages) -> Iterator[range]:
    """Spans over which rows of other ranks' tokens, or their numbers, are passed on."""
    place = {network.layers[index].name: index for index in routes.routed}
    for index in routes.routed:
        yield from (range(place[name], index + 1) for name in network.layers[index].inputs if name in place)
    for taken in (routes.returned, messages.gradients):
        yield from (range(source, index + 1) for index, sources in taken.items() for source in sources)
    first: dict[str, int] = {}
    for index, product in routes.products.items():
        yield range(first.setdefault(product.ends, index), index + 1)


class _Messages:
    """What a rank sends around layers.

    Attributes:
        gradients: a layer behind whose backward gradients of rows that came back go to the experts, and the layers that
            made those rows: the first that reads them and has a gradient, as what takes their dtype has none.
        scattered: layers whose rows come back to be scattered along another axis: their gradients, which that axis
            gathers first, go to the experts ahead of their own backward.
    """

    def __init__(
        self, network: ModelGraph, left: list[LayerShard], routes: Routes, place: AxisPlace, settings: PlanSettings
    ) -> None:
        self._network, self._routes, self._place = network, routes, place
        self._layers = [shard.layer for shard in left]
        # What ranks along another axis add up goes back first: its rows are known to be all of the rank's tokens then.
        self._summed = {source for back in routes.returned.values() for source in back if left[source].after_fw}
        self.scattered = {source for source in self._summed if left[source].before_bw}
        self._widths = widths_of(network, settings.dtype, settings.device)
        self._imbalance = settings.of(ExpertOptions).expert_imbalance
        names = (layer.name for layer in network.layers)
        self._differentiated = dict(zip(names, layers_with_gradient(network), strict=True))
        self.gradients: dict[int, list[int]] = {}
        for index, sources in routes.returned.items():
            for source in (source for source in sources if source not in self.scattered):
                self.gradients.setdefault(self._reader(source, index), []).append(source)

    def _reader(self, source: int, first: int) -> int:
        layers = self._network.layers
        behind = range(first, len(layers))
        reads = (i for i in behind if layers[source].name in layers[i].inputs and self._differentiated[layers[i].name])
        return next(reads, first)

    def of(self, index: int) -> tuple[tuple[Collective, ...], tuple[Collective, ...], tuple[Collective, ...]]:
        """Before and behind forward of a layer, and behind its backward."""
        forward, backward = [], []
        if index in self._routes.counted:
            experts = self._routes.products[index].experts
            size = DTYPE_BYTES["int64"]
            numbers = self._place.collective("all_to_all", experts, batchless=True, element_bytes=size)
            forward.append(self._parted(numbers))
        if index in self._routes.sent:
            rows = self._rows(math.prod(self._layers[index].input_shapes[0]), index)
            forward.append(rows)
            if self._differentiated.get(self._routes.products[index].rows, False):
                backward.append(rows)
        back = self._routes.returned.get(index, ())
        forward += (self._made(source) for source in back if source not in self._summed)
        for source in self.gradients.get(index, ()):
            if self._differentiated[self._network.layers[source].name]:
                backward.insert(0, self._made(source))
        return tuple(forward), (self._made(index),) if index in self._summed else (), tuple(backward)

    def _made(self, source: int) -> Collective:
        return self._rows(math.prod(self._layers[source].output_shape), source)

    def _rows(self, elements: int, index: int) -> Collective:
        """The rows of all of a rank's tokens: what the busiest rank sends, and of that what every rank knows."""
        width = self._widths[index].runs
        known = self._parted(self._place.collective("all_to_all", elements, batchless=False, element_bytes=width))
        if self._imbalance == 1:
            return known
        busiest = math.ceil(known.message_bytes * self._imbalance)
        return msgspec.structs.replace(known, message_bytes=busiest, known_bytes=known.message_bytes)

    def _parted(self, whole: Collective) -> Collective:
        """With the bytes for each rank, on average."""
        return msgspec.structs.replace(whole, message_bytes=whole.message_bytes // self._place.axis.degree)


def _on_own_experts(layer: Layer, routes: Routes, index: int, ranks: int, imbalance: float) -> Layer:
    """A layer on the rows of a rank's own experts: as many as those of its tokens, or as the busiest rank has."""
    product, attributes = routes.products.get(index), dict(layer.attributes)

    def rows(shape: tuple[int, ...]) -> tuple[int, ...]:
        # Of one row a sample the shape is that of the row.
        whole = shape if len(shape) > 1 else (1, *shape)
        number = math.ceil(whole[0] * imbalance)
        return shape if imbalance == 1 else (number, *whole[1:]) if number > 1 else shape

    inputs = [rows(shape) for shape in layer.input_shapes]
    if product is not None:
        attributes["groups"] = product.experts // ranks
        inputs[1:] = (_fewer(shape, ranks) for shape in layer.input_shapes[1:])
    output, *further = map(rows, layer.output_shapes)
    if "output" in attributes:
        attributes["output"] = output
    return part_of_layer(
        layer,
        imbalance,
        attributes=attributes,
        input_shapes=tuple(inputs),
        output_shape=output,
        further_outputs=tuple(further),
        fw_bytes=round(layer.fw_bytes * imbalance),
    )


def _fewer(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """A shape whose first dim is that of the experts, on one rank."""
    return (shape[0] // ranks, *shape[1:])


def _part(tensor: Tensor, ranks: int) -> Tensor:
    return msgspec.structs.replace(tensor, shape=_fewer(tensor.shape, ranks))
