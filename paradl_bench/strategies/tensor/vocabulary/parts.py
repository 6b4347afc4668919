"""What of a language model holds its vocabulary, and what a rank runs of that: the embedding of tokens, and the loss.

Every rank holds some tokens' rows of the embedding and of the weight that makes the logits, which may be one table. It
looks up the tokens that it has, takes zeros for all others, and the outputs are summed. Its logits are those of its
tokens; they stay parts. Cross-entropy needs three numbers of all ranks per position: the largest logit, the sum of
exponents and the logit of the target. A vocabulary that the ranks do not divide is cut unevenly, as torch's DTensor
cuts it; Megatron-LM pads it instead. Torch-free.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Megatron-LM's VocabParallelEmbedding and
vocab_parallel_cross_entropy; torch.distributed.tensor.parallel's RowwiseParallel of an embedding and loss_parallel.
"""

from __future__ import annotations

import math

from paradl_bench.network.graph import DTYPE_BYTES, Layer, LayerMemory, ModelGraph
from paradl_bench.plan.axis_planner import AxisPlace, part_of_layer
from paradl_bench.plan.tasks import Collective

SUMS = 3
"""All-reduces of the loss: of the largest logit, the sum of exponents, the target's logit."""
_PLACE_BYTES = DTYPE_BYTES["int64"] + DTYPE_BYTES["bool"]
"""Per token that is looked up: its row among the rank's own, and whether it is there."""
_VIEWS = ("view", "copy")


def takes_logits(network: ModelGraph) -> bool:
    """Whether the network ends with the cross-entropy of what it makes."""
    last = network.layers[-1] if network.layers else None
    return (
        last is not None
        and last.kind == "loss"
        and last.attributes.get("function", "cross_entropy") == "cross_entropy"
        and len(last.input_shapes) == 2
        and bool(last.inputs)
        and last.input_shapes[0][:-1] == last.input_shapes[1]
    )


def tables_of(network: ModelGraph, head: Layer) -> tuple[int, ...]:
    """Indices of the layers that embed the tokens whose logits ``head`` makes; none where it makes no such logits.

    They share the head's weight, or look up what the network reads in a table of as many rows.
    """
    embeddings = {index: layer for index, layer in enumerate(network.layers) if layer.kind == "embedding"}
    tied = tuple(index for index, layer in embeddings.items() if set(layer.parameters) & set(head.parameters))
    if tied:
        return tied
    trained = {parameter.name: parameter.shape for parameter in network.parameters}
    tokens = head.output_shape[-1]
    names = {
        layer.parameters[0]
        for layer in embeddings.values()
        if len(layer.parameters) == 1
        and trained.get(layer.parameters[0], ())[:1] == (tokens,)
        and _reads_tokens(network, layer)
    }
    only = {name for name in names if _is_table(network, name)}
    return tuple(index for index, layer in embeddings.items() if only.issuperset(layer.parameters))


def _reads_tokens(network: ModelGraph, layer: Layer) -> bool:
    layers = {other.name: other for other in network.layers}
    while layer.inputs and layer.inputs[0] in layers and layers[layer.inputs[0]].kind in _VIEWS:
        layer = layers[layer.inputs[0]]
    return layer.inputs[:1] == ("input",)


def _is_table(network: ModelGraph, name: str) -> bool:
    return all(layer.kind == "embedding" for layer in network.layers if name in layer.parameters)


def table_part(layer: Layer, rows: int) -> Layer:
    """The embedding as a rank runs it that has ``rows`` of the table: as many look-ups, in fewer rows."""
    kept = _PLACE_BYTES * math.prod(layer.input_shapes[0])
    of_sample = (0, kept) if layer.batchless else (kept, 0)
    return part_of_layer(
        layer, 1, attributes=dict(layer.attributes) | {"rows": rows}, memory=LayerMemory(kept=of_sample)
    )


def loss_memory(positions: int, tokens: int) -> LayerMemory:
    """What the loss keeps of a sample's logits: their exponents, and where the targets are."""
    return LayerMemory(kept=(positions * (DTYPE_BYTES["fp32"] * tokens + _PLACE_BYTES), 0))


def sums_of_loss(layer: Layer, place: AxisPlace, element_bytes: int) -> tuple[Collective, ...]:
    """The loss's all-reduces: a number for each position."""
    positions = math.prod(layer.input_shapes[0][:-1])
    return (place.collective("all_reduce", positions, batchless=False, element_bytes=element_bytes),) * SUMS
