"""Layers of a network on inputs of other shapes: which fit, what they return, and what FLOPs and bytes follow.

Parameters stay as they are. So FLOPs grow with the elements of what is returned, of losses and of pooling to a given
size with those of what is read; bytes with both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from paradl_bench.network.graph import BatchBytes, Layer, LayerMemory
from paradl_bench.network.kinds.kind import layer_kinds, windows_of
from paradl_bench.network.replacement.modules import Misfit, Shape, positions, shape_text

ParameterShapes = Mapping[str, Shape]
_OF_INPUTS = ("adaptive_pool", "loss")
"""Kinds whose FLOPs are of what they read."""


def reshaped(layer: Layer, shapes: tuple[Shape, ...], parameters: ParameterShapes) -> Layer:
    """The layer on inputs of these shapes.

    Raises:
        Misfit: it takes none of these shapes, or what it does with others is not known.
    """
    as_traced = Misfit(_texts(layer.input_shapes))
    if layer.batchless or layer.batchless_inputs not in ((), (1,)) or layer.further_outputs:
        raise as_traced
    if len(shapes) != len(layer.input_shapes) or not all((*shapes[:1], *layer.input_shapes[:1])):
        raise as_traced
    kind = layer_kinds().get(layer.kind)
    if layer.kind in _RETURNED:
        output = _RETURNED[layer.kind](layer, shapes)
    elif kind is not None and kind.by_element(layer.attributes):
        output = _by_element(layer, shapes, parameters)
    elif kind is not None and kind.windows is not None:
        output = _windowed(layer, shapes)
    else:
        raise as_traced
    attributes = {**layer.attributes, "output": output} if "output" in layer.attributes else layer.attributes
    return msgspec.structs.replace(
        layer,
        attributes=attributes,
        input_shapes=shapes,
        output_shape=output,
        memory=_memory(layer, shapes),
        **_work(layer, shapes, output),
    )


def _work(layer: Layer, shapes: Sequence[Shape], output: Shape) -> dict[str, int]:
    read, was_read = sum(map(math.prod, shapes)), layer.input_elements
    returned, was_returned = math.prod(output), layer.output_elements
    now, before = (read, was_read) if layer.kind in _OF_INPUTS else (returned, was_returned)
    flops = {name: getattr(layer, name) * now // max(before, 1) for name in _FLOPS}
    return {**flops, "fw_bytes": layer.fw_bytes * (read + returned) // max(was_read + was_returned, 1)}


_FLOPS = ("fw_flops", "bw_input_flops", "bw_weight_flops")


def _memory(layer: Layer, shapes: Sequence[Shape]) -> LayerMemory | None:
    """What was watched of a sample grows with the elements of what is read first."""
    if layer.memory is None:
        return None
    now, before = math.prod(shapes[0]), max(math.prod(layer.input_shapes[0]), 1)

    def grown(of: BatchBytes) -> BatchBytes:
        return (of[0] * now // before, of[1])

    watched = {name: grown(getattr(layer.memory, name)) for name in ("kept", "forward", "backward", "backward_if_held")}
    return msgspec.structs.replace(layer.memory, **watched)


def _texts(shapes: Sequence[Shape]) -> str:
    return " and ".join(map(shape_text, shapes))


def _by_element(layer: Layer, shapes: tuple[Shape, ...], parameters: ParameterShapes) -> Shape:
    if set(layer.input_shapes) != {layer.output_shape} or len(set(shapes)) > 1:
        raise Misfit(_texts(layer.input_shapes))
    widths = {math.prod(parameters.get(name, ())) for name in layer.parameters} - {1}
    if widths and shapes[0][:1] != layer.input_shapes[0][:1]:
        raise Misfit(f"{layer.input_shapes[0][0]} channels")
    return shapes[0]


def _windowed(layer: Layer, shapes: tuple[Shape, ...]) -> Shape:
    channels, *extents = shapes[0]
    if layer.parameters and channels != layer.input_shapes[0][0]:
        raise Misfit(f"{layer.input_shapes[0][0]} channels")
    if layer.attributes.get("ceil_mode"):
        raise Misfit(f"{shape_text(layer.input_shapes[0])}, since it rounds up")
    windows = windows_of(layer.attributes)
    same = layer.attributes.get("padding") == "same"
    returned = tuple(extents) if same and len(extents) == len(windows) else positions(windows, tuple(extents))
    return (layer.output_shape[0] if layer.parameters else channels, *returned)


def _linear(layer: Layer, shapes: tuple[Shape, ...]) -> Shape:
    *rows, width = shapes[0] or (0,)
    if width != layer.input_shapes[0][-1]:
        raise Misfit(str(layer.input_shapes[0][-1]))
    return (*rows, layer.output_shape[-1])


def _adaptive_pool(layer: Layer, shapes: tuple[Shape, ...]) -> Shape:
    if len(shapes[0]) != len(layer.input_shapes[0]):
        raise Misfit(f"{len(layer.input_shapes[0])} dims a sample")
    return (shapes[0][0], *layer.output_shape[1:])


def _view(layer: Layer, shapes: tuple[Shape, ...]) -> Shape:
    """Dims that ``flatten`` makes one, or a sample as one dim, as by ``x.view(len(x), -1)``; no other view."""
    read, returned = layer.input_shapes[0], layer.output_shape
    if returned == (math.prod(read),):
        return (math.prod(shapes[0]),)
    merged = len(read) - len(returned) + 1
    if layer.attributes.get("function") != "flatten" or merged < 1 or len(shapes[0]) != len(read):
        raise Misfit(_texts(layer.input_shapes))
    fitting = [at for at in range(len(returned)) if _flattened(read, at, merged) == returned]
    candidates = {_flattened(shapes[0], at, merged) for at in fitting}
    if len(candidates) != 1:
        raise Misfit(_texts(layer.input_shapes))
    return candidates.pop()


def _flattened(shape: Shape, at: int, dims: int) -> Shape:
    return (*shape[:at], math.prod(shape[at : at + dims]), *shape[at + dims :])


def _batch_norm(layer: Layer, shapes: tuple[Shape, ...]) -> Shape:
    before = layer.input_shapes[0]
    if shapes[0][:1] != before[:1] or len(shapes[0]) != len(before):
        raise Misfit(f"{before[0]} channels in {len(before)} dims a sample")
    return shapes[0]


def _norm(layer: Layer, shapes: tuple[Shape, ...]) -> Shape:
    size, before = layer.attributes["size"], layer.input_shapes[0]
    if isinstance(size, tuple) and shapes[0][-len(size) :] != size:
        raise Misfit(f"{shape_text(size)} at the end")
    if not isinstance(size, tuple) and (shapes[0][:1] != before[:1] or len(shapes[0]) != len(before)):
        raise Misfit(f"{before[0]} channels in {len(before)} dims a sample")
    return shapes[0]


def _softmax(layer: Layer, shapes: tuple[Shape, ...]) -> Shape:
    if len(shapes[0]) != len(layer.input_shapes[0]):
        raise Misfit(f"{len(layer.input_shapes[0])} dims a sample")
    return shapes[0]


def _loss(layer: Layer, shapes: tuple[Shape, ...]) -> Shape:
    """Cross-entropy takes any number of classes, on as many positions as there are targets."""
    before = layer.input_shapes[0]
    classes = layer.attributes.get("function", "cross_entropy") in ("cross_entropy", "nll_loss")
    if not classes or not shapes[0] or shapes[0][1:] != before[1:]:
        raise Misfit(_texts(layer.input_shapes[:1]) + (", or another number of classes" * classes))
    return layer.output_shape


_RETURNED: dict[str, Callable[[Layer, tuple[Shape, ...]], Shape]] = {
    "linear": _linear,
    "adaptive_pool": _adaptive_pool,
    "view": _view,
    "batch_norm": _batch_norm,
    "norm": _norm,
    "softmax": _softmax,
    "loss": _loss,
}
"""Shapes returned, by kind; kinds that go by elements or windows say so themselves."""
