"""Refuse models whose operations depend on the batch, and those that change the batch that they are given.

A plan holds for any number of samples: ranks and micro-batches run other numbers of them than tracing does. So forward
and the loss have to call the same operations for all. A loop over samples does not, nor does a condition on their
number. Forward runs at two small numbers of samples here, which costs little, before it is traced at a large one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.module_paths import RunningModule, following_modules
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.strategies.running.operations import function_name, is_operation, shaped

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""

_SEED = 5
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""What a model's own code, and torch called by it, raise beside RuntimeError."""


class Operation(NamedTuple):
    """A call in forward.

    Attributes:
        module: path of the module that calls it; empty for the model itself, and for the loss.
    """

    module: str
    function: str
    tensors: int

    def __str__(self) -> str:
        return f"{self.module}.{self.function}" if self.module else self.function


class _Names(TorchFunctionMode):
    """Notes operations, and nothing about them that takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[RunningModule] = []
        self.operations: list[Operation] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = shaped(function)(*args, **(kwargs or {}))
        if is_operation(function, result):
            count = len(result) if isinstance(result, (tuple, list)) else 1
            module = self.running[-1].name if self.running else ""
            self.operations.append(Operation(module, function_name(function)[0], count))
        return result


def operations_of(model: LoadedModel, batch: Batch) -> list[Operation]:
    """The operations of forward and the loss, in order.

    Raises:
        RuntimeError: forward or the loss fails.
    """
    mode = _Names()
    try:
        with _drawing_alike(), following_modules(model.module, mode.running), mode:
            model.loss(model.module(batch[0]), batch[1])
    except UserError:
        raise
    except _MISTAKES as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return mode.operations


@contextmanager
def _drawing_alike() -> Iterator[None]:
    """Let every run draw the same numbers, as those that decide whether a layer is left out."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        try:
            yield
        finally:
            random.setstate(state)


def refuse_dependence(model: LoadedModel, make_batch: Callable[[int], Batch], samples: Sequence[int]) -> None:
    """Refuse a model whose forward calls other operations for other numbers of samples.

    Args:
        model: its module may keep what its first forward makes, as caches do.

    Raises:
        UserError: the operations differ; the message names the first that does.
        RuntimeError: forward or the loss fails.
    """
    first, *others = samples
    expected = operations_of(model, make_batch(first))
    for count in others:
        called = operations_of(model, make_batch(count))
        if called == expected:
            continue
        # What a cache holds from the first forward on, or what is drawn elsewhere, has nothing to do with samples.
        if operations_of(model, make_batch(first)) == expected:
            raise UserError(_refusal(model.name, (first, expected), (count, called)))
        return


def _refusal(name: str, one: tuple[int, list[Operation]], other: tuple[int, list[Operation]]) -> str:
    shared = min(len(one[1]), len(other[1]))
    at = next((i for i in range(shared) if one[1][i] != other[1][i]), shared)
    calls = [f"{_called(operations, at)} of {samples} samples" for samples, operations in (one, other)]
    return (
        f"model {name}: forward depends on how many samples there are, at operation {at + 1}: it calls"
        f" {calls[0]}, and {calls[1]}; let it call the same operations for any number, without a loop over samples"
    )


def _called(operations: list[Operation], at: int) -> str:
    if at == len(operations):
        return "nothing more for a batch"
    tensors = f" ({operations[at].tensors} tensors)" if operations[at].tensors > 1 else ""
    return f"{operations[at]}{tensors} for a batch"


def refuse_changed_input(network: ModelGraph) -> None:
    """Refuse a model that changes its own input in place: every iteration reads the same batch again.

    Raises:
        UserError: names the layer.
    """
    for layer in network.layers:
        if ("input", 0) in layer.values_written:
            raise UserError(
                f"model {network.name}: {layer.name} changes the model's input in place, which every iteration reads"
                " again; do that out of place, or on x.clone()"
            )
