"""Rows of tokens that are sorted, as by expert, and put back: which of them a rank has, and in which order. Torch-free.

A token may have several rows, one for each of its experts. Where a model sorts the rows of all tokens, a rank sorts
those of its own tokens. The order is another one, but what comes of a row is the same, until rows are put back. So
tensors meet row by row only where both are in one order, and a product of groups only where its ends count what the
rows were sorted by. Numbers of rows are those of the rank's own tokens, and are good for such a product alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paradl_bench.network.graph import RETURNS_INPUT, Layer, Value
from paradl_bench.strategies.tensor.cuts import CannotCut, Cut

_FIRST = Cut(-1)
_DIVISIONS = ("floordiv", "floor_divide")
_COUNTS = ("bincount", "histc", "searchsorted", "sum")
_SAME_VALUES = (
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "to", "int", "long",
)  # fmt: skip


class Order(NamedTuple):
    """Which row is whose: tensors of one order have rows of the same tokens in the same places.

    Attributes:
        each: rows of a token. sorted_by: the layer that sorted them; empty where they are in the order of tokens.
    """

    each: int = 1
    sorted_by: str = ""


OF_TOKENS = Order()


class Held(NamedTuple):
    """A tensor of which a rank has what its own tokens make.

    Attributes:
        along: the dim of its rows; None of numbers of rows. order: of its rows.
        of: the tensor whose values these are, in some order, or of whose rows these are the numbers.
        places: the order of the rows whose places its values are; None of other values.
    """

    along: Cut | None
    order: Order
    of: Value
    places: Order | None = None

    @property
    def each(self) -> int:
        """Rows of a token; 0 where the serial model has others in their places."""
        own = self.along is None or self.order.sorted_by or self.places is not None
        return 0 if own else self.order.each


Given = Sequence[Held | None]
"""What a layer reads, tensor by tensor; None of what is whole on every rank."""


class Rows:
    """Operations that sort rows, pick them by their places, and count them."""

    def __init__(self) -> None:
        self._sorted: dict[str, Value] = {}

    def held(self, layer: Layer, given: Given) -> Held | None:
        """What such an operation makes; None of another operation.

        Raises:
            CannotCut: it makes something else of a rank's rows than of all.
        """
        function = str(layer.attributes.get("function"))
        if layer.kind == "grouped_matmul":
            return self._product(layer, given)
        if any(tensor is not None and tensor.along is None for tensor in given):
            return _of_counts(layer, given)
        if function == "argsort" and given[0] is not None and len(layer.input_shapes[0]) == 1:
            return self._sort(layer, given[0])
        if function in _DIVISIONS and len(given) == 1:
            return _divided(given[0])
        if function in ("getitem", "index_select") and len(given) == 2:
            return _picked(layer, given)
        if function == "index_add" and len(given) == 3:
            return _added(layer, given)
        if function in _COUNTS and given[0] is not None and layer.batchless and 0 in layer.without_gradient:
            return _counted(layer, given[0])
        return None

    def _sort(self, layer: Layer, rows: Held) -> Held:
        """Places of rows in the order that they get; of places that were sorted, those that put rows back."""
        if rows.along != _FIRST:
            raise CannotCut(f"{layer.name} (argsort), which sorts more than rows")
        if rows.places is not None:
            if rows.places.each != rows.order.each:
                raise CannotCut(f"{layer.name} (argsort), which sorts places that come several times")
            return Held(_FIRST, rows.places, (layer.name, 0), rows.order)
        self._sorted[layer.name] = rows.of
        return Held(_FIRST, Order(rows.order.each, layer.name), (layer.name, 0), rows.order)

    def _product(self, layer: Layer, given: Given) -> Held:
        """Of rows that are sorted by what the ends count."""
        rows, ends = given[0], given[-1]
        sorts = rows is not None and rows.along == Cut(-2) and rows.places is None and len(given) > 1
        if not sorts or rows is None or ends is None or ends.along is not None:
            raise CannotCut(f"{layer.name} ({layer.kind}), whose groups are none of sorted rows")
        if any(tensor is not None for tensor in given[1:-1]) or ends.of != self._sorted.get(rows.order.sorted_by):
            raise CannotCut(f"{layer.name} ({layer.kind}), whose groups are not what its rows were sorted by")
        return Held(rows.along, rows.order, (layer.name, 0))


def _of_counts(layer: Layer, given: Given) -> Held:
    """Numbers of rows, added up or converted."""
    (counts, *others) = given
    if counts is None or others or layer.input_shapes[0] != layer.output_shape:
        raise CannotCut(f"{layer.name} ({layer.attributes.get('function', layer.kind)}), which reads numbers of rows")
    return counts


def _divided(places: Held | None) -> Held | None:
    """Places of rows over how many a token has: places of tokens."""
    if places is None or places.places is None or places.places.sorted_by:
        return None
    return places._replace(places=OF_TOKENS)


def _picked(layer: Layer, given: Given) -> Held | None:
    """Rows in the order of the places that pick them."""
    rows, places = given
    if places is None or places.places is None:
        return None
    shape, number = layer.input_shapes[0], layer.input_shapes[1]
    by_first = rows is not None and rows.along == Cut(-len(shape)) and places.along == _FIRST and len(number) == 1
    if not by_first or rows is None or rows.order != places.places or layer.output_shape != (*number, *shape[1:]):
        raise CannotCut(
            f"{layer.name} ({layer.attributes['function']}), which picks other rows than those of the places"
        )
    return Held(Cut(-len(shape)), places.order, rows.of, rows.places)


def _added(layer: Layer, given: Given) -> Held:
    """Rows, each added to that in its place."""
    into, places, rows = given
    shapes, what = layer.input_shapes, f"{layer.name} (index_add)"
    if into is None or places is None or rows is None or layer.along != -len(shapes[0]) or len(shapes[1]) != 1:
        raise CannotCut(f"{what}, which adds to other rows than a rank has")
    dims = into.along == Cut(-len(shapes[0])) and rows.along == Cut(-len(shapes[2])) and places.along == _FIRST
    if (
        not dims
        or (into.order, places.order) != (places.places, rows.order)
        or (into.places, rows.places) != (None, None)
    ):
        raise CannotCut(f"{what}, which adds to other rows than those of the places")
    return Held(into.along, into.order, (layer.name, 0))


def _counted(layer: Layer, rows: Held) -> Held | None:
    """How many rows there are of each value; None of what leaves rows."""
    shape = layer.input_shapes[0]
    if rows.along is None or rows.places is not None or len(layer.output_shape) != 1:
        return None
    if layer.attributes["function"] == "sum":
        at = len(shape) + rows.along.dim
        if len(shape) != 2 or layer.attributes["keepdim"] or (*shape[:at], *shape[at + 1 :]) != layer.output_shape:
            return None
    elif len(shape) != 1:
        return None
    return Held(None, rows.order, rows.of)


def held_by_row(layer: Layer, along: Cut, needed: Sequence[Cut | None], given: Given, length: int) -> Held:
    """What an operation makes that works on each row by itself.

    Args:
        needed: per tensor, the dim that has to be cut. length: tokens of a sample.

    Raises:
        CannotCut: rows do not belong together.
    """
    what = f"{layer.name} ({layer.attributes.get('function', layer.kind)})"
    read = [tensor for tensor in given if tensor is not None]
    orders = {tensor.order for tensor in read}
    order = Order(layer.output_shape[along.dim] // length)
    if len(orders) > 1:
        raise CannotCut(f"{what}, which reads rows in unlike orders")
    (of_read,) = orders or {order}
    if of_read.sorted_by:
        if order.each != of_read.each:
            raise CannotCut(f"{what}, which puts rows together that were sorted")
        order = of_read
    whole = any(needs is not None and tensor is None for needs, tensor in zip(needed, given, strict=True))
    if whole and order != OF_TOKENS:
        raise CannotCut(f"{what}, which reads a row of a whole tensor with each of several of a token")
    of, places = (layer.name, 0), {tensor.places for tensor in read} - {None}
    function = layer.attributes.get("function")
    if len(read) == len(given) == 1:
        if layer.attributes.get(RETURNS_INPUT) or function in _SAME_VALUES:
            return Held(along, order, read[0].of, read[0].places)
        of = read[0].of if function == "one_hot" else of
    if places:
        raise CannotCut(f"{what}, which computes with places of rows")
    return Held(along, order, of)
