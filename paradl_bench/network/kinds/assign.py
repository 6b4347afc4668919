"""Operations that write into a tensor that is there: assignment to a part of it (``x[:, 0] = y``), copies, filling."""

from __future__ import annotations

import math
from typing import Any

from paradl_bench.network.graph import Attribute
from paradl_bench.network.kinds.attributes import FLAG, TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, TensorArgument, batch_dim, nothing_saved


def facts(call: Call) -> Facts:
    """No FLOPs. Forward reads and writes as many elements as are assigned; autograd keeps none of them.

    Backward copies the gradient, with zeros where other values were assigned, and takes out what belongs to those.
    """
    shape = call.tensors[0].shape
    assigned = _indexed(shape, call.arguments[1]) if call.function == "setitem" else math.prod(shape)
    if batch_dim(shape, call.batch) is not None:
        # Per sample; else all of a tensor that holds no batch.
        assigned = -(-assigned // call.batch)
    attributes: dict[str, Attribute] = {"function": call.function, "in_place": call.in_place, "assigned": assigned}
    reads = len(call.tensors) > 1
    return Facts(attributes, moved_elements=(1 + reads) * assigned)


def _indexed(shape: tuple[int, ...], index: Any) -> int:
    """Elements that an index picks. What a mask picks hangs on its values: it counts as everything."""
    items = list(index) if isinstance(index, tuple) else [index]
    places = len([item for item in items if item is not None and item is not ...])
    if ... in items:
        at = items.index(...)
        items[at : at + 1] = [slice(None)] * max(0, len(shape) - places)
    elements, dim, listed = math.prod(shape), 0, 1
    for item in (item for item in items if item is not None):
        if isinstance(item, bool) or dim >= len(shape):
            return math.prod(shape)
        picked = 1
        if isinstance(item, slice):
            picked = len(range(*item.indices(shape[dim])))
        elif isinstance(item, (TensorArgument, tuple, list)):
            # Lists of places are read side by side: together they pick as many as the longest has.
            listed = max(listed, math.prod(item.shape) if isinstance(item, TensorArgument) else len(item))
        elements, dim = elements // max(shape[dim], 1) * picked, dim + 1
    return min(elements * listed, math.prod(shape))


KIND = LayerKind(
    name="assign",
    functions=("setitem", "copy", "fill", "zero"),
    facts=facts,
    attributes={"function": TEXT, "in_place": FLAG},
    saves=nothing_saved,
)
