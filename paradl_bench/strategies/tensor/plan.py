"""Plan of tensor parallelism: linear layers in pairs, the first by columns, the second by rows (Megatron-LM).

Between the two every rank works on its own features or heads. Forward has one all-reduce, of the sums behind the layer
by rows; backward one, of the gradient of what the layers by columns read, shared by those that read the same tensor, as
queries, keys and values do. What is in no pair runs whole on every rank, on whole activations: norms, embeddings of
positions. Parameters of those get the same gradient everywhere. The head of a language model, its loss and its
embedding of tokens are cut over the vocabulary (:mod:`.vocabulary.parts`).

Both all-reduces are of the dtype that the products run in: autocast converts what layers by columns read once for all
of them, in front of the point where its gradient is summed.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; torch.distributed.tensor.parallel's ColwiseParallel and
RowwiseParallel, which issue the same all-reduces where the layers by columns are given one input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.autocast import Width, widths_of
from paradl_bench.network.partition import Interval, cut
from paradl_bench.plan.axis_planner import AxisPlace, Latest, PartsHeld, ShardedLayers, part_of_layer, shard_label
from paradl_bench.plan.compute import LayerShard, input_needs_gradient
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.splitting.channel_shards import check_extent, with_parameter_shapes
from paradl_bench.strategies.splitting.grouped_products import GROUPED
from paradl_bench.strategies.splitting.options import SplitOptions
from paradl_bench.strategies.tensor.cuts import Cut, is_view
from paradl_bench.strategies.tensor.pairs import WHOLE_OUTPUT, Pairs, Piece, find_pairs
from paradl_bench.strategies.tensor.sequence.options import SequenceOptions
from paradl_bench.strategies.tensor.sequence.parts import (
    Messages,
    SequenceParts,
    find_parts,
    refuse_sequence,
    shards_of_tokens,
    with_messages,
)
from paradl_bench.strategies.tensor.summed import arriving_summed, sum_of, summed_parameters
from paradl_bench.strategies.tensor.vocabulary.parts import loss_memory, sums_of_loss, table_part

Ranges = tuple[Interval, ...]


class TensorPlanner:
    """Every rank computes with some of the heads or features of each pair of linear layers."""

    name = "tensor"

    def __init__(self) -> None:
        self._latest: Latest[Pairs] = Latest()
        self._shards: Latest[ShardedLayers] = Latest()
        self._sequence: Latest[SequenceParts] = Latest()
        self._of_pieces: Latest[dict[tuple[int, int], LayerShard]] = Latest()
        self._of_tokens: Latest[dict[int, LayerShard]] = Latest()

    def check(self, network: ModelGraph, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: the network has no pair of linear layers, or one with fewer heads or features than ranks.
        """
        if network.layers:
            check_extent(network, strategy, axis, self.limit(network, settings))
        if settings.of(SequenceOptions).on and strategy.axes[axis].degree > 1:
            # Of an empty network, what no network could make right.
            parts = self._parts(network, settings) if network.layers else SequenceParts(0, {})
            refuse_sequence(strategy, strategy.axes[axis].degree, parts)

    def limit(self, network: ModelGraph, settings: PlanSettings) -> Limit:
        """The fewest heads or features of any pair."""
        pairs = self._pairs(network, settings)
        narrowest = pairs.narrowest(network)
        if narrowest is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(pairs.whole.items())[-2:])
            reason = f"no linear layer of {network.name} feeds another one through operations that can be cut"
            return Limit(axis="tensor", ranks=1, reason=f"{reason} ({reasons})" if reasons else reason)
        atoms, index = narrowest
        layer = network.layers[index]
        what = "features" if pairs.pieces[index].cut.extent(layer.output_shape) == atoms else "heads"
        return Limit(axis="tensor", ranks=atoms, reason=f"fewest {what}, layer {layer.name}")

    def parts_held(self, network: ModelGraph, axis: Axis, position: int, settings: PlanSettings) -> PartsHeld:
        """See :class:`~paradl_bench.plan.axis_planner.ShardingPlanner`."""
        held = parameter_ranges(network, self._pairs(network, settings), axis.degree, position)
        return {
            name: (*(slice(None),) * dim, [at for interval in ranges for at in range(*interval)])
            for name, (dim, ranges) in held.items()
        }

    def shard(self, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
        """See :class:`~paradl_bench.plan.axis_planner.ShardingPlanner`."""
        atoms = {piece.atoms for piece in self._pairs(network, settings).pieces.values()}
        # Ranks with as many heads and features of each pair run the same, wherever these are.
        extents = tuple((count, cut(count, place.axis.degree)[place.position].extent) for count in sorted(atoms))
        key = place._replace(position=0), settings, extents
        return self._shards.get(network, key, lambda: self._shard(network, place, settings))

    def _shard(self, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
        pairs, label = self._pairs(network, settings), shard_label(place.axis, settings)
        sequence = self._parts(network, settings) if settings.of(SequenceOptions).on else None
        sizes = {tensor.name: tensor.bytes for tensor in network.parameters}
        messages = Messages(place, sequence, sizes) if sequence else None
        # Ranks that differ do so in few layers: those of a vocabulary that does not part evenly.
        alike = place._replace(position=0), settings
        known = self._of_pieces.get(network, alike, dict)
        wanted = {
            (index, cut(piece.atoms, place.axis.degree)[place.position].extent): piece
            for index, piece in pairs.pieces.items()
        }
        anew = {key: piece for key, piece in wanted.items() if key not in known}
        summed = summed_parameters(network, pairs, on_sequence=sequence is not None)
        sums = {index: sum_of(index, summed, sizes, place) for index in summed}
        known |= _shards_of_pieces(network, anew, place, settings, sums, sequence, messages)
        shards = {key[0]: known[key] for key in wanted}
        shards |= {
            linear.view: LayerShard(
                msgspec.structs.replace(network.layers[linear.view], output_shape=shards[index].layer.input_shapes[1]),
                label,
            )
            for index, linear in pairs.linear.items()
            if linear.view is not None
        }
        if sequence and messages:
            shards |= self._of_tokens.get(
                network, alike, lambda: shards_of_tokens(network, pairs, sequence, messages, label)
            )
        held = parameter_ranges(network, pairs, place.axis.degree, place.position)
        shapes_known = {tensor.name: tensor.shape for tensor in network.parameters}
        shapes = {name: held_shape(shapes_known[name], dim, ranges) for name, (dim, ranges) in held.items()}
        of_rank = with_parameter_shapes(network, shapes)
        if (order := arriving_summed(network, summed)) != network.gradient_order:
            of_rank = msgspec.structs.replace(of_rank, gradient_order=order)
        return ShardedLayers(shards, of_rank, pairs.notes)

    def _parts(self, network: ModelGraph, settings: PlanSettings) -> SequenceParts:
        patterns = settings.of(SplitOptions).split
        return self._sequence.get(network, patterns, lambda: find_parts(network, self._pairs(network, settings)))

    def _pairs(self, network: ModelGraph, settings: PlanSettings) -> Pairs:
        patterns = settings.of(SplitOptions).split
        return self._latest.get(network, patterns, lambda: find_pairs(network, patterns))


PLANNER = TensorPlanner()


def _shards_of_pieces(
    network: ModelGraph,
    pieces: dict[tuple[int, int], Piece],
    place: AxisPlace,
    settings: PlanSettings,
    sums: Mapping[int, tuple[Collective, ...]],
    sequence: SequenceParts | None,
    messages: Messages | None,
) -> dict[tuple[int, int], LayerShard]:
    """What ranks run of the layers of pieces, by index and by how much of the piece's block they have."""
    differentiated = input_needs_gradient(network)
    widths, label = widths_of(network, settings.dtype, settings.device), shard_label(place.axis, settings)
    shards = {}
    for (index, extent), piece in pieces.items():
        layer, width = network.layers[index], widths[index].runs
        leads = piece.part == "column" and piece.leader == index and differentiated[index]
        # Autograd comes to what was read last first.
        whole = [_of_whole(layer, at, place, widths[index]) for at in reversed(piece.whole)]
        shard = LayerShard(
            shard_layer(layer, piece, Interval(0, extent)),
            label,
            after_fw=_of_output(layer, piece, place, width),
            sums=sums.get(index, ()),
            after_bw=(_of_gradient(layer, place, width),) if leads else tuple(whole),
            leader=piece.leader if piece.leader != index else None,
        )
        if sequence and messages:
            shard = with_messages(index, layer, shard, sequence, messages, width)
        shards[index, extent] = shard
    return shards


def _of_output(layer: Layer, piece: Piece, place: AxisPlace, width: int) -> tuple[Collective, ...]:
    """All-reduces of what ranks made of a whole output, in what the operation runs in."""
    if piece.part == "loss":
        return sums_of_loss(layer, place, width)
    if piece.part not in WHOLE_OUTPUT:
        return ()
    elements = math.prod(layer.output_shape)
    return (place.collective("all_reduce", elements, batchless=layer.batchless, element_bytes=width),)


def _of_gradient(layer: Layer, place: AxisPlace, width: int) -> Collective:
    """The all-reduce of the gradient of what a layer by columns reads, in what its product runs in."""
    elements = math.prod(layer.input_shapes[0])
    return place.collective("all_reduce", elements, batchless=0 in layer.batchless_inputs, element_bytes=width)


def _of_whole(layer: Layer, at: int, place: AxisPlace, width: Width) -> Collective:
    """The all-reduce of the gradient of a tensor that an operation between reads whole, in its own dtype."""
    name, _ = layer.values_read[at]
    return place.collective(
        "all_reduce",
        math.prod(layer.input_shapes[at]),
        batchless=at in layer.batchless_inputs,
        element_bytes=width.reads[layer.inputs.index(name)],
    )


def shard_layer(layer: Layer, piece: Piece, interval: Interval) -> Layer:
    """The layer as one rank runs it, with an interval of its block's pieces: shapes, and its part of the FLOPs."""
    output = layer.output_shape
    inputs = list(layer.input_shapes)
    attributes = dict(layer.attributes)
    if piece.part == "table":
        return table_part(layer, interval.extent)
    if piece.part in WHOLE_OUTPUT:
        inputs[0] = piece.cut.shape(inputs[0], interval, piece.atoms)
    else:
        output = piece.cut.shape(output, interval, piece.atoms)
    for index, input_cut in enumerate(piece.inputs):
        if input_cut:
            inputs[index] = input_cut.shape(inputs[index], interval, piece.atoms)
    moved = inputs
    if layer.kind == GROUPED:
        # Matrices that a view has turned are read too, and count where their parameter is read.
        moved = inputs[:1]
        turned = Cut(-2) if piece.part == "row" else piece.cut
        inputs[1:] = (turned.shape(shape, interval, piece.atoms) if len(shape) == 3 else shape for shape in inputs[1:])
    if "out_features" in attributes:
        attributes["out_features"] = output[-1]
    if "output" in attributes:
        attributes["output"] = output

    changes = {}
    if piece.part == "loss":
        *positions, tokens = inputs[0]
        changes["memory"] = loss_memory(math.prod(positions), tokens)
    return part_of_layer(
        layer,
        interval.extent,
        piece.atoms,
        **changes,
        attributes=attributes,
        input_shapes=tuple(inputs),
        output_shape=output,
        fw_bytes=0 if is_view(layer) else 4 * (sum(map(math.prod, moved)) + math.prod(output)),
    )


def parameter_ranges(network: ModelGraph, pairs: Pairs, parts: int, position: int) -> dict[str, tuple[int, Ranges]]:
    """Per parameter of which a rank holds a part: along which dim, and the positions."""
    ranges: dict[str, tuple[int, Ranges]] = {}
    shapes = {tensor.name: tensor.shape for tensor in network.parameters}
    for index, piece in pairs.pieces.items():
        interval = cut(piece.atoms, parts)[position]
        dims: dict[str, int] = {}
        if piece.part == "lookup":
            dims[network.layers[index].parameters[0]] = 1
        elif piece.part == "table":
            dims[network.layers[index].parameters[0]] = 0
        elif index in pairs.linear:
            linear = pairs.linear[index]
            dims[linear.weight] = linear.output_dim if piece.part == "column" else linear.input_dim
            if linear.bias and piece.part == "column":
                dims[linear.bias] = 0
        for name, dim in dims.items():
            along = piece.cut._replace(dim=dim - len(shapes[name]))
            ranges[name] = (dim, along.of(shapes[name], interval, piece.atoms))
    return ranges


def held_shape(shape: tuple[int, ...], dim: int, ranges: Ranges) -> tuple[int, ...]:
    """The shape of the part of a parameter."""
    return (*shape[:dim], sum(interval.extent for interval in ranges), *shape[dim + 1 :])
