"""How a stage runs the model's own forward: its operations, and what it returns in the place of others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from paradl_bench.core.errors import WorkError
from paradl_bench.strategies.pipeline.crossings import Crossing
from paradl_bench.strategies.pipeline.recording import Calls, tensors_of, with_tensors
from paradl_bench.strategies.pipeline.running.held_parameters import Registered, all_registered
from paradl_bench.strategies.pipeline.stage_shards import StageShard
from paradl_bench.strategies.running.autocast import converts_alone
from paradl_bench.strategies.running.operations import output_of
from paradl_bench.strategies.running.sharded_module import Sharding, Walk, control_flow_varies


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "meta"


def varies(name: str, index: int) -> WorkError:
    """The error of forward that does not call what was recorded."""
    return control_flow_varies(f"{name} differs from when it was recorded at its operation {index}", "in stages")


@contextlib.contextmanager
def _anew(made: Callable[..., Walk], index: int, missing: Sequence[Registered]) -> Iterator[None]:
    with all_registered(missing), made(index):
        yield


class StageWalk(Walk):
    """Runs the stage's operations; of others it returns what they would, or what was received from them.

    Constants are made on every stage that reads them, on its own device: the model's code may ask for that of a tensor
    from elsewhere. Forward runs to its end, so that whoever hooks modules sees every one of them left again.

    Attributes:
        first: what was received, by which tensor it was first: code may hold it under that name alone.
        kept: what is sent, once forward has run.
        missing: what of the model's parameters other ranks hold, for what runs again when forward is over.
    """

    def __init__(
        self,
        sharding: Sharding,
        calls: Calls,
        shard: StageShard,
        received: Mapping[Crossing, torch.Tensor],
        device: torch.device,
        index: int = 0,
    ) -> None:
        super().__init__(sharding, index)
        stage, self._shard = shard.stage, shard
        self.missing: Sequence[Registered] = ()
        self._all = calls
        self.kept: dict[Crossing, torch.Tensor] = dict(received)
        self.first = {calls.first(value): tensor for value, tensor in received.items()}
        self._constants, self._untouched, self._device = stage.made_again, calls.untouched, device
        self._calls, self._received = calls.operations, received
        self._given = {value.layer for value in (*received, *self.first)}
        self._sends: dict[int, list[Crossing]] = {}
        for value in stage.sends:
            self._sends.setdefault(value.layer, []).append(value)
        self._start, self._stop = stage.layers.start, stage.layers.stop
        self._name = stage.network.name

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """A walk of the same stage from here on; what it makes is sent no second time."""
        made = functools.partial(StageWalk, self._sharding, self._all, self._shard, self._received, self._device)
        # It holds nothing that this walk has kept.
        return self._by_itself(functools.partial(_anew, made, self.index, self.missing))

    def computes_again(self, layers: range) -> bool:
        """Whether the stage has layers among these that run a second time."""
        start = self._start
        parts = (range(part.start + start, part.stop + start) for part in self._shard.recomputed)
        return any(part.start in layers for part in parts)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index = self.index
        elsewhere = not self._start <= index < self._stop and index not in self._constants
        # Attributes that are views come as functions that are made anew, and are equal.
        if elsewhere and index < len(self._calls) and self._calls[index].function == function:
            self.index += 1
            return self._from_elsewhere(index, args, kwargs or {})
        args, given = self._on_own_device(args, kwargs or {})
        result = super().__torch_function__(function, types, args, given)
        if self.index > index and elsewhere:
            raise varies(self._name, index)
        if self.index > index and index in self._sends:
            tensors = tensors_of(output_of(function, args, result))
            self.kept.update((value, tensors[value.output]) for value in self._sends[index])
        return result

    def _converts_alone(self, function: Any, args: tuple[Any, ...]) -> bool:
        # Of tensors from elsewhere too, which have no memory.
        return converts_alone(function, args, self._device.type)

    def _from_elsewhere(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._calls[index]
        given = next(iter(tensors_of((args, kwargs))), None)
        if index in self._untouched and given is not None and not given.is_meta:
            args, kwargs = tree_map_only(torch.Tensor, self._likeness, self._on_own_device(args, kwargs))
            with torch._C.DisableTorchFunction():
                return call.function(*args, **kwargs)
        if index not in self._given and self._given.isdisjoint(made.layer for made in call.made):
            return call.result
        returned = enumerate(zip(call.tensors, call.made, strict=True))
        tensors = [
            self._received.get(Crossing(index, output), self.first.get(made, tensor))
            for output, (tensor, made) in returned
        ]
        return call.result if call.result is None else with_tensors(call.result, tensors)

    def _likeness(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor itself; of one from elsewhere, a likeness here, as it may say which dtype and device are wanted."""
        if not tensor.is_meta:
            return tensor
        return torch.empty((), dtype=tensor.dtype, device=self._device).expand(tensor.shape)

    def _on_own_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments that name no device of tensors from elsewhere, which have no memory."""
        if any(map(_is_meta, args)) or any(map(_is_meta, kwargs.values())):
            args = tuple(self._device if _is_meta(value) else value for value in args)
            kwargs = {name: self._device if _is_meta(value) else value for name, value in kwargs.items()}
        return args, kwargs
