"""Attention on all tokens of a share of the heads: what a rank runs, and what it sends (Ulysses). Torch-free.

Before an attention ranks exchange their queries, keys and values, each in an all-to-all: of their own tokens with all
heads they make all tokens of some heads. Behind it an all-to-all brings the output back to tokens. Backward goes the
other way: the output's gradient, then those of values, keys and queries, as autograd comes to them.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.axis_planner import part_of_layer
from paradl_bench.plan.compute import LayerShard
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.tensor.sequence.tokens import Tokens

_OPERANDS = ("heads of queries", "heads of keys", "heads of values")
Shape = tuple[int, ...]


def attentions(network: ModelGraph, tokens: Tokens) -> Iterator[Layer]:
    """Layers that read keys and values of all tokens."""
    return (network.layers[index] for index, token_layer in tokens.layers.items() if token_layer.gathered)


def heads_of(shape: Shape) -> int:
    """Heads of queries, keys or values of a sample."""
    return shape[-3] if len(shape) > 2 else 1


def fewest_heads(network: ModelGraph, tokens: Tokens) -> tuple[int, str] | None:
    """The fewest heads of keys that an attention has, and its name; None without one."""
    heads = [(heads_of(layer.input_shapes[1]), layer.name) for layer in attentions(network, tokens)]
    return min(heads, key=lambda pair: pair[0], default=None)


def check_heads(layer: Layer, strategy: str, ranks: int, *, left: bool = False) -> None:
    """Refuse an attention whose heads do not part evenly.

    Args:
        left: whether they are those that another axis leaves on a rank.

    Raises:
        UserError: says so.
    """
    for name, shape in zip(_OPERANDS, layer.input_shapes, strict=False):
        if heads_of(shape) % ranks:
            whose = "that another axis leaves on a rank, of" if left else "of"
            raise UserError(
                f"strategy {strategy}: --context-exchange all-to-all: {heads_of(shape)} {name} {whose} layer"
                f" {layer.name} do not split evenly over {ranks} ranks; give a number of ranks that divides them, or"
                " another exchange"
            )


def check_masks(network: ModelGraph, tokens: Tokens, strategy: Strategy) -> None:
    """Raises:
    UserError: a mask that has a rank's own rows alone.
    """
    shapes = {network.layers[at].name: network.layers[at].output_shape for at in tokens.layers}
    for layer in attentions(network, tokens):
        told_apart = len(layer.inputs) == len(layer.input_shapes)
        masks = {name for name in layer.inputs[3 if told_apart else 0 :] if shapes.get(name) in layer.input_shapes[3:]}
        if masks:
            raise UserError(
                f"strategy {strategy}: --context-exchange all-to-all: the mask of layer {layer.name} depends on tokens,"
                " and a rank has only some of them"
            )


def own_heads(shape: Shape, heads: int, ranks: int) -> Shape:
    """A shape with a share of the heads, where it has them."""
    if len(shape) < 3 or shape[-3] != heads:
        return shape
    return (*shape[:-3], heads // ranks, *shape[-2:])


def on_own_heads(
    layer: Layer, on_tokens: Layer, ranks: int, made: Sequence[bool], message: Callable[[str, Shape], Collective]
) -> LayerShard:
    """An attention on a rank's share of the heads, and what is exchanged around it.

    Args:
        on_tokens: the layer on the rank's tokens, whose output it then holds.
        made: per tensor that it reads, whether that gets a gradient.
        message: of an operation, with as many bytes as a rank's tokens have in a tensor of a shape.
    """

    def moved(shape: Shape) -> Collective:
        whole = message("all_to_all", shape)
        return msgspec.structs.replace(whole, message_bytes=whole.message_bytes // ranks)

    heads, operands = heads_of(layer.input_shapes[0]), layer.input_shapes[:3]
    masks = tuple(own_heads(shape, heads, ranks) for shape in layer.input_shapes[3:])
    inputs = (*(own_heads(shape, heads_of(shape), ranks) for shape in operands), *masks)
    attributes = dict(layer.attributes)
    output = own_heads(layer.output_shape, heads, ranks)
    if "output" in attributes:
        attributes["output"] = output
    run = part_of_layer(
        layer,
        1,
        ranks,
        attributes=attributes,
        input_shapes=inputs,
        output_shape=output,
        fw_bytes=layer.fw_bytes // ranks,
    )
    back = moved(layer.output_shape)
    return LayerShard(
        run,
        before_fw=tuple(map(moved, operands)),
        after_fw=(back,),
        before_bw=(back,),
        after_bw=tuple(moved(operands[at]) for at in reversed(range(3)) if made[at]),
        held=on_tokens,
    )
