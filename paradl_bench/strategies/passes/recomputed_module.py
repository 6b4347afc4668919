"""Segments of a user's module that keep their inputs alone: ``torch.utils.checkpoint`` round their forward.

Not reentrant, and without its early stop: the whole segment runs again, so that what ranks issue does not hang on what
its last kernels keep. What runs again draws the same random numbers and leaves buffers (batch norm's running
statistics) as they are, which torch's own would update a second time.

Source: torch/utils/checkpoint.py (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.strategies.passes.recomputation import Segment, segments_of
from paradl_bench.strategies.running.operations import function_name
from paradl_bench.strategies.running.sharded_module import Repeated

_Forward = Callable[..., Any]


def recompute_segments(module: torch.nn.Module, network: ModelGraph, settings: PlanSettings) -> None:
    """Have the segments that the settings name run again in backward; does nothing a second time.

    Raises:
        UserError: a run of children of what is no ``torch.nn.Sequential``.
    """
    runs: dict[str, list[Segment]] = {}
    for segment in segments_of(network, settings):
        if segment.children is None:
            part = module.get_submodule(segment.module)
            if not isinstance(part.forward, _Recomputed):
                part.forward = _Recomputed(part.forward, module, segment.layers)
        else:
            runs.setdefault(segment.module, []).append(segment)
    for name, segments in runs.items():
        sequence = module.get_submodule(name)
        if not isinstance(sequence, torch.nn.Sequential):
            raise UserError(f"--recompute {segments[0].name}: {name} is no torch.nn.Sequential; name its modules")
        if not isinstance(sequence.forward, _Runs):
            sequence.forward = _Runs(sequence, segments, module)  # type: ignore[method-assign]


class _Recomputed:
    """A forward whose activations are computed again in backward, by whoever runs some of its layers."""

    def __init__(self, forward: _Forward, model: torch.nn.Module, layers: range) -> None:
        self._forward, self._model, self._layers = forward, model, layers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        repeated = [mode for mode in modes if isinstance(mode, Repeated)]
        if not torch.is_grad_enabled() or not all(mode.computes_again(self._layers) for mode in repeated):
            return self._forward(*args, **kwargs)
        # A tensor that is kept comes back without what strategies noted on it.
        noted = [dict(vars(value)) if isinstance(value, torch.Tensor) else {} for value in args]
        # One of another stage has no memory, and its device is none that anything is computed on.
        elsewhere = [value if isinstance(value, torch.Tensor) and value.is_meta else None for value in args]
        forward, model = self._forward, self._model

        def run(*given: Any, **named: Any) -> Any:
            for value, notes in zip(given, noted, strict=True):
                if isinstance(value, torch.Tensor):
                    vars(value).update(notes)
            values = (value if away is None else away for value, away in zip(given, elsewhere, strict=True))
            return forward(*values, **named)

        contexts = contextlib.nullcontext(), _again([mode.again() for mode in repeated], model)
        kept = (value if away is None else None for value, away in zip(args, elsewhere, strict=True))
        return checkpoint(run, *kept, use_reentrant=False, early_stop=False, context_fn=lambda: contexts, **kwargs)


@contextlib.contextmanager
def _again(repeating: Sequence[contextlib.AbstractContextManager[Any]], model: torch.nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as modes:
        for mode in repeating:
            modes.enter_context(mode)
        # The model's own calls come to the innermost mode first, which is to hand the others what they count.
        modes.enter_context(_KeptBuffers(model.buffers()))
        yield


class _KeptBuffers(TorchFunctionMode):
    """Gives copies of buffers to what would change them."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._buffers = {id(buffer) for buffer in buffers}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, in_place = function_name(function)
        if in_place or name in ("batch_norm", "instance_norm"):
            args, kwargs = tree_map_only(torch.Tensor, self._copied, (args, kwargs))
        return function(*args, **(kwargs or {}))

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._buffers:
            return tensor
        # A copy is no operation of the model's.
        with torch._C.DisableTorchFunction():
            return tensor.clone()


class _Runs:
    """Forward of a sequence, runs of whose children are computed again."""

    def __init__(self, sequence: torch.nn.Sequential, segments: Sequence[Segment], model: torch.nn.Module) -> None:
        children = list(sequence)
        self._steps: list[_Forward] = []
        done = 0
        for segment in segments:
            assert segment.children is not None
            self._steps += children[done : segment.children.start]
            run = torch.nn.Sequential(*children[segment.children.start : segment.children.stop])
            self._steps.append(_Recomputed(run.forward, model, segment.layers))
            done = segment.children.stop
        self._steps += children[done:]

    def __call__(self, input: Any) -> Any:
        for step in self._steps:
            input = step(input)
        return input
