"""Which dim of every tensor is the sequence, found in the traced graph; one answer for the plan and for the run.

The walk starts at the network's input, whose first dim is the sequence, and ends at the loss, which is a mean over
tokens. What reads a tensor that is cut writes one: each token by itself, or attention, which reads the keys and values
of all tokens. A token may have several rows, which may be sorted (:mod:`.rows`).
Everything else that mixes tokens is refused by its name. What reads nothing that is cut, as position ids and masks, is
whole on every rank; a rank takes its part where it meets a tensor that is cut. Torch-free.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paradl_bench.network.graph import Layer, ModelGraph, Value
from paradl_bench.plan.axis_planner import part_of_layer
from paradl_bench.plan.compute import INPUT, operations_of_forward
from paradl_bench.strategies.tensor.cuts import CannotCut, Cut, is_view
from paradl_bench.strategies.tensor.sequence.by_token import cuts_by_token
from paradl_bench.strategies.tensor.sequence.rows import OF_TOKENS, Held, Order, Rows, held_by_row


class TokenLayer(NamedTuple):
    """A layer that runs on a part of the tokens.

    Attributes:
        output: the dim of its output that is cut; None of the loss, which is one number, and of numbers of rows.
        inputs: of each tensor that it reads, the dim that is cut; None for what it reads whole.
        gathered: indices of the inputs that are gathered first: an attention's keys and values.
        each: rows of a token in its output; 0 where the serial model has others in their places.
    """

    output: Cut | None
    inputs: tuple[Cut | None, ...]
    gathered: tuple[int, ...] = ()
    each: int = 1


class Tokens(NamedTuple):
    """The layers of a network that run on a part of the tokens, by index.

    Attributes:
        length: tokens of a sample. refused: why the network can't be cut; empty where it can.
    """

    layers: dict[int, TokenLayer]
    length: int
    refused: str = ""


def find_tokens(network: ModelGraph) -> Tokens:
    """How the tokens of a network are cut, or why they can't be."""
    shape = network.input_shape
    length = shape[0] if shape else 0
    walk = TokenWalk(network)
    try:
        walk.run()
    except CannotCut as error:
        return Tokens({}, length, str(error))
    return Tokens(walk.layers, length)


class TokenWalk:
    """From the network's input to the loss; what it finds stands in ``layers``, by index."""

    def __init__(self, network: ModelGraph) -> None:
        self.layers: dict[int, TokenLayer] = {}
        self.length = network.input_shape[0] if network.input_shape else 0
        self._network = network
        self._held: dict[Value, Held] = {}
        self._written: set[Value] = set()
        self._rows = Rows()
        self._parameters = {parameter.name: parameter.shape for parameter in network.parameters}

    def run(self) -> None:
        """Raises:
        CannotCut: a layer mixes tokens, or the loss is no mean over them.
        """
        network, forward = self._network, operations_of_forward(self._network)
        if not self.length:
            raise CannotCut("the input, which has no sequence")
        if len(network.outputs) > 1:
            raise CannotCut(f"{' and '.join(network.outputs)}, which are several outputs")
        self._hold(INPUT, Cut(-len(network.input_shape)))
        for index, layer in enumerate(network.layers):
            reads_targets = index >= forward and len(layer.inputs) < len(layer.input_shapes)
            if not reads_targets and not self._reads_held(layer):
                self._write(layer, on_tokens=False)
                continue
            if layer.kind == "loss":
                self.layers[index] = self._of_loss(layer)
            else:
                self.step(index, layer, reads_targets=reads_targets)
        last = len(network.layers) - 1
        if last < 0 or network.layers[last].kind != "loss" or last not in self.layers:
            raise CannotCut("the loss, which is no mean over tokens")

    def step(self, index: int, layer: Layer, *, reads_targets: bool = False) -> None:
        """A layer that reads what is cut, or the targets.

        Raises:
            CannotCut: it mixes tokens.
        """
        if not layer.input_shapes or not all(layer.input_shapes):
            raise CannotCut(f"{layer.name} ({layer.kind}), of which no shapes are known")
        if layer.handled:
            raise CannotCut(f"{layer.name}, with which the model's code does more than operations do")
        if self._written.intersection(layer.values_read):
            raise CannotCut(f"{layer.name}, which reads what was changed through another view")
        given = self._given(layer, reads_targets)
        if layer.kind == "constant":
            found = self._constant(layer, given)
            if found is None:
                return
        else:
            found = self._by_rows(layer, given) or self._by_dims(layer, given)
        self.layers[index], held = found
        for number in range(len(layer.output_shapes)):
            own = held.of == (layer.name, 0)
            self._held[layer.name, number] = held._replace(of=(layer.name, number)) if own else held
        self._write(layer, on_tokens=True)

    def _hold(self, name: str, cut: Cut) -> None:
        """Note that the first output of a layer is cut, by tokens in their order."""
        self._held[name, 0] = Held(cut, OF_TOKENS, (name, 0))

    def _reads_held(self, layer: Layer) -> bool:
        return any(value in self._held for value in layer.values_read)

    def _write(self, layer: Layer, *, on_tokens: bool) -> None:
        """Note which tensors hold, from now on, what a rank has of some tokens and all of others."""
        values = {*layer.values_written} - {(layer.name, 0)}
        self._written |= {value for value in values if (value in self._held) != on_tokens}

    def _by_rows(self, layer: Layer, given: list[Held | None]) -> tuple[TokenLayer, Held] | None:
        held = self._rows.held(layer, given)
        if held is None:
            return None
        return TokenLayer(held.along, tuple(tensor and tensor.along for tensor in given), each=held.each), held

    def _constant(self, layer: Layer, given: list[Held | None]) -> tuple[TokenLayer, Held] | None:
        """A tensor made beside one that is cut, as large along that dim; None of one that is whole."""
        like = given[0]
        along = like.along if like is not None else None
        if len(given) == 1 and along is not None and len(layer.output_shape) >= -along.dim:
            extent = layer.output_shape[along.dim]
            if extent % self.length == 0:
                held = Held(along, Order(extent // self.length), (layer.name, 0))
                return TokenLayer(along, (along,), each=held.each), held
        if any(extent % self.length == 0 for extent in layer.output_shape):
            raise CannotCut(
                f"{layer.name} ({layer.attributes['function']}), which is as long as the sequence elsewhere"
            )
        return None

    def _by_dims(self, layer: Layer, given: list[Held | None]) -> tuple[TokenLayer, Held]:
        """A layer that works on each row, or attention: along the one dim that fits what it reads.

        Raises:
            CannotCut: it mixes tokens.
        """
        reason, fitting = "", []
        for dim in range(-1, -len(layer.output_shape) - 1, -1):
            if layer.output_shape[dim] % self.length:
                continue
            try:
                needed = cuts_by_token(layer, Cut(dim), self._parameters)
                gathered = (1, 2) if layer.kind == "attention" else ()
                if self._fits(layer, needed, gathered, given):
                    held = held_by_row(layer, Cut(dim), needed, given, self.length)
                    fitting.append((TokenLayer(Cut(dim), needed, gathered, held.each), held))
            except CannotCut as error:
                is_given = any(tensor is not None and tensor.along == Cut(dim) for tensor in given)
                reason = reason if reason and not is_given else str(error)
        if len(fitting) == 1:
            return fitting[0]
        raise CannotCut(reason or f"{layer.name} ({layer.kind}), which doesn't run token by token")

    def _given(self, layer: Layer, reads_targets: bool) -> list[Held | None]:
        """How what the layer reads is cut: of each tensor where the graph tells which is which, else of all together.

        Raises:
            CannotCut: the graph doesn't tell.
        """
        values, shapes = layer.values_read, layer.input_shapes
        if len(values) == len(shapes):
            return [self._held.get(value) for value in values]
        if reads_targets and not layer.inputs:
            return [Held(Cut(-len(shape)), OF_TOKENS, (layer.name, 0)) for shape in shapes]
        found = {self._held.get(value) for value in values}
        if len(found) == 1 and not layer.batchless_inputs:
            # One tensor that is read several times.
            return [*found] * len(shapes)
        whole = set(layer.batchless_inputs)
        rest = [self._held[value] for value in values if value in self._held]
        if len(rest) + len(whole) == len(shapes):
            tensors = iter(rest)
            return [None if at in whole else next(tensors) for at in range(len(shapes))]
        raise CannotCut(f"{layer.name}, whose inputs can't be told apart")

    def _fits(
        self, layer: Layer, needed: tuple[Cut | None, ...], gathered: tuple[int, ...], given: list[Held | None]
    ) -> bool:
        """Whether what a layer needs is what there is; whole tensors are cut where they are read."""
        for at, (needs, tensor) in enumerate(zip(needed, given, strict=True)):
            shape = layer.input_shapes[at]
            if at in gathered:
                if tensor is None or tensor.along != Cut(-2) or tensor.order != OF_TOKENS:
                    return False
            elif tensor is not None:
                if tensor.along != needs:
                    return False
            elif needs is not None and (len(shape) < -needs.dim or shape[needs.dim] != self.length):
                return False
        return True

    def _of_loss(self, layer: Layer) -> TokenLayer:
        """Cross-entropy of logits (tokens, classes) or (classes, tokens) and a target a token."""
        function, shapes = layer.attributes.get("function", "cross_entropy"), layer.input_shapes
        logits = self._held.get(layer.values_read[0]) if layer.inputs else None
        targets = len(shapes) == 2 and shapes[1] == (self.length,)
        dims = (Cut(-2), Cut(-1)) if shapes and len(shapes[0]) == 2 else ()
        cut = logits.along if logits is not None and logits.order == OF_TOKENS and not logits.places else None
        if function != "cross_entropy" or layer.output_shape or not targets or cut not in dims:
            raise CannotCut(f"{layer.name} ({function}), which is no mean over tokens")
        return TokenLayer(None, (cut, Cut(-1)))


def part_of_tokens(layer: Layer, token_layer: TokenLayer, ranks: int) -> Layer:
    """The layer as one rank runs it: shapes, and its part of the FLOPs."""

    def part(shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
        if cut is None:
            return shape
        at = len(shape) + cut.dim
        return (*shape[:at], shape[at] // ranks, *shape[at + 1 :])

    inputs = [part(shape, cut) for shape, cut in zip(layer.input_shapes, token_layer.inputs, strict=True)]
    output, *further = (part(shape, token_layer.output) for shape in layer.output_shapes)
    attributes, batchless = layer.attributes, layer.batchless_inputs
    if "output" in attributes:
        attributes = attributes | {"output": output}
    if attributes.get("causal") and token_layer.gathered:
        attributes = attributes | {"causal": False, "masked": True}
        batchless = (*batchless, len(inputs))
        inputs.append((output[-2], inputs[1][-2]))
    return part_of_layer(
        layer,
        1,
        ranks,
        attributes=attributes,
        input_shapes=tuple(inputs),
        output_shape=output,
        further_outputs=tuple(further),
        batchless_inputs=batchless,
        fw_bytes=0 if is_view(layer) else 4 * (sum(map(math.prod, inputs)) + math.prod(output)),
    )
