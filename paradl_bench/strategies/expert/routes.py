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
from paradl_bench.strategies.splitting.grouped_products import OtherProduct, Product, grouped_products

_BY_ROW = ("elementwise", "activation")
_VIEWS_BY_ROW = ("chunk", "split")


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


def find_routes(network: ModelGraph) -> Routes:
    """How rows go, or why experts can't be shared out."""
    products: dict[int, Product] = {}
    try:
        products, views = grouped_products(network)
        return _route(network, products, views)
    except OtherProduct as error:
        return Routes(products, refused=str(error))


def _route(network: ModelGraph, products: dict[int, Product], views: frozenset[int]) -> Routes:
    walk = _Walk(network, products)
    for index, layer in enumerate(network.layers):
        if index not in views:
            walk.step(index, layer)
    twice = next((name for name in walk.read_routed if name in walk.taken_back), None)
    if twice is not None:
        raise OtherProduct(f"{twice}, whose rows are read by experts and by others")
    left = next((name for name in network.outputs if name in walk.ends_of), None)
    if left is not None:
        raise OtherProduct(f"{left}, whose rows the model returns")
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
