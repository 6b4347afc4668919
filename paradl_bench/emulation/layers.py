"""Ghost layers: a model's own operations with their parameters, shapes and gradients, and sleep in the place of work.

A ghost stands where torch's function stands, below everything that a strategy does: what runs sharded hands its shard's
arguments to the ghost, and moves what the ghost returns. Outputs have the shape, strides and type that the function
gives on the meta device; all of them lie in one block of memory, which holds zeros. Backward of a ghost sleeps once,
for all its gradients (or once for each part of backward, where the plan runs them apart), and gives

    to a leaf (a parameter)         zeros of its shape: one block of memory that all parameters' gradients share
    to what is no ghost's           zeros of its shape without memory of their own, for a strategy to send on
    to what another ghost made      nothing: autograd runs that one's backward none the less, and adds up no zeros; if
                                    it runs backward in parts, zeros without memory, for the second part to start from

Gradients of a layer's parameters arrive in the order in which tracing saw them arrive, which fills buckets.

Operations without a floating point output (masks, indices, counters) run for real beside their sleep: control flow may
hang on them, and they are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from paradl_bench.emulation.forms import Form, Output, describe, form_of
from paradl_bench.emulation.sleeper import Sleeper, Slept
from paradl_bench.network.graph import RETURNS_INPUT, Layer, ModelGraph
from paradl_bench.records.training.ghost_record import GhostPhase, GhostRole
from paradl_bench.strategies.running.operations import function_name
from paradl_bench.strategies.running.sharded_module import Call, Substitute, functions_of


class GhostLayers:
    """The ghosts of a network's layers on one rank.

    Called with a layer's index in the network and the torch function that the model calls there, it returns what is
    called in the function's place (:attr:`~paradl_bench.strategies.running.sharded_module.Sharding.run_layer`).
    """

    def __init__(self, network: ModelGraph, seconds: GhostRole, sleeper: Sleeper) -> None:
        zeros = _Zeros()
        arrival = {name: place for place, name in enumerate(network.gradient_order)}
        self._ghosts = tuple(_ghost(layer, seconds, sleeper, zeros, arrival) for layer in network.layers)

    def __call__(self, index: int, function: Call) -> Call:
        """What runs in the place of ``function``: itself where that is no call of the layer's, as of a shape."""
        ghost = self._ghosts[index] if index < len(self._ghosts) else None
        if ghost is None or function_name(function)[0] not in ghost.functions:
            return function
        return _Called(ghost, function)


class _Called(Substitute):
    """A layer's ghost in the place of a torch function."""

    def __init__(self, ghost: _Ghost, function: Call) -> None:
        self._ghost, self._function = ghost, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ghost.run(self._function, *args, **kwargs)

    def instead(self, function: Call, *, rounds: int = 1, backward: bool = False) -> Call:
        return _Called(self._ghost.in_rounds(rounds, backward=backward), function)

    def beside(self, function: Call) -> Call:
        return _Called(self._ghost.awake, function)


def _ghost(layer: Layer, seconds: GhostRole, sleeper: Sleeper, zeros: _Zeros, arrival: Mapping[str, int]) -> _Ghost:
    event = partial(_event, seconds, layer.name)
    return _Ghost(
        functions=functions_of(layer),
        returns_input=bool(layer.attributes.get(RETURNS_INPUT)),
        event=event,
        fw=event("FW"),
        bw=_Backward(*map(event, _BACKWARD)),
        last_first=_last_first(layer, arrival),
        sleeper=sleeper,
        zeros=zeros,
    )


def _last_first(layer: Layer, arrival: Mapping[str, int]) -> tuple[int, ...]:
    """Places among the layer's parameters, the one whose gradient arrives last first; empty where they just arrive so.

    Autograd takes two gradients of one node in its order, and more in any.
    """
    places = [arrival.get(name) for name in layer.parameters]
    known = [place for place in places if place is not None]
    if len(known) < len(places) or (len(known) <= 2 and known == sorted(known)):
        return ()
    return tuple(sorted(range(len(known)), key=known.__getitem__, reverse=True))


_Blocks = dict[tuple[torch.dtype, torch.device], torch.Tensor]


class _Zeros:
    """Zeros that many tensors of a rank have in common: gradients of all leaves in one block, outputs in another.

    A block is as large as the largest of them. Nobody writes anything but zeros there: sums over ranks are of zeros.

    Attributes:
        mark: a tensor without elements, for autograd to keep.
    """

    def __init__(self) -> None:
        self._gradients: _Blocks = {}
        self._outputs: _Blocks = {}
        self.mark = torch.empty(0)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Contiguous zeros, or as the tensor's strides are, which autograd takes for a gradient without a copy."""
        block = _grown(self._gradients, tensor.numel(), tensor.dtype, tensor.device)
        return block.as_strided(tensor.shape, tensor.stride())

    def output(self, output: Output, device: torch.device) -> torch.Tensor:
        """A tensor that is no view, as what a function returns has to be where it is then changed in place."""
        extents = zip(output.shape, output.stride, strict=True)
        reach = 1 + sum((extent - 1) * step for extent, step in extents) if math.prod(output.shape) else 0
        block = _grown(self._outputs, reach, output.dtype, device)
        made = torch.empty(0, dtype=output.dtype, device=device)
        return made.set_(block.untyped_storage(), 0, output.shape, output.stride)


def _grown(blocks: _Blocks, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The block of a kind, made anew where it has fewer elements; what lies in the old one stays there."""
    block = blocks.get((dtype, device))
    if block is None or block.numel() < elements:
        block = blocks[dtype, device] = torch.zeros(elements, dtype=dtype, device=device)
    return block


def hold_in_common(module: torch.nn.Module) -> None:
    """Have all parameters lie in one block of zeros, as large as the largest: ranks that share a host have one each."""
    zeros = _Zeros()
    parameters = list(module.parameters())
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
        parameter.data = zeros.like(parameter)


class _Event(NamedTuple):
    """Seconds to sleep, and how they spread by themselves."""

    seconds: float = 0.0
    own_relative_sd: float = 0.0

    def beside(self, other: _Event) -> _Event:
        seconds = self.seconds + other.seconds
        deviation = math.hypot(self.seconds * self.own_relative_sd, other.seconds * other.own_relative_sd)
        return _Event(seconds, deviation / seconds if seconds else 0.0)


_NOTHING = _Event()

_BACKWARD: tuple[GhostPhase, ...] = ("BW", "BW_input", "BW_weight")


def _event(seconds: GhostRole, layer: str, phase: GhostPhase, rounds: int = 1) -> _Event:
    return _Event(seconds.seconds(layer, phase, rounds), seconds.relative_sd(layer, phase))


class _Backward(NamedTuple):
    """A layer's backward: all of it at once, or that of its input and that of its parameters."""

    whole: _Event = _NOTHING
    of_input: _Event = _NOTHING
    of_weight: _Event = _NOTHING

    @property
    def parted(self) -> bool:
        """Whether the plan runs its parts apart."""
        return self.of_input.seconds > 0 or self.of_weight.seconds > 0

    def of(self, node: Any, leads_to_weight: Sequence[bool]) -> _Event:
        """What the engine wants now of the node of a ghost; all of it where the layer has no parts."""
        if not self.parted:
            return self.whole
        wanted = {
            of_weight
            for (after, _), of_weight in zip(node.next_functions, leads_to_weight, strict=True)
            if after is not None and torch._C._will_engine_execute_node(after)
        }
        if len(wanted) > 1 and self.whole.seconds > 0:
            # The schedule runs it in parts at other times.
            return self.whole
        of_input = self.of_input if False in wanted else _NOTHING
        return of_input.beside(self.of_weight) if True in wanted else of_input


@dataclass(kw_only=True, eq=False)
class _Ghost:
    """The ghost of one layer.

    Attributes:
        functions: normalised names of the torch functions that the layer may be a call of.
        returns_input: whether the function returns what it is given, as it does here too: the call alone takes time.
        event: what it sleeps in a phase, and in one of so many rounds of it.
        phase: that a call is of. fw: what the call sleeps. bw: what its backward sleeps.
    """

    functions: frozenset[str]
    returns_input: bool
    event: Callable[..., _Event]
    fw: _Event
    bw: _Backward
    last_first: tuple[int, ...]
    sleeper: Sleeper
    zeros: _Zeros
    phase: Slept = "FW"
    forms: dict[Hashable, Form] = field(default_factory=dict)
    rounds: dict[tuple[int, bool], _Ghost] = field(default_factory=dict)

    @cached_property
    def awake(self) -> _Ghost:
        """One that returns what it has to without sleep, for what is called beside the layer's work."""
        return replace(self, fw=_NOTHING, bw=_Backward(), last_first=(), forms={})

    def in_rounds(self, rounds: int, *, backward: bool) -> _Ghost:
        """One that is called for each round of a pass; a rule that works in rounds runs backward by itself."""
        if rounds == 1 and not backward:
            return self
        key = rounds, backward
        if key not in self.rounds:
            phase: Slept = "BW" if backward else "FW"
            one = self.event(phase, rounds)
            self.rounds[key] = replace(self, phase=phase, fw=one, bw=_Backward(), last_first=(), forms={}, rounds={})
        return self.rounds[key]

    def run(self, function: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Sleep for a pass of the layer, or a round; returns what the function would, without its values."""
        self.sleeper.ask(self.phase, *self.fw)
        if self.returns_input:
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        key: list[Hashable] = [function]
        describe(args, tensors, key)
        describe(kwargs, tensors, key)
        known = tuple(key)
        form = self.forms.get(known)
        if form is None:
            form = self.forms[known] = form_of(function, args, kwargs, tensors)
        if form.outputs is None:
            return function(*args, **kwargs)
        if self.last_first and torch.is_grad_enabled():
            self._put_in_order(tensors)
        made = _GhostFunction.apply(self, form.outputs, *tensors)  # type: ignore[no-untyped-call]
        return form.returned(made)

    def _put_in_order(self, tensors: list[torch.Tensor]) -> None:
        """Have the gradients of parameters pass one node each, which autograd runs last made first."""
        leaves = [place for place, tensor in enumerate(tensors) if tensor.is_leaf and tensor.requires_grad]
        if len(leaves) == len(self.last_first):
            for number in self.last_first:
                place = leaves[number]
                tensors[place] = _Passed.apply(tensors[place], self.zeros)  # type: ignore[no-untyped-call]


class _GhostFunction(torch.autograd.Function):
    """Outputs of some shape, and a backward that sleeps."""

    @staticmethod
    def forward(ctx: Any, ghost: _Ghost, outputs: Sequence[Output], *tensors: torch.Tensor) -> Any:
        # Looked at in backward, so that what is computed again in backward (torch.utils.checkpoint) is.
        ctx.save_for_backward(ghost.zeros.mark)
        ctx.set_materialize_grads(False)
        ctx.ghost, ctx.givers = ghost, [_giver(tensor, ghost.zeros) for tensor in tensors]
        ctx.leads_to_weight = [tensor.is_leaf or isinstance(tensor.grad_fn, _PASSES) for tensor in tensors]
        made = [
            tensors[out.argument] if out.argument is not None else _zeros_of(out, tensors, ghost.zeros)
            for out in outputs
        ]
        ctx.mark_dirty(*(tensor for tensor, out in zip(made, outputs, strict=True) if out.argument is not None))
        ctx.mark_non_differentiable(*(tensor for tensor, out in zip(made, outputs, strict=True) if not out.floats))
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> Any:
        assert len(ctx.saved_tensors) == 1
        ctx.ghost.sleeper.ask("BW", *ctx.ghost.bw.of(ctx, ctx.leads_to_weight))
        return None, None, *(give() if give else None for give in ctx.givers)


class _Passed(torch.autograd.Function):
    """A parameter as it is, and zeros for its gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, zeros: _Zeros) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.give = partial(zeros.like, parameter)
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.give(), None


_PASSES = (_Passed._backward_cls,)

_SLEEPS = (_GhostFunction._backward_cls, *_PASSES)

_Giver = Callable[[], torch.Tensor]


def _giver(tensor: torch.Tensor, zeros: _Zeros) -> _Giver | None:
    """What makes the gradient of an argument; None where there is none, or another ghost needs none."""
    if not tensor.requires_grad:
        return None
    if tensor.is_leaf:
        return partial(zeros.like, tensor)
    ghost: _Ghost | None = getattr(tensor.grad_fn, "ghost", None)
    in_parts = ghost is not None and ghost.bw.parted
    if isinstance(tensor.grad_fn, _SLEEPS) and not in_parts:
        return None
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return lambda: torch.zeros((), dtype=dtype, device=device).expand(shape)


def _zeros_of(output: Output, tensors: Sequence[torch.Tensor], zeros: _Zeros) -> torch.Tensor:
    """Memory that nobody reads the values of; its own where somebody does: indices, and a loss.

    What is chosen goes round, so that rows go to all experts alike, as planned.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    if output.shape and output.floats:
        return zeros.output(output, device)
    if output.choices is not None:
        places = torch.arange(math.prod(output.shape), dtype=output.dtype, device=device)
        return (places % output.choices).view(output.shape)
    return torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=device).zero_()
