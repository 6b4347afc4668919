"""Where tokens meet experts, found in the traced graph; one answer for the plan and for the run.

An expert layer is a grouped product: rows that are sorted by expert, a matrix an expert, and where each expert's rows
end (:mod:`~paradl_bench.network.kinds.grouped_matmul`). Rows are *routed* from the first product that reads them on: a
rank has all rows of its own experts. What works row by row stays routed, so that the products of one expert are on one
rank. The first layer that reads a routed tensor in another way takes the rows back. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from paradl_bench.network.graph import RETURNS_INPUT, Layer, ModelGraph

_BY_ROW = ("elementwise", "activation")
_VIEWS_BY_ROW = ("chunk", "split")
_VIEWS_OF_WEIGHTS = ("transpose", "permute", "mT", "to", "contiguous")


class Product(NamedTuple):
    """A grouped product.

    Attributes:
        rows: name of the layer that makes its rows. ends: of the one that tells where each expert's rows end.
        weight: name of the parameter. experts: how many it has a matrix of.
    """

    rows: str
    ends: str
    weight: str
    experts: int


class Routes(NamedTuple):
    """How the rows of a network's expert layers go, by index of layers.

    Attributes:
        products: all expert layers.
        counted: of those the first with its ends: ranks tell each other there how many rows come.
        sent: of those that rows are sent for: all but products of rows that are there.
        routed: the layers that run on the rows of a rank's own experts.
        returned: a layer that takes rows back, and the routed layers that it takes them back of.
        views: of matrices, as they are read.
        refused: why experts can't be shared out; empty where they can.
    """

    products: dict[int, Product]
    counted: frozenset[int] = frozenset()
    sent: frozenset[int] = frozenset()
    routed: frozenset[int] = frozenset()
    returned: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    views: frozenset[int] = frozenset()
    refused: str = ""

    @property
    def fewest(self) -> int | None:
        """Index of the product with the fewest experts."""
        return min(self.products, key=lambda index: self.products[index].experts, default=None)


class _CannotRoute(Exception):
    """Says which layer."""


def find_routes(network: ModelGraph) -> Routes:
    """How rows go, or why experts can't be shared out."""
    products: dict[int, Product] = {}
    try:
        products, views = _products(network)
        return _route(network, products, views)
    except _CannotRoute as error:
        return Routes(products, refused=str(error))


def _products(network: ModelGraph) -> tuple[dict[int, Product], frozenset[int]]:
    """The grouped products, and the layers that view their matrices."""
    shapes = {parameter.name: parameter.shape for parameter in network.parameters}
    view_of: dict[str, tuple[int, str]] = {}
    products: dict[int, Product] = {}
    for index, layer in enumerate(network.layers):
        if layer.kind == "grouped_matmul":
            products[index] = _product(layer, view_of, shapes)
        elif layer.kind == "view" and layer.attributes.get("function") in _VIEWS_OF_WEIGHTS and not layer.inputs:
            shape = shapes.get(layer.parameters[0], ()) if len(layer.parameters) == 1 else ()
            if len(shape) == 3 and layer.output_shape[:1] == shape[:1]:
                view_of[layer.name] = index, layer.parameters[0]
    weights = {product.weight for product in products.values()}
    views = frozenset(index for index, weight in view_of.values() if weight in weights)
    names = {network.layers[index].name for index in views}
    for index, layer in enumerate(network.layers):
        if index in products or index in views or layer.attributes.get(RETURNS_INPUT):
            continue
        of_weights = [name for name in layer.parameters if name in weights]
        if of_weights or names.intersection(layer.inputs):
            raise _CannotRoute(f"{layer.name} ({layer.kind}), which reads the experts' matrices otherwise")
    return products, views


def _product(layer: Layer, view_of: dict[str, tuple[int, str]], shapes: dict[str, tuple[int, ...]]) -> Product:
    where = f"{layer.name} ({layer.kind})"
    weight = ""
    if len(layer.inputs) == 3 and layer.inputs[1] in view_of:
        weight = view_of[layer.inputs[1]][1]
    elif len(layer.inputs) == 2 and len(layer.parameters) == 1:
        weight = layer.parameters[0]
    experts = layer.attributes.get("groups")
    if weight not in shapes or shapes[weight][0] != experts:
        raise _CannotRoute(f"{where}, whose matrices are no trained parameter of one matrix an expert")
    # Of one row a sample the shape is that of the row.
    if len(layer.input_shapes[0]) not in (1, 2) or layer.handled:
        raise _CannotRoute(f"{where}, whose rows are not those of tokens")
    return Product(layer.inputs[0], layer.inputs[-1], weight, int(experts))


def _route(network: ModelGraph, products: dict[int, Product], views: frozenset[int]) -> Routes:
    walk = _Walk(network, products)
    for index, layer in enumerate(network.layers):
        if index not in views:
            walk.step(index, layer)
    twice = next((name for name in walk.read_routed if name in walk.taken_back), None)
    if twice is not None:
        raise _CannotRoute(f"{twice}, whose rows are read by experts and by others")
    left = next((name for name in network.outputs if name in walk.ends_of), None)
    if left is not None:
        raise _CannotRoute(f"{left}, whose rows the model returns")
    return Routes(
        products,
        frozenset(walk.counted.values()),
        frozenset(walk.sent.values()),
        frozenset(walk.routed),
        {index: tuple(sources) for index, sources in walk.returned.items()},
        views,
    )


class _Walk:
    """Goes through the layers once, in the order of forward.

    Attributes:
        ends_of: by name of a layer whose output is routed, the ends that it is routed by.
        counted: by ends, the first product. sent: by rows and ends, the first product.
        read_routed, taken_back: names of routed outputs that are read as such, and otherwise.
    """

    def __init__(self, network: ModelGraph, products: dict[int, Product]) -> None:
        self._products, self._layers = products, network.layers
        self._index = {layer.name: index for index, layer in enumerate(network.layers)}
        self.ends_of: dict[str, str] = {}
        self.counted: dict[str, int] = {}
        self.sent: dict[tuple[str, str], int] = {}
        self.routed: set[int] = set()
        self.returned: dict[int, list[int]] = {}
        self.read_routed: set[str] = set()
        self.taken_back: set[str] = set()

    def step(self, index: int, layer: Layer) -> None:
        """The next layer."""
        product = self._products.get(index)
        stays = [name for name in layer.inputs if name in self.ends_of]
        if product is not None:
            ends = product.ends
            self.counted.setdefault(ends, index)
            stays = [name for name in stays if name == product.rows and self.ends_of[name] == ends]
            if not stays:
                self.sent.setdefault((product.rows, ends), index)
            self._stay(index, layer, ends, stays)
        elif stays and self._by_row(layer):
            self._stay(index, layer, self.ends_of[layer.inputs[0]], stays)
            return
        for name in self._others(layer, stays if product is not None else []):
            if name not in self.taken_back:
                self.taken_back.add(name)
                self.returned.setdefault(index, []).append(self._index[name])

    def _stay(self, index: int, layer: Layer, ends: str, reads: list[str]) -> None:
        self.routed.add(index)
        self.ends_of[layer.name] = ends
        if not layer.attributes.get(RETURNS_INPUT):
            self.read_routed.update(reads)

    def _others(self, layer: Layer, reads: list[str]) -> Iterator[str]:
        if not layer.attributes.get(RETURNS_INPUT):
            yield from (name for name in dict.fromkeys(layer.inputs) if name in self.ends_of and name not in reads)

    def _by_row(self, layer: Layer) -> bool:
        """Whether all that the layer reads is routed alike, and each row that it makes is of those in its place."""
        ends = {self.ends_of.get(name) for name in layer.inputs}
        if layer.parameters or len(ends) > 1 or None in ends:
            return False
        if layer.attributes.get(RETURNS_INPUT):
            return True
        if layer.kind == "view":
            return layer.attributes["function"] in _VIEWS_BY_ROW and layer.attributes.get("dims") == (-1,)
        read = {shape for name in layer.inputs for shape in self._layers[self._index[name]].output_shapes}
        return layer.kind in _BY_ROW and read.issuperset(layer.input_shapes)
