"""Which layers run on a part of the sequence beside tensor parallelism's pairs, and what that communicates. Torch-free.

Between pairs every rank holds its part of the sequence. In front of layers by columns the parts are all-gathered, and
the gradient of what was gathered is reduce-scattered. Behind a layer by rows the sums are reduce-scattered, and the
gradient of that is all-gathered. So it is behind the embedding whose vocabulary is cut; another embedding looks up its
part of the tokens. Parameters of layers on parts, the biases behind rows included, get a part of their gradient on each
rank; backward of the layer ends with its sum, one message a layer, as torch's SequenceParallel sums it.

Sources: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2;
torch.distributed.tensor.parallel's SequenceParallel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paradl_bench.core.errors import UserError, uneven
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph, Value
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.compute import INPUT, LayerShard, names_with_gradient
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.splitting.grouped_products import GROUPED
from paradl_bench.strategies.tensor.cuts import CannotCut, Cut
from paradl_bench.strategies.tensor.pairs import Pairs, Piece
from paradl_bench.strategies.tensor.sequence.rows import OF_TOKENS, Held, Order
from paradl_bench.strategies.tensor.sequence.tokens import TokenLayer, TokenWalk, part_of_tokens
from paradl_bench.strategies.tensor.summed import Summed, sum_of, summed_parameters

SEQUENCE = Cut(-2)
"""Of what features lie behind."""


class SequenceParts(NamedTuple):
    """Parts of the sequence, by index of layers in the network.

    Attributes:
        length: tokens of a sample. layers: those that run on a part. entered: those among them that take their part of
            whole tokens first.
        gathered: layers by columns that read what is gathered. scattered: layers whose sum is scattered, and rows of a
            token in what they make; 0 where the serial model has others in their places.
        sorted_rows: blocks of pairs that read rows which are sorted by expert.
        summed: per layer whose parameters' gradients are summed, their names.
        refused: why the network can't be run so; empty where it can.
    """

    length: int
    layers: dict[int, TokenLayer]
    entered: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    scattered: dict[int, int] = {}  # noqa: RUF012
    sorted_rows: frozenset[int] = frozenset()
    summed: Summed = {}  # noqa: RUF012
    refused: str = ""


def find_parts(network: ModelGraph, pairs: Pairs) -> SequenceParts:
    """What runs on parts of the sequence, or why that can't be."""
    walk = _Walk(network, pairs)
    try:
        walk.run()
    except CannotCut as error:
        return SequenceParts(walk.length, {}, refused=str(error))
    return SequenceParts(
        walk.length,
        walk.layers,
        frozenset(walk.entered),
        frozenset(walk.gathered),
        walk.scattered,
        frozenset(walk.sorted_rows),
        summed_parameters(network, pairs, on_sequence=True),
    )


class _SortedRows(NamedTuple):
    """The rows that a block of a pair reads.

    Attributes:
        order: of a rank's own. ends: the tensor that tells where each expert's end. first: name of the product.
    """

    order: Order
    ends: Value
    first: str


class _Walk(TokenWalk):
    """The walk over what lies between pairs; it begins behind them, and where tokens are embedded."""

    def __init__(self, network: ModelGraph, pairs: Pairs) -> None:
        super().__init__(network)
        self.entered: set[int] = set()
        self.gathered: set[int] = set()
        self.scattered: dict[int, int] = {}
        self.sorted_rows: dict[int, _SortedRows] = {}
        self._pieces = pairs.pieces
        self._own = {network.layers[index].name for index in pairs.pieces}
        self._with_gradient = names_with_gradient(network)
        self._of_sample = {INPUT}

    def run(self) -> None:
        """Raises:
        CannotCut: a layer mixes tokens, or reads all of them where a rank has a part.
        """
        if self._network.input_dtype == "fp32":
            raise CannotCut("its input, which is no token ids")
        for index, layer in enumerate(self._network.layers):
            if self._of_sample.intersection(layer.inputs):
                self._of_sample.add(layer.name)
            piece = self._pieces.get(index)
            if piece is not None:
                self._of_piece(index, layer, piece)
                continue
            enters = layer.kind == "embedding" and layer.name in self._of_sample
            if not enters and not self._reads_held(layer):
                self._write(layer, on_tokens=False)
                continue
            if layer.kind == "loss":
                raise CannotCut(f"{layer.name}, which reads all of the sequence: have the head cut (--split)")
            self.step(index, layer)
            if index in self.layers and self.layers[index].gathered:
                # It stays whole where what makes its queries, keys and values is frozen, not chosen, or of one head.
                raise CannotCut(f"{layer.name}, which reads all keys and values and is not cut by heads")
            if enters:
                self.entered.add(index)
        if not self.scattered:
            raise CannotCut("no layer by rows")
        ends = [name for name in self._network.outputs if (name, 0) in self._held]
        if ends:
            raise CannotCut(f"{ends[0]}, which the model returns whole")

    def _of_piece(self, index: int, layer: Layer, piece: Piece) -> None:
        if self._written.intersection(layer.values_read):
            raise CannotCut(f"{layer.name}, which reads what was changed through another view")
        if layer.kind == GROUPED:
            self._of_groups(index, layer, piece)
            return
        if piece.block in self.sorted_rows:
            self._of_sorted(layer, piece)
        if piece.part in ("row", "table"):
            if len(layer.output_shape) < 2 or layer.output_shape[-2] != self.length or layer.batchless:
                raise CannotCut(f"{layer.name}, whose output has no dim of the sequence before its features")
            if layer.handled:
                raise CannotCut(f"{layer.name}, with which the model's code does more than operations do")
            self.scattered[index] = 1
            self._hold(layer.name, SEQUENCE)
        for value in layer.values_read:
            name, held = value[0], self._held.get(value)
            if name in self._own and held is None:
                continue
            if piece.part == "column" and held is not None:
                self.gathered.add(index)
                if (held.along, held.order) != (SEQUENCE, OF_TOKENS):
                    raise CannotCut(f"{layer.name}, which reads the sequence along another dim")
            elif held is not None or name in self._with_gradient:
                raise CannotCut(f"{layer.name}, which reads {name}: one is a part of the sequence, the other is not")

    def _of_groups(self, index: int, layer: Layer, piece: Piece) -> None:
        """A product of rows that are sorted by expert: of all ranks' rows, with features of each matrix."""
        rows, ends = layer.values_read[0], layer.values_read[-1]
        if layer.handled:
            raise CannotCut(f"{layer.name}, with which the model's code does more than operations do")
        if piece.part == "column":
            held = self._rows.held(layer, self._given(layer, reads_targets=False))
            assert held is not None
            block = self.sorted_rows.setdefault(piece.block, _SortedRows(held.order, ends, layer.name))
            if (held.order, ends) != (block.order, block.ends):
                raise CannotCut(f"{layer.name}, whose rows are others than those of {block.first}")
            self.gathered.add(index)
            return
        known = self.sorted_rows.get(piece.block)
        if known is None or ends != known.ends or rows in self._held:
            raise CannotCut(f"{layer.name}, whose rows come from no other product of them")
        self.scattered[index] = 0
        self._held[layer.name, 0] = Held(SEQUENCE, known.order, (layer.name, 0))

    def _of_sorted(self, layer: Layer, piece: Piece) -> None:
        """What runs between such products: on each row by itself, with nothing that is a row's own."""
        shapes = zip(layer.values_read, layer.input_shapes, strict=False)
        others = [shape for (name, _), shape in shapes if name not in self._own and len(shape) > 1 and shape[-2] > 1]
        if piece.part != "inside" or others:
            raise CannotCut(f"{layer.name}, which reads rows that are sorted by expert")


def refuse_sequence(strategy: Strategy, ranks: int, parts: SequenceParts) -> None:
    """Refuse what can't run on parts of the sequence.

    Raises:
        UserError: layers that need all of it, a length that does not part evenly.
    """
    what = f"strategy {strategy}: --sequence-parallel on"
    # What another axis leaves of the sequence is cut again.
    ranks *= degree_of(strategy, Trait.CUTS_TOKENS)
    if parts.refused:
        raise UserError(f"{what} can't be: the sequence can't be followed through {parts.refused}; give off")
    if parts.length % ranks:
        raise uneven(f"{what}: a sequence of {parts.length} tokens", parts.length, ranks, f"{ranks} ranks")


class Messages:
    """The collectives of a rank's place, by layer."""

    def __init__(self, place: AxisPlace, parts: SequenceParts, sizes_bytes: dict[str, int]) -> None:
        self._place, self._parts, self._sizes_bytes = place, parts, sizes_bytes

    @property
    def ranks(self) -> int:
        """Along the axis."""
        return self._place.axis.degree

    def sum_of(self, index: int) -> tuple[Collective, ...]:
        """That of the gradients of a layer's parameters."""
        return sum_of(index, self._parts.summed, self._sizes_bytes, self._place)

    def of_numbers(self, layer: Layer) -> tuple[Collective, ...]:
        """That of the numbers of rows of each expert, in front of the rows."""
        if layer.kind != GROUPED:
            return ()
        size = DTYPE_BYTES["int64"]
        (experts,) = layer.input_shapes[-1]
        return (self._place.collective("all_gather", experts, batchless=True, element_bytes=size),)

    def of_part(self, operation: str, shape: tuple[int, ...], width: int) -> Collective:
        """One of a tensor of which every rank has or gets a part of the sequence."""
        elements = math.prod(shape) // self._place.axis.degree
        return self._place.collective(operation, elements, batchless=False, element_bytes=width)


def with_messages(
    index: int, layer: Layer, shard: LayerShard, parts: SequenceParts, messages: Messages, width: int
) -> LayerShard:
    """The shard of a pair's layer, with parts of the sequence before and behind it."""
    if index in parts.gathered and shard.leader is None:
        before = (*messages.of_numbers(layer), messages.of_part("all_gather", layer.input_shapes[0], width))
        after = (messages.of_part("reduce_scatter", layer.input_shapes[0], width),) if shard.after_bw else ()
        return shard._replace(before_fw=before, after_bw=after)
    if index not in parts.scattered:
        return shard
    token_layer = TokenLayer(SEQUENCE, (None,) * len(layer.input_shapes))
    return shard._replace(
        after_fw=(messages.of_part("reduce_scatter", layer.output_shape, width),),
        before_bw=(messages.of_part("all_gather", layer.output_shape, width),),
        sums=messages.sum_of(index),
        held=part_of_tokens(layer, token_layer, messages.ranks),
    )


def shards_of_tokens(
    network: ModelGraph,
    pairs: Pairs,
    parts: SequenceParts,
    messages: Messages,
    label: str,
) -> dict[int, LayerShard]:
    """Layers in no pair: on a part of the sequence, or whole with sums of their parameters' gradients."""
    shards = {}
    for index, layer in enumerate(network.layers):
        if index in parts.layers:
            part = part_of_tokens(layer, parts.layers[index], messages.ranks)
            shards[index] = LayerShard(part, label, sums=messages.sum_of(index))
        elif index not in pairs.pieces and index in parts.summed:
            shards[index] = LayerShard(layer, sums=messages.sum_of(index))
    return shards
