"""Adaptive pooling to a given output size, and means over dims (global average pooling)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer
from paradl_bench.network.kinds.attributes import SHAPE, Need
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, Saved, TensorArgument
from paradl_bench.network.kinds.operand_sizes import spatial, spatial_of, volumes_in_fp32_on_a_cpu

_FUNCTIONS = tuple(f"adaptive_{way}_pool{dims}d" for way in ("avg", "max") for dims in (1, 2, 3))


def facts(call: Call) -> Facts:
    """FLOPs: each input element is read once in each direction."""
    return Facts(
        {"function": call.function, "output": call.output_shape},
        fw_flops=call.input_elements,
        bw_input_flops=call.input_elements,
    )


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
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


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    dims = int(settings["function"][-2])
    of_samples, output = (sizes["batch"], sizes["channels"]), spatial_of("out", sizes, dims)
    tensor = TensorArgument((*of_samples, *spatial_of("in", sizes, dims)))
    return Call(settings["function"], (tensor, output), {}, ((*of_samples, *output),), sizes["batch"])


KIND = LayerKind(
    name="adaptive_pool",
    functions=_FUNCTIONS,
    facts=facts,
    reads_dims=1,
    attributes={
        "function": Need(lambda value: value in _FUNCTIONS, f"one of {', '.join(_FUNCTIONS)}"),
        "output": SHAPE,
    },
    build=_build,
    by_channel=lambda attributes: True,
    saves=saves,
    operands=operands,
    autocast=volumes_in_fp32_on_a_cpu,
    call=_call,
)
