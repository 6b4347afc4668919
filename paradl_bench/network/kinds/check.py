"""Networks of a file held to what their layers' kinds need of them, before anything is computed from it."""

from __future__ import annotations

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.attributes import wrong_attribute
from paradl_bench.network.kinds.kind import LayerKind, layer_kinds


def check_layers(network: ModelGraph, where: str) -> None:
    """Hold a network to at least one layer, and its layers to the attributes and shapes that their kinds need.

    Args:
        where: it was found, for the message: ``network FILE``.

    Raises:
        UserError: the first layer that is wrong, and in what.
    """
    if not network.layers:
        raise UserError(f"{where}: it has no layers; write it anew with paradl-bench describe")
    kinds = layer_kinds()
    for layer in network.layers:
        kind = kinds.get(layer.kind)
        wrong = (
            None if kind is None else wrong_attribute(kind.attributes, layer.attributes) or _wrong_shapes(layer, kind)
        )
        if wrong:
            raise UserError(f"{where}: layer {layer.name!r} of kind {layer.kind} {wrong}")


def _wrong_shapes(layer: Layer, kind: LayerKind) -> str | None:
    least = kind.reads_dims
    if least is not None and (
        not layer.input_shapes or min(len(layer.input_shapes[0]), len(layer.output_shape)) < least
    ):
        return f"has {layer.input_shapes} for input_shapes and {layer.output_shape} for output_shape, which lack dims"
    if layer.inputs and layer.output_shape and not layer.input_shapes:
        return f"reads {', '.join(layer.inputs[:3])} and has no input_shapes"
    if kind.windows is None or layer.batchless or layer.batchless_inputs:
        return None
    settings = {name: layer.attributes.get(name) for name in ("kernel", "stride", "padding", "dilation")}
    dims = {name: len(value) for name, value in settings.items() if isinstance(value, tuple)}
    dims |= {"input_shapes": len(layer.input_shapes[0]) - 1, "output_shape": len(layer.output_shape) - 1}
    if len(set(dims.values())) == 1:
        return None
    return f"differs in spatial dims: {', '.join(f'{name} {count}' for name, count in dims.items())}"
