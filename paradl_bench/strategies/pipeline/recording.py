"""Forward of one micro-batch as every stage knows it: its operations and what they return, recorded on the meta device.

A stage passes over operations of others, and returns what they would: a tensor without memory, or what it has received.
Code may hold a tensor under several names and work in place on it; so it is known which operation made each tensor
first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.plan.compute import operations_of_forward
from paradl_bench.strategies.pipeline.crossings import Crossing, untouched
from paradl_bench.strategies.running.operations import is_operation, output_of, shaped
from paradl_bench.strategies.running.sharded_module import control_flow_varies

INPUT = Crossing(-1)
"""The model's own input."""


class RecordedCall(NamedTuple):
    """One operation of forward.

    Attributes:
        function: of torch. result: what it returned, on the meta device.
        tensors: those that it returned, or the one that it assigned to. made: per tensor, which it was first.
    """

    function: Any
    result: Any
    tensors: tuple[torch.Tensor, ...]
    made: tuple[Crossing, ...]


class Calls(NamedTuple):
    """Forward of one micro-batch: its operations, the model's input, and its output; all on the meta device.

    Attributes:
        untouched: indices of the operations that return what they are given, which is another tensor on each stage.
        needed: which leaves of the output the loss reads.
    """

    operations: Sequence[RecordedCall]
    inputs: torch.Tensor
    outputs: Any
    untouched: frozenset[int]
    needed: frozenset[int]

    def first(self, value: Crossing) -> Crossing:
        """Which tensor it was first that an operation returned."""
        return value if value == INPUT else self.operations[value.layer].made[value.output]


def tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that an operation returned, as tracing numbers them."""
    return tuple(leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What an operation returned, with other tensors in their places."""
    if isinstance(value, torch.Tensor):
        return tensors[0]
    leaves, structure = tree_flatten(value)
    others = iter(tensors)
    return tree_unflatten([next(others) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)


def _dtype_of_input(module: torch.nn.Module, network: ModelGraph) -> torch.dtype:
    """fp32, as samples are made; where a copy of the model was given a dtype, as for a proof, that."""
    traced = {tensor.name: DTYPE_BYTES[tensor.dtype] for tensor in network.held_parameters}
    for name, parameter in module.named_parameters():
        if name in traced and parameter.is_floating_point():
            return torch.float32 if parameter.element_size() == traced[name] else parameter.dtype
    return torch.float32


def record_calls(module: torch.nn.Module, network: ModelGraph, micro_batch: int, *, widened: bool = False) -> Calls:
    """Run forward of a micro-batch on the meta device, which allocates and computes nothing.

    Args:
        widened: whether parameters have been rounded to bf16 or will be, and are fp32 in this forward.

    Raises:
        UserError: the model needs values to run.
        WorkError: it called other operations than when the network was traced.
    """
    on_meta = copy_on_meta(module)
    if widened:
        on_meta.float()
    dtype = torch.int64 if network.input_dtype != "fp32" else _dtype_of_input(module, network)
    inputs = torch.empty((micro_batch, *network.input_shape), dtype=dtype, device="meta")
    recorder = _Recorder(inputs)
    try:
        with recorder:
            outputs = on_meta(inputs)
    except (NotImplementedError, RuntimeError) as error:
        raise _needs_values(module, network, recorder, error) from error
    expected = operations_of_forward(network)
    if len(recorder.calls) != expected:
        counts = f"{len(recorder.calls)} operations and {expected}"
        raise control_flow_varies(f"{network.name} called {counts} when it was traced", "in stages")
    return Calls(
        [call._replace(result=_detached(call.result), tensors=_detached(call.tensors)) for call in recorder.calls],
        inputs,
        _detached(outputs),
        untouched(network),
        _read_by_loss(network, recorder, tree_flatten(outputs)[0]),
    )


def _read_by_loss(network: ModelGraph, recorder: _Recorder, leaves: Sequence[Any]) -> frozenset[int]:
    """Which leaves of the model's output the loss reads; those that no operation returned are taken to be read."""
    index = {layer.name: i for i, layer in enumerate(network.layers)} | {"input": INPUT.layer}
    operations = operations_of_forward(network)
    read = {
        recorder.first(Crossing(index[name], output))
        for layer in network.layers[operations:]
        for name, output in layer.values_read
        if index[name] < operations
    }
    tensors = {
        number: recorder.made_first(leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
    }
    return frozenset(i for i, made in tensors.items() if made is None or made in read) or frozenset(tensors)


def _needs_values(module: torch.nn.Module, network: ModelGraph, recorder: _Recorder, error: Exception) -> UserError:
    at = len(recorder.calls)
    last = f" behind {network.layers[at - 1].name}" if 0 < at <= len(network.layers) else ""
    uncounted = [
        name
        for name, part in module.named_modules()
        if getattr(part, "momentum", 0) is None and getattr(part, "num_batches_tracked", None) is not None
    ]
    instead = f"; give {uncounted[0]} a momentum: without, batch norm reads its count of batches" if uncounted else ""
    return UserError(
        f"{network.name} cannot run in stages: its code asks for values{last}, which a stage that does not compute"
        f" them lacks{instead or f': {error}'}"
    )


def _detached(value: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def copy_on_meta(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose parameters and buffers have shapes alone; those that are shared stay shared."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


class OnMeta:
    """Gives operations tensors without memory where one of them is so: constants are made on the CPU, unless the model
    says where.

    Attributes:
        copied: tensors that were met for the first time, with what stands for them; whoever reads it empties it.
    """

    def __init__(self) -> None:
        # Tensors are kept alive so that an id names one tensor only.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, given: Any) -> Any:
        """Arguments, as they are or all without memory."""
        if not any(tensor.is_meta for tensor in tensors_of(given)):
            return given
        return tree_map_only(torch.Tensor, self._on_meta, given)

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, tensor.detach().to("meta")
            self.copied.append(self._copies[id(tensor)])
        return self._copies[id(tensor)][1]


class _Recorder(TorchFunctionMode):
    def __init__(self, inputs: torch.Tensor) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self._made = {id(inputs): INPUT}
        self._on_meta = OnMeta()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._on_meta((args, kwargs or {}))
        for tensor, copied in self._on_meta.copied:
            if id(tensor) in self._made:
                self._made.setdefault(id(copied), self._made[id(tensor)])
        self._on_meta.copied.clear()
        result = shaped(function)(*args, **kwargs)
        if is_operation(function, result):
            tensors = tensors_of(output_of(function, args, result))
            made = []
            for number, tensor in enumerate(tensors):
                made.append(self._made.setdefault(id(tensor), Crossing(len(self.calls), number)))
            self.calls.append(RecordedCall(function, result, tensors, tuple(made)))
        return result

    def first(self, value: Crossing) -> Crossing:
        return value if value == INPUT else self.calls[value.layer].made[value.output]

    def made_first(self, tensor: torch.Tensor) -> Crossing | None:
        return self._made.get(id(tensor))
