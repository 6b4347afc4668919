"""Modules as a trace would show them: their layers, parameters and buffers in a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.network.graph import NEXT_FORWARD, Layer, Tensor
from paradl_bench.network.kinds.kernel_shape import layer_of_call, parameters_of
from paradl_bench.network.kinds.kind import BUFFER, Call, kind_of_function
from paradl_bench.network.replacement.modules import Misfit, Shape
from paradl_bench.network.replacement.written import Written

_COUNTER = "num_batches_tracked"


class Inserted(NamedTuple):
    """What stands in the place of layers, in forward order; parameters in registration order.

    Attributes:
        arrival: names of parameters in the order in which backward finishes their gradients.
    """

    layers: tuple[Layer, ...] = ()
    parameters: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    arrival: tuple[str, ...] = ()

    def then(self, other: Inserted) -> Inserted:
        """Both, in this order; backward begins with the other."""
        return Inserted(
            self.layers + other.layers,
            self.parameters + other.parameters,
            self.buffers + other.buffers,
            other.arrival + self.arrival,
        )


def module_names(first: str, modules: Sequence[Written]) -> tuple[str, ...]:
    """Names of modules in the place of layers: one has the first's, several as in torch's ``Sequential``."""
    return (first,) if len(modules) == 1 else tuple(f"{first}.{index}" for index in range(len(modules)))


def insert(written: Written, name: str, source: str, shape: Shape) -> Inserted:
    """The layers of a module that reads ``source``.

    Raises:
        Misfit: it does not take the shape.
    """
    given = written.filled(shape)
    width = next((given[argument] for argument in given if written.is_width(argument)), None)
    if width is not None and (not shape or width != shape[written.module.width_dim]):
        raise Misfit(str(width))
    call = written.module.call(given, shape)
    layer = layer_of_call(kind_of_function()[call.function], call, name, (source,))
    trained = tuple(Tensor(name=f"{name}.{tensor.parameter}", shape=tensor.shape) for tensor in parameters_of(call))
    # Autograd finishes the gradient of a linear layer's bias first.
    arrival = [tensor.name for tensor in trained]
    counter, buffers = _running(call, name)
    return Inserted(
        layers=(*counter, _of_network(layer, name, [tensor.name for tensor in buffers])),
        parameters=trained,
        buffers=buffers,
        arrival=tuple(reversed(arrival) if call.function == "linear" else arrival),
    )


def _of_network(layer: Layer, name: str, buffers: Sequence[str]) -> Layer:
    return msgspec.structs.replace(
        layer,
        parameters=tuple(f"{name}.{parameter}" for parameter in layer.parameters),
        state=tuple(buffer for buffer in buffers if not buffer.endswith(_COUNTER)),
        returns_view=layer.kind == "view",
    )


def _running(call: Call, name: str) -> tuple[tuple[Layer, ...], tuple[Tensor, ...]]:
    """Running statistics of a batch norm, and the operation that counts its batches."""
    running = [tensor for tensor in call.tensors if tensor.parameter.startswith(BUFFER)]
    if not running:
        return (), ()
    counter = f"{name}.{_COUNTER}"
    counting = Layer(
        name=f"{counter}.add",
        kind="elementwise",
        attributes={"function": "add", "in_place": True},
        fw_flops=1,
        fw_bytes=4,
        state=(counter,),
        held_until=NEXT_FORWARD,
    )
    buffers = [Tensor(name=f"{name}.{tensor.parameter.removeprefix(BUFFER)}", shape=tensor.shape) for tensor in running]
    return (counting,), (*buffers, Tensor(name=counter, shape=(), dtype="int64"))
