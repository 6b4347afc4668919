"""Products of rows with a matrix each of a parameter, as experts are: of which parameter, and of which rows.

Rows are sorted by matrix, and the product is told where each matrix' rows end
(:mod:`~paradl_bench.network.kinds.grouped_matmul`). Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paradl_bench.network.graph import RETURNS_INPUT, Layer, ModelGraph
from paradl_bench.plan.tasks import Communication

GROUPED = "grouped_matmul"
"""Kind of the layers."""
_VIEWS_OF_WEIGHTS = ("transpose", "permute", "mT", "to", "contiguous")
_TURNING = ("transpose", "permute", "mT")
_ROWS = ("input", "mat_a", "self")
_ENDS = ("offs", "offsets")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Product(NamedTuple):
    """A grouped product.

    Attributes:
        rows: name of the layer that makes its rows. ends: of the one that tells where each expert's rows end.
        weight: name of the parameter. experts: how many it has a matrix of.
        output_dim: dim of the parameter along which the output's features lie; 1 or 2.
        view: index of the layer that turns the parameter as the product reads it; None where it reads that itself.
    """

    rows: str
    ends: str
    weight: str
    experts: int
    output_dim: int
    view: int | None = None


class OtherProduct(Exception):
    """Says which layer reads experts' matrices in another way, or multiplies by no parameter of them."""


def grouped_products(network: ModelGraph) -> tuple[dict[int, Product], frozenset[int]]:
    """The grouped products of a network, and the layers that view their matrices, by index.

    Raises:
        OtherProduct: says which layer is none that can be shared out.
    """
    shapes = {parameter.name: parameter.shape for parameter in network.parameters}
    view_of: dict[str, tuple[int, str]] = {}
    products: dict[int, Product] = {}
    for index, layer in enumerate(network.layers):
        if layer.kind == GROUPED:
            products[index] = _product(network, layer, view_of, shapes)
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
            raise OtherProduct(f"{layer.name} ({layer.kind}), which reads the experts' matrices otherwise")
    return products, views


def _product(
    network: ModelGraph, layer: Layer, view_of: dict[str, tuple[int, str]], shapes: dict[str, tuple[int, ...]]
) -> Product:
    where = f"{layer.name} ({layer.kind})"
    weight, view = "", None
    if len(layer.inputs) == 3 and layer.inputs[1] in view_of:
        view, weight = view_of[layer.inputs[1]]
    elif len(layer.inputs) == 2 and len(layer.parameters) == 1:
        weight = layer.parameters[0]
    experts = layer.attributes.get("groups")
    if weight not in shapes or shapes[weight][0] != experts:
        raise OtherProduct(f"{where}, whose matrices are no trained parameter of one matrix an expert")
    # Of one row a sample the shape is that of the row.
    if len(layer.input_shapes[0]) not in (1, 2) or layer.handled:
        raise OtherProduct(f"{where}, whose rows are not those of tokens")
    output_dim = 1 if view is not None and _turns(network.layers[view], shapes[weight]) else 2
    return Product(layer.inputs[0], layer.inputs[-1], weight, int(experts), output_dim, view)


def _turns(view: Layer, shape: tuple[int, ...]) -> bool:
    """Whether a view of matrices is of their transposes; shapes say so of all but square ones."""
    return view.output_shape != shape or (shape[1] == shape[2] and view.attributes.get("function") in _TURNING)


def rows_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rows among the arguments of a grouped product."""
    return next((kwargs[name] for name in _ROWS if name in kwargs), args[0] if args else None)


def with_rows(args: tuple[Any, ...], kwargs: dict[str, Any], rows: Any) -> Arguments:
    """The arguments with other rows."""
    named = next((name for name in _ROWS if name in kwargs), None)
    return ((rows, *args[1:]), kwargs) if named is None else (args, kwargs | {named: rows})


def ends_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where each matrix' rows end, among the arguments of a grouped product."""
    return args[2] if len(args) > 2 else next(kwargs[name] for name in _ENDS if name in kwargs)


def with_ends(args: tuple[Any, ...], kwargs: dict[str, Any], ends: Any) -> Arguments:
    """The arguments with other ends."""
    kwargs = kwargs | {name: ends for name in _ENDS if name in kwargs}
    return (*args[:2], ends, *args[3:]) if len(args) > 2 else args, kwargs


def numbers_among(layer: Layer, messages: Sequence[Communication]) -> int:
    """How many of the messages in front of a product only tell numbers of rows; the one of the rows is the last."""
    return max(len(messages) - 1, 0) if layer.kind == GROUPED else 0
