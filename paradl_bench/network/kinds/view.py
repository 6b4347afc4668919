"""Operations that change shape or strides and move no data: flatten, view, permute, split, indexing by slices."""

from __future__ import annotations

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, as_tuple, nothing_saved


def facts(call: Call) -> Facts:
    """No FLOPs. The output's shape tells one view from another, and of those that move or part dims, which dims."""
    attributes: dict[str, Attribute] = {"function": call.function, "output": call.output_shape}
    dims = _dims(call)
    return Facts(attributes if dims is None else {**attributes, "dims": dims})


def _dims(call: Call) -> tuple[int, ...] | None:
    """Counted from the end of what is read: of a permutation where each dim comes from; the two that change places; the
    one that is parted or taken from; of indexing where each dim comes from that is left whole, 0 for others.
    """
    count = len(call.tensors[0].shape)
    if call.function == "getitem":
        return _kept_by_index(call)
    dims: tuple[int, ...]
    if call.function == "transpose":
        given = call.bind("input dim0 dim1")
        dims = (int(given["dim0"]), int(given["dim1"]))
    elif call.function == "permute":
        order = call.keywords.get("dims", call.arguments[1:])
        dims = as_tuple(order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order, count)
    elif call.function in ("chunk", "split") and len(set(call.output_shapes)) == 1:
        dims = (int(call.bind("input parts dim").get("dim", 0)),)
    elif call.function in ("unbind", "select"):
        dims = (int(call.bind("input dim").get("dim", 0)),)
    else:
        return None
    return tuple(dim if dim < 0 else dim - count for dim in dims)


def _kept_by_index(call: Call) -> tuple[int, ...] | None:
    """None where tensors or lists are among the indices."""
    shape, index = call.tensors[0].shape, call.arguments[1] if len(call.arguments) > 1 else None
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, bool) or not isinstance(item, (int, slice, type(None), type(...))) for item in items):
        return None
    taken = sum(isinstance(item, (int, slice)) for item in items)
    if ... not in items:
        items.append(...)
    at = items.index(...)
    items[at : at + 1] = [slice(None)] * (len(shape) - taken)
    kept, dim = [], -len(shape)
    for item in items:
        if item is None:
            kept.append(0)
            continue
        if isinstance(item, slice):
            kept.append(dim if item.indices(shape[dim]) == (0, shape[dim], 1) else 0)
        dim += 1
    return tuple(kept)


# Their gradients are put together in a tensor of the input's size.
_PARTS = ("chunk", "split", "unbind", "getitem", "narrow", "select", "expand", "expand_as")


def passes_gradient(layer: Layer) -> bool:
    """Views of all of a tensor do."""
    return layer.attributes["function"] not in _PARTS


KIND = LayerKind(
    name="view",
    functions=(
        "flatten", "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "expand", "chunk", "split",
        "unflatten", "getitem", "t", "narrow", "select", "unbind", "detach", "view_as", "expand_as", "movedim",
        "T", "mT", "H", "mH", "real", "imag", "data",
    ),
    facts=facts,
    attributes={"function": TEXT},
    view=True,
    saves=nothing_saved,
    passes_gradient=passes_gradient,
    # Whatever the dtype of indices is.
    autocast=lambda attributes, device: "input",
    # Indexing by numbers or a mask copies.
    watched=lambda call: call.function == "getitem" and _kept_by_index(call) is None,
)  # fmt: skip
