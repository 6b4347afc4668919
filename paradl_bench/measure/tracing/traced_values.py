"""Which operation made what each tensor holds, where operations also work in place, on views and through aliases.

A tensor is known by the operation that returned it last (:data:`~paradl_bench.network.graph.Value`). What it holds may
come from a later one that changed its memory: that is seen in its version counter, and known by its storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from paradl_bench.network.graph import Value


class Given(NamedTuple):
    """A tensor that an operation is given: how often it was changed before, and whether it required a gradient."""

    tensor: torch.Tensor
    version: int
    graded: bool


Versions = list[Given]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a value, those inside tuples, lists and dicts included, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))


def versions_of(tensors: Iterable[torch.Tensor]) -> Versions:
    """Tensors as they are before an operation."""
    return [Given(tensor, _version(tensor), tensor.requires_grad) for tensor in tensors]


def changed_since(versions: Versions) -> list[torch.Tensor]:
    """Those of the tensors that were changed."""
    return [tensor for tensor, version, _ in versions if _version(tensor) != version]


def without_own_state(
    given: Versions, changed: Iterable[torch.Tensor], returned: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors that an operation was given, but for those that it changes beside what it returns: its own state,
    as running statistics are.
    """
    state = {_memory(tensor) for tensor in changed} - {_memory(tensor) for tensor in returned}
    return [tensor for tensor, *_ in given if _memory(tensor) not in state]


def _version(tensor: torch.Tensor) -> int:
    # Tensors of inference mode count nothing.
    return 0 if tensor.is_inference() else tensor._version


def _memory(tensor: torch.Tensor) -> int:
    """What all tensors of the same memory have in common."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse and nested tensors are more than one piece of memory, and have no views here; lazy parameters none yet.
        return id(tensor)


class _Named(NamedTuple):
    """What a tensor is called, and the place of the operation that it has that from; -1 of the input."""

    value: Value
    place: int


class ReadTensors(NamedTuple):
    """What an operation reads.

    Attributes:
        inputs: the operations that made what the tensors hold. values: the tensors.
    """

    inputs: tuple[str, ...]
    values: tuple[Value, ...]


class TracedValues:
    """The tensors of one forward, and what changed them."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        self._names: dict[int, _Named] = {}
        self._writers: dict[int, _Named] = {}
        self._sharing: dict[int, list[torch.Tensor]] = {}
        self._held: dict[int, list[str]] = {}
        # Tensors are kept alive so that an id names one tensor only.
        self._alive: list[Any] = [held]
        for name, tensor in held.items():
            self._held.setdefault(_memory(tensor), []).append(name)

    def name(self, tensor: torch.Tensor, value: Value, place: int) -> None:
        """An operation returned a tensor."""
        if id(tensor) not in self._names:
            self._alive.append(tensor)
            self._sharing.setdefault(_memory(tensor), []).append(tensor)
        self._names[id(tensor)] = _Named(value, place)

    def read(self, tensors: Iterable[torch.Tensor]) -> ReadTensors:
        """What an operation reads that is called with these."""
        inputs, values = [], []
        for tensor in tensors:
            named, writer = self._names.get(id(tensor)), self._writers.get(_memory(tensor))
            known = [maker for maker in (named, writer) if maker is not None]
            if known:
                last = max(known, key=lambda maker: maker.place)
                inputs.append(last.value[0])
                values.append(last.value if named is None else named.value)
        return ReadTensors(tuple(dict.fromkeys(inputs)), tuple(dict.fromkeys(values)))

    def write(self, changed: Iterable[torch.Tensor], layer: str, place: int) -> tuple[Value, ...]:
        """An operation changed tensors, before what it returned is named; returns all tensors of that memory."""
        written: list[Value] = []
        for tensor in changed:
            memory = _memory(tensor)
            self._writers[memory] = _Named((layer, 0), place)
            written += [self._names[id(other)].value for other in self._sharing.get(memory, ())]
        return tuple(dict.fromkeys(written))

    def held(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Names of the parameters and buffers whose memory these are, or are a part of."""
        return tuple(dict.fromkeys(name for tensor in tensors for name in self._held.get(_memory(tensor), ())))
