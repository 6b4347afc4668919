"""Parameters that every rank of tensor parallelism holds whole, and makes a part of the gradient of. Torch-free.

Between the layers of a pair these are what all heads share, as the weights of a norm of queries. On parts of the
sequence also those of every layer in no pair, and biases behind rows. Backward of the layer ends with the sum of the
parts, one message a layer, as torch's SequenceParallel sums them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.tensor.pairs import Pairs

Summed = Mapping[int, tuple[str, ...]]
"""By index of the layer, names of its parameters."""


def summed_parameters(network: ModelGraph, pairs: Pairs, *, on_sequence: bool) -> Summed:
    """Those of a network; ``on_sequence``: whether ranks hold parts of the sequence between pairs."""
    trained = {parameter.name for parameter in network.parameters}
    # Of matrices of experts, a rank has the features that it multiplies all rows with.
    views = {linear.view for linear in pairs.linear.values()}
    summed = {}
    for index, layer in enumerate(network.layers):
        piece = pairs.pieces.get(index)
        if index in views:
            continue
        between = piece is not None and piece.part == "inside"
        parameters = tuple(name for name in layer.parameters if name in trained and (between or on_sequence))
        if piece is not None and not between:
            bias = pairs.linear[index].bias if piece.part == "row" and on_sequence else ""
            parameters = (bias,) if bias else ()
        if parameters:
            summed[index] = parameters
    return summed


def sum_of(index: int, summed: Summed, sizes_bytes: Mapping[str, int], place: AxisPlace) -> tuple[Collective, ...]:
    """The collective that sums the gradients of a layer's parameters, if it has any that are."""
    size = sum(sizes_bytes[name] for name in summed.get(index, ()))
    return (place.collective("all_reduce", size, batchless=True, element_bytes=1),) if size else ()


def arriving_summed(network: ModelGraph, summed: Summed) -> tuple[str, ...]:
    """Parameters in the order in which gradients arrive: one message sums a layer's, in the order that it reads them.

    Without it they arrive as its kernel returns them: the bias of a linear layer before the weight.
    """
    readers = Counter(name for layer in network.layers for name in layer.parameters)
    places = {name: place for place, name in enumerate(network.gradient_order)}
    order = list(network.gradient_order)
    for names in summed.values():
        alone = [name for name in names if readers[name] == 1 and name in places]
        for place, name in zip(sorted(places[name] for name in alone), alone, strict=True):
            order[place] = name
    return tuple(order)
