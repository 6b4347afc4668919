"""How long a model's own variables hold what an operation returned: often beyond the last operation that reads it.

Python frees a tensor when the last variable, argument or list lets go of it. A block's input is held while the block
runs, and branches in a list until all of them are stacked and forward goes on. Forward runs once more for this, with
nothing else holding its tensors: no record of the trace, and nothing that autograd saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from paradl_bench.measure.tracing.layouts import laid_out_as_on_a_cpu
from paradl_bench.measure.tracing.traced_values import tensors_in
from paradl_bench.network.graph import NEXT_FORWARD, Layer
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.strategies.running.operations import function_name, is_operation, output_of, shaped


class _Deaths(TorchFunctionMode):
    """Counts operations, and notes how many had run when the tensors of each were let go of.

    Attributes:
        functions: of operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []
        self._held: list[int] = []
        self._let_go: list[int] = []
        self._followed: list[weakref.ref[torch.Tensor]] = []

    @property
    def held_until(self) -> list[int | None]:
        """Per operation, the index of the last one that had run when its memory was let go of; None if it is held."""
        return [None if held else count - 1 for held, count in zip(self._held, self._let_go, strict=True)]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = shaped(function)(*args, **(kwargs or {}))
        if is_operation(function, result):
            result = laid_out_as_on_a_cpu(function, args, kwargs or {}, result)
            self._follow(tuple(tensors_in(output_of(function, args, result))))
            self.functions.append(function_name(function)[0])
        return result

    def _follow(self, outputs: Sequence[torch.Tensor]) -> None:
        """Follow the tensors that share the first one's memory."""
        index = len(self.functions)

        def note(_: object) -> None:
            self._held[index] -= 1
            self._let_go[index] = len(self.functions)

        with torch._C.DisableTorchFunction():
            memory = [tensor.untyped_storage()._cdata for tensor in outputs]
        followed = [weakref.ref(tensor, note) for tensor, at in zip(outputs, memory, strict=True) if at == memory[0]]
        self._followed += followed
        self._held.append(len(followed))
        self._let_go.append(0)


def held_by_variables(
    layers: Sequence[Layer], functions: Sequence[str], model: LoadedModel, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Layer, ...]:
    """The layers, each with ``held_until`` where variables hold its output beyond its last reader.

    Args:
        functions: that the layers were traced from, in their order.
        model: which has not run yet. batch: inputs and targets.
    """
    mode = _Deaths()
    try:
        # What is packed to nothing is not held by autograd; nobody runs backward here.
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _unpacked), mode:
            model.loss(model.module(batch[0]), batch[1])
    except RuntimeError:
        # Functions that refuse such hooks: then the last reader is what is known.
        return tuple(layers)
    if mode.functions != list(functions):
        return tuple(layers)
    last = {layer.name: index for index, layer in enumerate(layers)}
    last |= {name: index for index, layer in enumerate(layers) for name in layer.inputs}

    def named(layer: Layer, until: int | None) -> str:
        if until is None:
            return NEXT_FORWARD
        return layers[until].name if until > last[layer.name] else ""

    return tuple(
        msgspec.structs.replace(layer, held_until=named(layer, until))
        for layer, until in zip(layers, mode.held_until, strict=True)
    )


def _unpacked(_: object) -> torch.Tensor:
    raise RuntimeError("backward does not run here")
