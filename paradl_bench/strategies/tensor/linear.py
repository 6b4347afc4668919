"""Linear layers as tensor parallelism sees them: a weight of the model's own, whichever way round it is stored."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.strategies.splitting.grouped_products import GROUPED, OtherProduct, grouped_products

_STORED_BY_INPUTS = ("addmm", "matmul", "mm")
"""Functions that multiply by the weight as it is; ``linear`` multiplies by its transpose."""
SHARED = "it shares a parameter with another layer"


class Linear(NamedTuple):
    """The parameters of a linear layer.

    Attributes:
        weight, bias: names; no bias is an empty name.
        output_dim, input_dim: dims of the weight along which the output's and the input's features lie.
        tied: whether the weight is a table of embeddings as well, and belongs to no other layer.
        view: index of the layer that turns the weight, where that is a matrix for each of several groups of rows, as
            experts have; None where the product reads it itself.
    """

    weight: str
    bias: str
    output_dim: int
    input_dim: int
    tied: bool = False
    view: int | None = None


def function_of(layer: Layer) -> str:
    """The torch function that a layer of this kind calls; only linear layers may leave it out."""
    return str(layer.attributes.get("function", layer.kind))


def linear_layers(network: ModelGraph) -> dict[int, Linear | str]:
    """By index in the network, the layers that multiply by a weight; a text says why one cannot be cut."""
    used = Counter(name for layer in network.layers for name in layer.parameters)
    tables = (layer for layer in network.layers if layer.kind == "embedding")
    looked_up = Counter(name for layer in tables for name in layer.parameters)
    shapes = {parameter.name: parameter.shape for parameter in network.parameters}
    linear_or_reason: dict[int, Linear | str] = _of_groups(network, used)
    for index, layer in enumerate(network.layers):
        function = function_of(layer)
        if function != "linear" and function not in _STORED_BY_INPUTS:
            continue
        if function == "matmul" and not layer.parameters:
            continue
        matrices = [name for name in layer.parameters if len(shapes.get(name, ())) == 2]
        biases = [name for name in layer.parameters if len(shapes.get(name, ())) == 1]
        expected = 1 + (function == "addmm" or bool(layer.attributes.get("bias", False)))
        if len(matrices) != 1 or len(layer.parameters) != expected or len(matrices) + len(biases) != expected:
            linear_or_reason[index] = "its weight is no trained parameter of its own"
        elif any(used[name] > 1 + looked_up[name] for name in layer.parameters):
            linear_or_reason[index] = SHARED
        elif len(layer.input_shapes) != 1 or len(layer.inputs) != 1:
            linear_or_reason[index] = "it reads more than one tensor"
        else:
            dim = 1 if function in _STORED_BY_INPUTS else 0
            shape = shapes[matrices[0]]
            if (layer.output_shape[-1], layer.input_shapes[0][-1]) == (shape[dim], shape[1 - dim]):
                tied = any(looked_up[name] for name in layer.parameters)
                linear_or_reason[index] = Linear(matrices[0], biases[0] if biases else "", dim, 1 - dim, tied)
            else:
                linear_or_reason[index] = "its weight does not multiply the features that it reads"
    return {index: linear_or_reason[index] for index in sorted(linear_or_reason)}


def _of_groups(network: ModelGraph, used: Counter[str]) -> dict[int, Linear | str]:
    """Products of groups of rows with a matrix each."""
    try:
        products, _ = grouped_products(network)
    except OtherProduct as error:
        grouped = (index for index, layer in enumerate(network.layers) if layer.kind == GROUPED)
        return dict.fromkeys(grouped, f"experts can't be cut: {error}")
    return {
        index: SHARED
        if used[product.weight] > 1
        else Linear(product.weight, "", product.output_dim, 3 - product.output_dim, view=product.view)
        for index, product in products.items()
    }
