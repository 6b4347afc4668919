"""Which layers tensor parallelism cuts, found in the traced graph; one answer for the plan and for the run. Torch-free.

From every linear layer the walk goes back through operations that run on a part (:mod:`.cuts`) to those that can write
only that part: linear layers, cut by columns, and embeddings, as of relative positions per head. Of constants each rank
takes its part where they are read. Where it gets there on every path, and nothing else reads what is on the way, these
layers and the one it began at, cut by rows, are a block that runs on parts, with whole activations before and behind
it (Shoeybi et al. 2019, Megatron-LM, section 3). Blocks that share an operation are one.

Of a language model the walk begins at the loss too. It gets to the layer that makes the logits, whose columns are the
tokens of the vocabulary. The embedding of these tokens is then cut by the same tokens (:mod:`.vocabulary.parts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.network.graph import RETURNS_INPUT, Layer, ModelGraph
from paradl_bench.plan.compute import layers_with_gradient, names_with_gradient
from paradl_bench.strategies.splitting.channel_shards import NOT_CHOSEN
from paradl_bench.strategies.tensor.cuts import CannotCut, Cut, cuts_of_inputs
from paradl_bench.strategies.tensor.linear import SHARED, Linear, linear_layers
from paradl_bench.strategies.tensor.vocabulary.parts import tables_of, takes_logits

Part = Literal["column", "row", "lookup", "inside", "table", "loss"]
WHOLE_OUTPUT = ("row", "table", "loss")
"""Parts whose output every rank has all of, once it is summed."""


class Piece(NamedTuple):
    """How one layer runs.

    Attributes:
        part: a linear layer cut by columns or by rows; a look-up in a table cut by columns; an operation between; the
            embedding of tokens, a table cut by rows; or the loss.
        cut: of its output; of a layer by rows and of the loss, whose output is whole, that of its input.
        inputs: how each tensor that an operation between reads is cut.
        takes: whether some of these are constants that each rank holds whole, and takes its part of.
        block: index of the block that it belongs to.
        atoms: pieces of the block that stay whole.
        leader: of layers by columns, the first of those that read the same tensor, which share the all-reduce of its
            gradient.
        whole: of an operation between, which inputs every rank reads whole and makes a part of the gradient of.
    """

    part: Part
    cut: Cut
    inputs: tuple[Cut | None, ...]
    takes: bool
    block: int
    atoms: int
    leader: int
    whole: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pairs:
    """What is cut.

    Attributes:
        pieces: by index of the layer in the network.
        linear: linear layers among them, by index.
        whole: linear layers that stay whole, by name, and why.
    """

    pieces: dict[int, Piece]
    linear: dict[int, Linear]
    whole: dict[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report has to say; of layers that were not asked for, how many."""
        left = sum(why == NOT_CHOSEN for why in self.whole.values())
        of_choice = f"tensor parallelism splits {len(self.linear)} linear layers, as chosen, and leaves {left} whole"
        reasons = [(name, why) for name, why in self.whole.items() if why != NOT_CHOSEN]
        of_layers = (f"tensor parallelism does not split layer {name}: {why}" for name, why in reasons)
        return (*((of_choice,) if left else ()), *of_layers)

    def narrowest(self, network: ModelGraph) -> tuple[int, int] | None:
        """(atoms, index of its first layer with the fewest features) of the block with the fewest."""
        columns = [index for index, piece in self.pieces.items() if piece.part == "column"]
        if not columns:
            return None

        def width(index: int) -> tuple[int, int, int]:
            piece = self.pieces[index]
            return piece.atoms, piece.cut.extent(network.layers[index].output_shape), index

        index = min(columns, key=width)
        return self.pieces[index].atoms, index


@dataclass(slots=True)
class _Walk:
    """What is cut before one linear layer, or before the loss.

    Attributes:
        row: the index of that layer. end: what it is then.
    """

    row: int
    end: Part = "row"
    cuts: dict[int, Cut] = field(default_factory=dict)
    inputs: dict[int, tuple[Cut | None, ...]] = field(default_factory=dict)
    whole: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)

    @property
    def layers(self) -> set[int]:
        return {self.row, *self.cuts}


def find_pairs(network: ModelGraph, patterns: Sequence[str] = ()) -> Pairs:
    """The pairs of a network.

    Args:
        patterns: linear layers that may be cut, by name or by patterns of names with ``*``, ``?`` and ``[...]``; empty
            for all.

    Raises:
        UserError: a name or pattern that fits no linear layer, or a layer that is named and can't be cut.
    """
    pairs = _Finder(network, patterns).find()
    names = {network.layers[index].name for index in pairs.linear}
    for pattern in patterns:
        possible = [*names, *pairs.whole]
        if not any(fnmatchcase(name, pattern) or name == pattern for name in possible):
            raise unknown_choice(f"linear layer of {network.name} to split", pattern, possible)
        if pattern in pairs.whole:
            raise UserError(f"split layers: {pattern} of {network.name} can't be: {pairs.whole[pattern]}")
    return pairs


class _Finder:
    def __init__(self, network: ModelGraph, patterns: Sequence[str]) -> None:
        self._layers = network.layers
        self._network = network
        self._index = {layer.name: index for index, layer in enumerate(network.layers)}
        self._readers: dict[int, list[int]] = {}
        for index, layer in enumerate(network.layers):
            for name in layer.inputs:
                if name in self._index and not layer.attributes.get(RETURNS_INPUT):
                    self._readers.setdefault(self._index[name], []).append(index)
        self._constant, self._with_gradient = _constants(network), names_with_gradient(network)
        self._linear: dict[int, Linear] = {}
        self._tied: dict[int, Linear] = {}
        self._tables: tuple[int, ...] = ()
        self._whole: dict[int, str] = {}
        for index, linear in linear_layers(network).items():
            name = network.layers[index].name
            if patterns and not any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns):
                self._whole[index] = NOT_CHOSEN
            elif isinstance(linear, str):
                self._whole[index] = linear
            elif linear.tied:
                self._tied[index], self._whole[index] = linear, SHARED
            else:
                self._linear[index] = linear
        self._trained = {parameter.name: parameter.shape for parameter in network.parameters}
        self._shapes = self._trained | {tensor.name: tensor.shape for tensor in (*network.frozen, *network.buffers)}

    def find(self) -> Pairs:
        # The logits before all: nothing else is as large.
        from_loss = self._walk_from_loss()
        walks: list[_Walk] = []
        for index in self._linear:
            try:
                walks.append(self._walk_back(index))
            except CannotCut as error:
                self._whole[index] = f"it is in no pair: what it reads comes from {error}"
        # Attention first: its queries, keys and values would also do as rows behind a layer in front of them.
        walks.sort(key=lambda walk: (not self._has_attention(walk), walk.row))
        walks[:0] = from_loss
        while True:
            blocks = self._join(walks)
            refused = {id(walk): reason for block in blocks if (reason := self._against(block)) for walk in block}
            if not refused:
                break
            for walk in walks:
                if id(walk) in refused:
                    parts = {**walk.parts, walk.row: walk.end}.items()
                    linear = [index for index, part in parts if part in ("column", "row")]
                    self._whole |= dict.fromkeys(linear, refused[id(walk)])
            walks = [walk for walk in walks if id(walk) not in refused]
        return self._pairs(blocks)

    def _walk_from_loss(self) -> list[_Walk]:
        """What is cut before the loss of a language model; nothing where it is none, or can't be cut."""
        index = len(self._layers) - 1
        if not takes_logits(self._network):
            return []
        try:
            walk = self._walk_back(index, "loss")
        except CannotCut:
            return []
        heads = [self._layers[index] for index, part in walk.parts.items() if part == "column"]
        self._tables = tables_of(self._network, heads[0]) if len(heads) == 1 else ()
        return [walk] if self._tables else []

    def _walk_back(self, row: int, end: Part = "row") -> _Walk:
        walk = _Walk(row, end)
        _check_plain(self._layers[row])
        open_cuts = [(self._layers[row].inputs[0], Cut(-1))]
        while open_cuts:
            name, cut = open_cuts.pop()
            index = self._index.get(name)
            if index is None:
                raise CannotCut("the model's input")
            if self._is_constant(name):
                continue
            if index in walk.cuts:
                if walk.cuts[index] != cut:
                    raise CannotCut(f"{name}, which it would need cut in two ways")
                continue
            walk.cuts[index] = cut
            walk.parts[index] = part = self._part(index, cut, end)
            walk.inputs[index] = ()
            if part == "inside":
                _check_plain(self._layers[index])
                walk.inputs[index] = cuts_of_inputs(self._layers[index], cut, self._shapes_of(self._layers[index]))
                walk.whole[index] = self._whole_reads(index, walk.inputs[index])
                open_cuts += self._producers(index, walk.inputs[index])
        if "column" not in walk.parts.values():
            raise CannotCut("no linear layer")
        return walk

    def _part(self, index: int, cut: Cut, end: Part) -> Part:
        layer = self._layers[index]
        if index in self._linear or (end == "loss" and index in self._tied):
            if cut.dim != -1:
                raise CannotCut(f"{layer.name}, along another dim than its features")
            return "column"
        if layer.kind == "embedding" and cut.dim == -1 and index not in self._tables and self._is_own(layer):
            return "lookup"
        return "inside"

    def _shapes_of(self, layer: Layer) -> list[tuple[int, ...]]:
        # One of an unknown shape counts as one that no rank can read whole.
        return [self._shapes.get(name, layer.output_shape) for name in layer.parameters]

    def _is_constant(self, name: str) -> bool:
        return name in self._index and self._constant[self._index[name]]

    def _is_own(self, layer: Layer) -> bool:
        readers = [other for other in self._network.layers if set(other.parameters) & set(layer.parameters)]
        return len(layer.parameters) == 1 and layer.parameters[0] in self._trained and readers == [layer]

    def _producers(self, index: int, cuts: tuple[Cut | None, ...]) -> list[tuple[str, Cut]]:
        """Layers that write what is read cut, and the cut."""
        layer = self._layers[index]
        if not any(cuts):
            return []
        # The graph knows layers and shapes; which is which it tells only where no tensor is read twice.
        if len(layer.inputs) == len(layer.input_shapes):
            pairs = zip(layer.inputs, cuts, strict=True)
            return [(name, cut) for name, cut in pairs if cut is not None]
        producers, known = [], set()
        for name in layer.inputs:
            shape = self._network.layers[self._index[name]].output_shape if name in self._index else None
            of_shape = {cut for other, cut in zip(layer.input_shapes, cuts, strict=True) if other == shape}
            if len(of_shape) != 1:
                raise CannotCut(f"{layer.name}, whose inputs cannot be told apart")
            known.add(shape)
            if (cut := of_shape.pop()) is not None:
                producers.append((name, cut))
        if any(cut is not None and other not in known for other, cut in zip(layer.input_shapes, cuts, strict=True)):
            raise CannotCut(f"{layer.name}, which reads a tensor that no layer writes")
        return producers

    def _whole_reads(self, index: int, cuts: tuple[Cut | None, ...]) -> tuple[int, ...]:
        """Which inputs are read whole and get a gradient, of which every rank then makes a part."""
        layer = self._layers[index]
        cut = {name for name, _ in self._producers(index, cuts)}
        whole = self._with_gradient.intersection(layer.inputs) - cut
        if whole and len(layer.values_read) != len(cuts):
            raise CannotCut(f"{layer.name}, whose inputs cannot be told apart")
        return tuple(at for at, (name, _) in enumerate(layer.values_read) if name in whole)

    def _has_attention(self, walk: _Walk) -> bool:
        return any(self._layers[index].kind in ("attention", "softmax", "matmul") for index in walk.cuts)

    def _join(self, walks: Iterable[_Walk]) -> list[list[_Walk]]:
        """Walks that agree, those with layers in common together; a linear layer is cut in one way only."""
        parts: dict[int, Part] = {}
        blocks: dict[int, list[_Walk]] = {}
        block_of: dict[int, int] = {}
        for number, walk in enumerate(walks):
            wanted = walk.parts | {walk.row: walk.end}
            clash = next((index for index, part in wanted.items() if parts.get(index, part) != part), None)
            met = sorted({block_of[index] for index in walk.layers if index in block_of})
            shared = [blocks[block] for block in met]
            if clash is None:
                clash = next((i for block in shared for other in block for i in _differing(walk, other)), None)
            if clash is not None:
                self._whole[walk.row] = f"it is in no pair: {self._layers[clash].name} is in another one"
                continue
            parts |= wanted
            for block in met:
                del blocks[block]
            blocks[number] = [walk, *(other for block in shared for other in block)]
            block_of |= dict.fromkeys((index for other in blocks[number] for index in other.layers), number)
        return list(blocks.values())

    def _against(self, block: list[_Walk]) -> str | None:
        """Why a block cannot run on parts; None where it can."""
        cut = {index for walk in block for index in walk.cuts}
        rows = {walk.row for walk in block}
        on_parts = rows | {index for walk in block for index, part in walk.parts.items() if part == "inside"}
        for index in sorted(cut):
            if self._layers[index].handled:
                return f"the model's code does more with what {self._layers[index].name} returns than operations do"
            for reader in self._readers.get(index, ()):
                if reader not in on_parts:
                    return f"{self._layers[index].name} is read by {self._network.layers[reader].name} as well"
        atoms = self._atoms(block)
        return None if atoms > 1 else f"{self._layers[min(cut)].name} has one piece only that could be cut"

    def _atoms(self, block: list[_Walk]) -> int:
        """Into how many equal pieces everything on the way can be cut."""
        extents = []
        for walk in block:
            for index, cut in walk.cuts.items():
                layer = self._layers[index]
                extents.append(cut.extent(layer.output_shape))
                inputs = zip(layer.input_shapes, walk.inputs[index], strict=False)
                extents += [input_cut.extent(shape) for shape, input_cut in inputs if input_cut]
        return math.gcd(*extents)

    def _pairs(self, blocks: list[list[_Walk]]) -> Pairs:
        pieces: dict[int, Piece] = {}
        for number, block in enumerate(sorted(blocks, key=lambda block: min(walk.row for walk in block))):
            atoms = self._atoms(block)
            for walk in block:
                for index, cut in walk.cuts.items():
                    part, inputs = walk.parts[index], walk.inputs[index]
                    takes = any(self._is_constant(name) for name, _ in self._producers(index, inputs))
                    pieces[index] = Piece(part, cut, inputs, takes, number, atoms, index, walk.whole.get(index, ()))
                pieces[walk.row] = Piece(walk.end, Cut(-1), (), False, number, atoms, walk.row)
                tables = self._tables if walk.end == "loss" else ()
                pieces |= {index: Piece("table", Cut(-1), (), False, number, atoms, index) for index in tables}
        pieces |= self._untouched(pieces)
        ordered = {index: pieces[index] for index in sorted(pieces)}
        linear = {index: linear for index, linear in (self._linear | self._tied).items() if index in ordered}
        whole = {
            self._layers[index].name: self._whole.get(index, "it is in no pair")
            for index in (*self._linear, *self._whole)
            if index not in ordered
        }
        return Pairs(self._with_leaders(ordered), linear, whole)

    def _untouched(self, pieces: Mapping[int, Piece]) -> dict[int, Piece]:
        """Calls that return what they are given, here a part."""
        untouched = {}
        for index, layer in enumerate(self._layers):
            source = self._index.get(layer.inputs[0], -1) if layer.inputs else -1
            if layer.attributes.get(RETURNS_INPUT) and source in pieces and pieces[source].part not in WHOLE_OUTPUT:
                read = pieces[source]
                untouched[index] = read._replace(part="inside", inputs=(read.cut,), takes=False, leader=index, whole=())
        return untouched

    def _with_leaders(self, pieces: Mapping[int, Piece]) -> dict[int, Piece]:
        """Layers by columns of a block that read one tensor follow the first of them."""
        first: dict[tuple[int, str], int] = {}
        followers = {}
        for index, piece in pieces.items():
            leader = index
            source = self._layers[index].inputs[0] if piece.part == "column" else ""
            if source and not self._writes_several(source):
                leader = first.setdefault((piece.block, source), index)
            followers[index] = piece._replace(leader=leader)
        return followers

    def _writes_several(self, name: str) -> bool:
        index = self._index.get(name)
        return index is not None and self._layers[index].attributes.get("function") in ("split", "chunk", "unbind")


def _check_plain(layer: Layer) -> None:
    """Refuse to follow a tensor that was changed through another view of it, which says nothing of its dims."""
    if {name for name, _ in layer.values_read} != set(layer.inputs):
        raise CannotCut(f"{layer.name}, which reads what was changed through another view")


def _differing(one: _Walk, other: _Walk) -> list[int]:
    return [index for index in sorted(one.cuts.keys() & other.cuts.keys()) if one.cuts[index] != other.cuts[index]]


def _constants(network: ModelGraph) -> list[bool]:
    """Per layer, whether what it writes needs no gradient and depends on no sample."""
    index = {layer.name: i for i, layer in enumerate(network.layers)}
    constant: list[bool] = []
    for layer, differentiated in zip(network.layers, layers_with_gradient(network), strict=True):
        of_inputs = all(name in index and constant[index[name]] for name in layer.inputs)
        constant.append(of_inputs and not differentiated and not layer.parameters)
    return constant
