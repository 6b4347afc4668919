"""Adaptive pooling to a given output size, and means over dims (global average pooling)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import SHAPE, per_dim
from paradl_bench.network.kinds.kind import Call, Cast, Facts, LayerKind, Operands, Saved, TensorArgument, always
from paradl_bench.network.kinds.operand_sizes import spatial, spatial_of

_FUNCTIONS = tuple(f"adaptive_{way}_pool{dims}d" for way in ("avg", "max") for dims in (1, 2, 3))


def facts(call: Call) -> Facts:
    """FLOPs: each input element is read once in each direction."""
    return Facts(
        {"function": call.function, "output": call.output_shape},
        fw_flops=call.input_elements,
        bw_input_flops=call.input_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """The adaptive pooling function, over as many dims as its name says."""
    import torch.nn.functional as F

    name = str(attributes["function"])
    output = attributes["output"]
    assert isinstance(output, tuple)
    function: Any = getattr(F, name)
    dims = int(name[-2])
    return lambda inputs, parameters: function(inputs[0], output[-dims:])


def saves(layer: Layer) -> Saved:
    """A mean over all positions, which an average to one position is, keeps nothing; a maximum its place."""
    if str(layer.attributes["function"]).startswith("adaptive_max"):
        return Saved(inputs=True, indices=layer.output_elements)
    output = layer.attributes["output"]
    assert isinstance(output, tuple)
    dims = int(str(layer.attributes["function"])[-2])
    return Saved(inputs=any(extent != 1 for extent in output[-dims:]))


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch, channels and extents."""
    channels, *extents = layer.input_shapes[0]
    of_output = layer.output_shape[1:]
    sizes = {"batch": batch, "channels": channels, **spatial("in", tuple(extents)), **spatial("out", of_output)}
    return Operands(sizes, {"function": str(layer.attributes["function"])})


def call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    """The adaptive pooling function of its name."""
    dims = int(settings["function"][-2])
    of_samples, output = (sizes["batch"], sizes["channels"]), spatial_of("out", sizes, dims)
    tensor = TensorArgument((*of_samples, *spatial_of("in", sizes, dims)))
    return Call(settings["function"], (tensor, output), {}, ((*of_samples, *output),), sizes["batch"])


def autocast(attributes: Mapping[str, Attribute], device: str) -> Cast:
    """A CPU pools volumes in fp32."""
    return "fp32" if device == "cpu" and str(attributes["function"]).endswith("3d") else "widest"


KIND = LayerKind(
    name="adaptive_pool",
    functions=_FUNCTIONS,
    facts=facts,
    reads_dims=1,
    attributes={"function": per_dim(*_FUNCTIONS), "output": SHAPE},
    build=build,
    by_channel=always,
    saves=saves,
    operands=operands,
    autocast=autocast,
    call=call,
)
