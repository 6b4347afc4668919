"""Attention of a rank's queries with a block of keys and values at a time, which go round: what it runs and sends.

A block is the keys and values of one rank's tokens, in one message. Each rank sends the block at hand to the next rank
while its queries meet that block; the parts of its output are joined by their log-sum-exp. Backward sends the blocks
round again. Behind each goes the sum of its gradients, in fp32 at least, which in the end comes home. What ranks make
of their own block stays where it is, so sums make one journey less than there are ranks.

Where an attention is causal, a rank has two chunks of the tokens: one from the front, and its mirror from the back.
Of its own block it then sees what a causal mask leaves; of an earlier rank's block, one chunk with all queries; of a
later rank's, both chunks with half of the queries. Each round has as many pairs as the causal attention of one block
with itself, on every rank: rounds are planned as that.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Brandon et al. 2023, "Striped Attention", on the
balance; the two chunks are those of torch's ``context_parallel`` and of Megatron-LM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import DTYPE_BYTES, Layer, LayerMemory, ModelGraph
from paradl_bench.plan.axis_planner import AxisPlace, part_of_layer
from paradl_bench.plan.compute import LayerShard, layers_with_gradient
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import HaloExchange
from paradl_bench.strategies.context.heads import attentions, heads_of
from paradl_bench.strategies.tensor.sequence.tokens import TokenLayer, Tokens

_SUMS_BYTES = DTYPE_BYTES["fp32"]
_OPERANDS = 3


def is_mirrored(network: ModelGraph, tokens: Tokens) -> bool:
    """Whether ranks have a chunk from the front and one from the back: some attention is causal."""
    return any(layer.attributes["causal"] for layer in attentions(network, tokens))


def check_ring(network: ModelGraph, tokens: Tokens, strategy: Strategy) -> None:
    """Raises:
    UserError: a mask that is learned, or operands of other shapes than heads have.
    """
    names = (layer.name for layer in network.layers)
    learned = {name for name, made in zip(names, layers_with_gradient(network), strict=True) if made}
    for layer in attentions(network, tokens):
        why = _why_not(layer, learned)
        if why:
            raise UserError(
                f"strategy {strategy}: --context-exchange ring: {why} of layer {layer.name} runs with another exchange"
                " alone"
            )


def _why_not(layer: Layer, learned: set[str]) -> str:
    shapes = layer.input_shapes
    if any(len(shape) not in (2, 3) for shape in shapes[:_OPERANDS]):
        return f"attention of {len(shapes[0])} dims a sample"
    heads = [heads_of(shape) for shape in shapes[:_OPERANDS]]
    if heads[1] != heads[2] or heads[0] % heads[1]:
        return f"attention of {heads[0]} heads of queries, {heads[1]} of keys and {heads[2]} of values"
    told_apart = len(layer.inputs) == len(shapes)
    masks = layer.inputs[_OPERANDS:] if told_apart else layer.inputs[:-_OPERANDS]
    return "a learned mask" if len(shapes) > _OPERANDS and (layer.parameters or learned & set(masks)) else ""


def in_rounds(
    layer: Layer, token_layer: TokenLayer, place: AxisPlace, element_bytes: int, made: Sequence[bool], all_rows: int
) -> LayerShard:
    """An attention with one block, as often as there are ranks, and what travels beside each time.

    Args:
        layer: all of it, or the heads that another axis leaves on a rank.
        element_bytes: of a block. made: per tensor that the layer reads, whether that gets a gradient.
        all_rows: of the output of all heads of a sample.
    """
    ranks = place.axis.degree
    elements = sum(map(math.prod, layer.input_shapes[1:_OPERANDS])) // ranks * place.local_batch
    block, sums = elements * element_bytes, elements * max(element_bytes, _SUMS_BYTES)

    # Rounds that send the same are one object: there are as many as ranks, in every layer.
    @functools.cache
    def messages(*sizes: int) -> HaloExchange | None:
        return HaloExchange(sends_bytes=sizes, receives_bytes=sizes, axes=(place.axis_index,)) if sizes else None

    summed = any(made[1:_OPERANDS])
    rounds_bw = [messages(*[block] * (turn < ranks - 1), *[sums] * (summed and turn > 1)) for turn in range(ranks)]
    home = messages(sums) if summed else None
    return LayerShard(
        _with_one_block(layer, token_layer, ranks, all_rows),
        after_bw=() if home is None else (home,),
        rounds_fw=(*[messages(block)] * (ranks - 1), None),
        rounds_bw=tuple(rounds_bw),
    )


def _with_one_block(layer: Layer, token_layer: TokenLayer, ranks: int, all_rows: int) -> Layer:
    """The rank's queries with as many keys: of the pairs of all rounds, those of one."""
    inputs = [(*shape[:-2], shape[-2] // ranks, shape[-1]) for shape in layer.input_shapes[:_OPERANDS]]
    length = layer.input_shapes[1][-2]
    for shape, cut in zip(layer.input_shapes[_OPERANDS:], token_layer.inputs[_OPERANDS:], strict=True):
        rows = shape if cut is None else (*shape[:-2], shape[-2] // ranks, shape[-1])
        inputs.append((*rows[:-1], rows[-1] // ranks) if rows and rows[-1] == length else rows)
    output = (*layer.output_shape[:-2], layer.output_shape[-2] // ranks, layer.output_shape[-1])
    attributes = dict(layer.attributes)
    if "output" in attributes:
        attributes["output"] = output
    # Of all of the layer, as what is kept of any is counted.
    kept = LayerMemory(inputs=tuple(range(len(inputs))), output=True, kept=(_SUMS_BYTES * all_rows, 0))
    return part_of_layer(
        layer,
        1,
        ranks**2,
        # Dropout is drawn again in backward: nothing of it is kept. Nor are copies of operands.
        memory=kept if attributes["dropout"] or not (layer.memory or kept).inputs else layer.memory,
        attributes=attributes,
        input_shapes=tuple(inputs),
        output_shape=output,
        fw_bytes=_SUMS_BYTES * (sum(map(math.prod, inputs)) + math.prod(output)),
    )
