"""Which dim of every tensor is the sequence, found in the traced graph; one answer for the plan and for the run.

The walk starts at the network's input, whose first dim is the sequence, and ends at the loss, which is a mean over
tokens. What reads a tensor that is cut writes one: each token by itself, or attention, which reads the keys and values
of all tokens. Everything else that mixes tokens is refused by its name. What reads nothing that is cut, as position
ids and masks, is whole on every rank; a rank takes its part where it meets a tensor that is cut. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from paradl_bench.network.graph import RETURNS_INPUT, Layer, ModelGraph
from paradl_bench.plan.axis_planner import part_of_layer
from paradl_bench.plan.compute import INPUT, operations_of_forward
from paradl_bench.strategies.tensor.cuts import CannotCut, Cut, cuts_of_inputs, is_view


class TokenLayer(NamedTuple):
    """A layer that runs on a part of the tokens.

    Attributes:
        output: the dim of its output that is cut; None of the loss, whose output is one number.
        inputs: of each tensor that it reads, the dim that is cut; None for what it reads whole.
        gathered: indices of the inputs that are gathered first: an attention's keys and values.
    """

    output: Cut | None
    inputs: tuple[Cut | None, ...]
    gathered: tuple[int, ...] = ()


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
        self._network, self._length = network, network.input_shape[0] if network.input_shape else 0
        self._cut: dict[str, Cut] = {INPUT: Cut(-len(network.input_shape))}
        self._parameters = {parameter.name: parameter.shape for parameter in network.parameters}

    def run(self) -> None:
        """Raises:
        CannotCut: a layer mixes tokens, or the loss is no mean over them.
        """
        network, forward = self._network, operations_of_forward(self._network)
        if len(network.outputs) > 1:
            raise CannotCut(f"{' and '.join(network.outputs)}, which are several outputs")
        for index, layer in enumerate(network.layers):
            reads_targets = index >= forward and len(layer.inputs) < len(layer.input_shapes)
            if not reads_targets and not any(name in self._cut for name in layer.inputs):
                continue
            token_layer = self._of_loss(layer) if layer.kind == "loss" else self._of_layer(layer, reads_targets)
            self.layers[index] = token_layer
            if token_layer.output is not None:
                self._cut[layer.name] = token_layer.output
        last = len(network.layers) - 1
        if last < 0 or network.layers[last].kind != "loss" or last not in self.layers:
            raise CannotCut("the loss, which is no mean over tokens")

    def _of_layer(self, layer: Layer, reads_targets: bool) -> TokenLayer:
        if not layer.input_shapes or not all(layer.input_shapes):
            raise CannotCut(f"{layer.name} ({layer.kind}), of which no shapes are known")
        if layer.handled:
            raise CannotCut(f"{layer.name}, with which the model's code does more than operations do")
        if {name for name, _ in layer.values_read} != set(layer.inputs):
            raise CannotCut(f"{layer.name}, which reads what was changed through another view")
        given = self._given(layer, reads_targets)
        reason, fitting = "", []
        for dim in range(-1, -len(layer.output_shape) - 1, -1):
            try:
                token_layer = self._needed(layer, Cut(dim))
            except CannotCut as error:
                reason = reason if reason and Cut(dim) not in given else str(error)
                continue
            if layer.output_shape[dim] == self._length and self._fits(layer, token_layer, given):
                fitting.append(token_layer)
        if len(fitting) == 1:
            return fitting[0]
        raise CannotCut(reason or f"{layer.name} ({layer.kind}), which doesn't run token by token")

    def _given(self, layer: Layer, reads_targets: bool) -> list[Cut | None]:
        """How what the layer reads is cut: of each tensor where the graph tells which is which, else of all together.

        Raises:
            CannotCut: the graph doesn't tell.
        """
        if len(layer.inputs) == len(layer.input_shapes):
            return [self._cut.get(name) for name in layer.inputs]
        if reads_targets and not layer.inputs:
            return [Cut(-len(shape)) for shape in layer.input_shapes]
        cuts = {self._cut.get(name) for name in layer.inputs}
        if len(cuts) == 1 and not layer.batchless_inputs:
            # One tensor that is read several times.
            return [*cuts] * len(layer.input_shapes)
        whole = set(layer.batchless_inputs)
        rest = [self._cut.get(name) for name in layer.inputs if name in self._cut]
        if len(rest) + len(whole) == len(layer.input_shapes):
            tensors = iter(rest)
            return [None if at in whole else next(tensors) for at in range(len(layer.input_shapes))]
        raise CannotCut(f"{layer.name}, whose inputs can't be told apart")

    def _fits(self, layer: Layer, token_layer: TokenLayer, given: list[Cut | None]) -> bool:
        """Whether what a layer needs is what there is; whole tensors are cut where they are read."""
        for at, (needed, cut) in enumerate(zip(token_layer.inputs, given, strict=True)):
            needs = Cut(-2) if at in token_layer.gathered else needed
            if cut is not None and needs != cut:
                return False
            if cut is None and needs is not None and at in token_layer.gathered:
                return False
            shape = layer.input_shapes[at]
            if needs is not None and (len(shape) < -needs.dim or shape[needs.dim] != self._length):
                return False
        return True

    def _needed(self, layer: Layer, cut: Cut) -> TokenLayer:
        """What the layer reads where its output is cut so.

        Raises:
            CannotCut: it mixes tokens.
        """
        if layer.attributes.get(RETURNS_INPUT):
            return TokenLayer(cut, (cut,) * len(layer.input_shapes))
        if layer.kind == "attention":
            return _attention(layer, cut)
        if layer.kind in ("matmul", "mm") and layer.parameters:
            return TokenLayer(cut, self._by_matrix(layer, cut))
        rule = _RULES.get(layer.kind)
        if rule is not None:
            return TokenLayer(cut, rule(layer, cut))
        if layer.kind == "elementwise":
            # A parameter is broadcast, or read by token.
            layer = msgspec.structs.replace(layer, parameters=())
        inputs = cuts_of_inputs(layer, cut)
        if any(needed is not None and needed.sections != 1 for needed in inputs):
            raise CannotCut(f"{layer.name} ({layer.kind}), which parts it")
        return TokenLayer(cut, inputs)

    def _by_matrix(self, layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
        shapes = [self._parameters.get(name) for name in layer.parameters]
        features = layer.input_shapes[0][-1], layer.output_shape[-1]
        if len(layer.input_shapes) != 1 or shapes != [features]:
            raise CannotCut(f"{layer.name} ({layer.kind}), a product with all of it")
        return _by_features(layer, cut)

    def _of_loss(self, layer: Layer) -> TokenLayer:
        """Cross-entropy of logits (tokens, classes) or (classes, tokens) and a target a token."""
        function, shapes = layer.attributes.get("function", "cross_entropy"), layer.input_shapes
        cut = self._cut.get(layer.inputs[0]) if layer.inputs else None
        targets = len(shapes) == 2 and shapes[1] == (self._length,)
        dims = (Cut(-2), Cut(-1)) if shapes and len(shapes[0]) == 2 else ()
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


def _attention(layer: Layer, cut: Cut) -> TokenLayer:
    """Queries by token; keys and values of all tokens; of a mask the rows."""
    if layer.attributes["function"] != "scaled_dot_product_attention" or cut.dim != -2:
        raise CannotCut(f"{layer.name} ({layer.kind}), along another dim than its queries")
    masks = [None if len(shape) < 2 or shape[-2] == 1 else cut for shape in layer.input_shapes[3:]]
    return TokenLayer(cut, (cut, None, None, *masks), (1, 2))


def _by_features(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    if cut.dim == -1 or len(layer.input_shapes) != 1:
        raise CannotCut(f"{layer.name} ({layer.kind}), a product over it")
    return (cut,)


def _addmm(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    if layer.attributes["weights"] != "sum-second":
        raise CannotCut(f"{layer.name} ({layer.kind}), whose weights come first")
    return _by_features(layer, cut)


def _norm(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    size = layer.attributes["size"]
    if layer.attributes["function"] not in ("layer_norm", "rms_norm") or not isinstance(size, tuple):
        raise CannotCut(f"{layer.name} ({layer.attributes['function']}), whose statistics go over it")
    if -cut.dim <= len(size):
        raise CannotCut(f"{layer.name} ({layer.attributes['function']}), whose statistics go over it")
    return (cut,)


def _embedding(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    if cut.dim == -1 or len(layer.input_shapes) != 1:
        raise CannotCut(f"{layer.name} ({layer.kind}), along its features")
    return (Cut(cut.dim + 1),)


def _reduction(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    """Along dims behind the one that is cut; dims of the call count the batch, shapes leave it out."""
    given, dims = layer.attributes["dim"], len(layer.input_shapes[0])
    named = given if isinstance(given, tuple) else (given,)
    # Without a name, or along the first dim, it is over all samples.
    over = {-dims - 1 if not isinstance(dim, int) else dim if dim < 0 else dim - dims - 1 for dim in named}
    needed = cut if layer.attributes["keepdim"] else Cut(cut.dim - len(over))
    if any(dim <= needed.dim for dim in over):
        raise CannotCut(f"{layer.name} ({layer.attributes['function']}), which sums over it")
    return (needed,)


def _view(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    """As of any cut; one dim may be taken out behind the one that is cut too."""
    dims = layer.attributes.get("dims")
    if layer.attributes["function"] in ("unbind", "select") and isinstance(dims, tuple) and dims[0] >= cut.dim:
        return (Cut(cut.dim - 1),)
    inputs = cuts_of_inputs(layer, cut)
    if any(needed is not None and needed.sections != 1 for needed in inputs):
        raise CannotCut(f"{layer.name} ({layer.attributes['function']}), which parts it")
    return inputs


_RULES: dict[str, Callable[[Layer, Cut], tuple[Cut | None, ...]]] = {
    "linear": _by_features,
    "addmm": _addmm,
    "norm": _norm,
    "embedding": _embedding,
    "reduction": _reduction,
    "view": _view,
}
