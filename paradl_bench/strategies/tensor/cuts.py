"""How a cut of an operation's output goes back to what it reads: which dim of which input is cut.

A cut divides one dim of a tensor over the ranks; heads of an attention, features of a perceptron. What works element by
element, head by head or moves dims alone can run on its part; what needs all of the dim cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from paradl_bench.network.graph import Layer
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.network.partition import Interval

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """One dim of a tensor, over the ranks.

    Attributes:
        dim: counted from the end (-1 is the last), so that it is the same with and without the batch.
        sections: how many equal parts of the dim are each cut: 3 where queries, keys and values stand side by side.
        unequal: extents of these parts where they are not equal: keys and values may have fewer heads than queries.
    """

    dim: int
    sections: int = 1
    unequal: tuple[int, ...] = ()

    def extents(self, shape: Shape) -> tuple[int, ...]:
        """Positions of each section."""
        return self.unequal or (shape[self.dim] // self.sections,) * self.sections

    def extent(self, shape: Shape) -> int:
        """Positions of one section; of unequal ones, the most that divides all of them."""
        return math.gcd(*self.extents(shape))

    def of(self, shape: Shape, part: Interval, atoms: int) -> tuple[Interval, ...]:
        """Positions along the dim that hold ``part`` of ``atoms`` equal pieces of every section."""
        intervals, begin = [], 0
        for extent in self.extents(shape):
            size = extent // atoms
            intervals.append(Interval(begin + part.start * size, begin + part.stop * size))
            begin += extent
        return tuple(intervals)

    def shape(self, shape: Shape, part: Interval, atoms: int) -> Shape:
        """The shape of what holds that part."""
        positions = sum(interval.extent for interval in self.of(shape, part, atoms))
        at = len(shape) + self.dim
        return (*shape[:at], positions, *shape[at + 1 :])


class CannotCut(Exception):
    """Why an operation does not run on a part."""


def cuts_of_inputs(layer: Layer, cut: Cut, parameters: Sequence[Shape] = ()) -> tuple[Cut | None, ...]:
    """Per tensor that the layer reads, how it is cut where the output is; None where it is read whole.

    Args:
        parameters: shapes of the layer's, which are read whole.

    Raises:
        CannotCut: the operation needs more than its part, or a parameter has a part for each rank; the message says
            what it is.
    """
    rule = _RULES.get(layer.kind) or _OPAQUE.get(str(layer.attributes.get("function")))
    if layer.kind == "copy" and layer.attributes.get("function") not in _PLAIN_COPIES:
        rule = None
    if layer.parameters and (layer.kind not in _WITH_PARAMETERS or any(_has_dim(shape, cut) for shape in parameters)):
        rule = None
    if rule is None or not layer.input_shapes:
        raise CannotCut(f"{_what(layer)}, which needs all of it")
    return rule(layer, cut)


def _has_dim(shape: Shape, cut: Cut) -> bool:
    """Whether an operand has the dim that is cut, and is not repeated along it."""
    return len(shape) >= -cut.dim and shape[cut.dim] != 1


def _what(layer: Layer) -> str:
    function = layer.attributes.get("function")
    return f"{layer.name} ({function})" if function else f"{layer.name} ({layer.kind})"


def _element_by_element(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    return tuple(_broadcast(layer, shape, cut) for shape in layer.input_shapes)


def _broadcast(layer: Layer, shape: Shape, cut: Cut) -> Cut | None:
    """The cut of one operand; None for one that has the dim once or not at all, and is repeated along it."""
    if not _has_dim(shape, cut):
        return None
    if shape[cut.dim] != layer.output_shape[cut.dim]:
        raise CannotCut(f"{_what(layer)}, whose operands do not line up")
    return cut


def _dropout(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    if layer.attributes["function"] not in ("dropout", "alpha_dropout"):
        raise CannotCut(f"{_what(layer)}, which drops whole channels")
    return _element_by_element(layer, cut)


def _softmax(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    if _is_along(layer, cut):
        raise CannotCut(f"{_what(layer)}, which sums over it")
    return _element_by_element(layer, cut)


def _is_along(layer: Layer, cut: Cut) -> bool:
    """Whether a dim that a layer works along may be the one that is cut: shapes leave out the batch, dims do not."""
    dims, along = len(layer.output_shape), layer.attributes["dim"]
    return not {cut.dim, cut.dim + dims, cut.dim + dims + 1}.isdisjoint(along if isinstance(along, tuple) else (along,))


def _reduced(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    """A sum or mean over dims that stay, with one position each."""
    (shape,) = layer.input_shapes
    if layer.attributes["dim"] is None or len(shape) != len(layer.output_shape) or _is_along(layer, cut):
        raise CannotCut(f"{_what(layer)}, which needs all of it")
    return (cut,)


def _normalised(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    """Layer and RMS normalisation over features of a head, which are the last dims."""
    function, size = layer.attributes["function"], layer.attributes["size"]
    if function not in ("layer_norm", "rms_norm") or not isinstance(size, tuple) or -cut.dim <= len(size):
        raise CannotCut(f"{_what(layer)}, which needs all of it")
    return (cut,)


def _mask(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    if layer.attributes["function"] in ("tril", "triu") and cut.dim > -3:
        raise CannotCut(f"{_what(layer)}, which tells its rows and columns apart")
    return _element_by_element(layer, cut)


def _product(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    """A matrix product runs head by head; rows and columns of the product stay whole."""
    if cut.dim > -3:
        raise CannotCut(f"{_what(layer)}, a product of activations over it")
    return _element_by_element(layer, cut)


def _attention(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    """Queries, keys and values by heads, of which keys and values may have fewer; a mask where it has heads."""
    if layer.attributes["function"] != "scaled_dot_product_attention" or cut.dim != -3 or cut.sections != 1:
        raise CannotCut(f"{_what(layer)}, which is no attention by heads there")
    if any(len(shape) < 3 for shape in layer.input_shapes[:3]):
        raise CannotCut(f"{_what(layer)}, which has no heads")
    masks = [None if len(shape) < 3 or shape[-3] == 1 else cut for shape in layer.input_shapes[3:]]
    return (cut, cut, cut, *masks)


def _view(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    function, dims = layer.attributes["function"], layer.attributes.get("dims")
    shape = layer.input_shapes[0]
    if function in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"):
        input_cut = _reshaped(shape, layer.output_shape, cut)
    elif function in ("transpose", "t"):
        input_cut = cut._replace(dim=_swapped(cut.dim, dims if isinstance(dims, tuple) else (-2, -1)))
    elif function == "permute" and isinstance(dims, tuple):
        input_cut = cut._replace(dim=dims[cut.dim])
    elif function in ("chunk", "split"):
        input_cut = _parted(shape, layer.output_shapes, cut, dims[0] if isinstance(dims, tuple) else None)
    elif function in ("unbind", "select") and isinstance(dims, tuple) and dims[0] < cut.dim:
        input_cut = cut
    elif function == "getitem" and isinstance(dims, tuple) and dims[cut.dim]:
        input_cut = cut._replace(dim=dims[cut.dim])
    elif function in ("expand", "expand_as", "detach"):
        return _element_by_element(layer, cut)
    else:
        raise CannotCut(f"{_what(layer)}, which needs all of it")
    # Dims of a permutation count the batch, which shapes leave out.
    if input_cut is None or -input_cut.dim > len(shape) or shape[input_cut.dim] % input_cut.sections:
        raise CannotCut(f"{_what(layer)}, from {'x'.join(map(str, shape))} to {'x'.join(map(str, layer.output_shape))}")
    return (input_cut, *(_broadcast(layer, other, cut) for other in layer.input_shapes[1:]))


def _swapped(dim: int, dims: Sequence[int]) -> int:
    first, second = dims
    return {first: second, second: first}.get(dim, dim)


def _reshaped(shape: Shape, output: Shape, cut: Cut) -> Cut | None:
    """The dim of ``shape`` that holds the pieces that ``cut`` cuts of ``output``; elements keep their order."""
    if cut.unequal:
        return cut if cut.dim == -1 and shape[-1:] == output[-1:] else None
    at = len(output) + cut.dim
    before = math.prod(output[:at]) * cut.sections
    for index, extent in enumerate(shape):
        outer = math.prod(shape[:index])
        if before % outer:
            return None
        sections = before // outer
        if extent % sections == 0 and extent > sections:
            return Cut(index - len(shape), sections)
    return None


def _parted(shape: Shape, outputs: Sequence[Shape], cut: Cut, dim: int | None) -> Cut | None:
    """Before it is parted along the dim that is cut, each of the parts is a section.

    Args:
        dim: that it is parted along; None for that in which parts differ.
    """
    differing = [at for at in range(-len(shape), 0) if len({output[at] for output in outputs}) > 1]
    if dim is None and len(differing) != 1:
        return None
    if (differing[0] if dim is None else dim) != cut.dim:
        return cut
    if dim is None:
        return Cut(cut.dim, unequal=tuple(output[cut.dim] for output in outputs)) if cut == Cut(cut.dim) else None
    extent = outputs[0][dim]
    return None if shape[dim] % extent else Cut(dim, cut.sections * (shape[dim] // extent))


def _joined(layer: Layer, cut: Cut) -> tuple[Cut | None, ...]:
    """Tensors joined along another dim than the one that is cut."""
    if layer.attributes["function"] == "stack" or _is_along(layer, cut):
        raise CannotCut(f"{_what(layer)}, which joins along it")
    return _element_by_element(layer, cut)


Rule = Callable[[Layer, Cut], tuple[Cut | None, ...]]

_RULES: dict[str, Rule] = {
    "elementwise": _element_by_element,
    "activation": _element_by_element,
    "copy": _element_by_element,
    "dropout": _dropout,
    "mask": _mask,
    "softmax": _softmax,
    "reduction": _reduced,
    "norm": _normalised,
    "matmul": _product,
    "attention": _attention,
    "view": _view,
    "cat": _joined,
}
_WITH_PARAMETERS = ("elementwise", "norm")
"""Kinds whose parameters are repeated along dims that they lack."""
_PLAIN_COPIES = ("contiguous", "clone", "float", "to", "type_as")
_OPAQUE: dict[str, Rule] = dict.fromkeys(
    ("clamp", "clip", "square", "sin", "cos", "erf", "addcmul", "lerp"), _element_by_element
)


def is_view(layer: Layer) -> bool:
    """Whether the layer moves no data."""
    return _moves_no_data(layer.kind)


# Every layer of a large model is asked, for each way to share it out.
@cache
def _moves_no_data(name: str) -> bool:
    kind = layer_kinds().get(name)
    return kind is not None and kind.view
