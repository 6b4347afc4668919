"""A user's module whose operations run sharded: every call of forward is one layer of the traced network, by its order.

The module's code stays as it is, functional operations included. A torch-function mode counts operations as tracing
did, and hands those that a strategy has a rule for to that rule.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from paradl_bench.core.errors import WorkError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.compute import operations_of_forward
from paradl_bench.strategies.running.autocast import as_noted, converts_alone
from paradl_bench.strategies.running.operations import asks_else, asks_extent, function_name, is_operation
from paradl_bench.strategies.running.own_randomness import OwnRandomness, entered_later
from paradl_bench.strategies.running.parameters import WHOLE_SHAPE

Call = Callable[..., Any]
RunLayer = Callable[[int, Call], Call]
"""From the index of a layer in the network and the torch function that the model calls there, what is called instead;
the function itself where the call is no layer's."""
OwnPart = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, float] | None]
Whole = Callable[[Any], Any]
"""From arguments of a call, the same with all of a tensor in the place of this rank's part of it."""


class Substitute(ABC):
    """What stands for a layer's torch function (:data:`RunLayer`), and for those that a rule calls in its place."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function that it stands for."""

    @abstractmethod
    def instead(self, function: Call, *, rounds: int = 1, backward: bool = False) -> Call:
        """What stands for another function that does the layer's work.

        Args:
            rounds: how often it is called for one pass of the layer. backward: whether that is backward, for which a
                rule that works in rounds calls a function of its own.
        """

    @abstractmethod
    def beside(self, function: Call) -> Call:
        """What stands for a function that is called beside it, and is no work of the layer's own."""


def instead(called: Call, function: Call, *, rounds: int = 1, backward: bool = False) -> Call:
    """What a rule calls for a layer's work, where that is another function than the model's.

    Args:
        rounds, backward: as of :meth:`Substitute.instead`.
    """
    if isinstance(called, Substitute):
        return called.instead(function, rounds=rounds, backward=backward)
    return function


def beside(called: Call, function: Call) -> Call:
    """What a rule calls on tensors of the layer's beside its work."""
    return called.beside(function) if isinstance(called, Substitute) else function


@dataclass(frozen=True, slots=True)
class Rule:
    """How one layer runs.

    Attributes:
        functions: normalised names of the torch functions that the layer may be a call of.
        run: called as ``run(function, args, kwargs)`` in the place of ``function(*args, **kwargs)``; whatever else it
            calls on the layer's tensors goes through :func:`instead` or :func:`beside`, communication aside.
        mark: notes of what ``run`` returned that it is a part, where another rule made another tensor of that.
        around: whether it calls the layer's function otherwise than the model does, and so runs around other rules.
    """

    functions: frozenset[str]
    run: Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
    mark: Callable[[Any], Any] | None = None
    around: bool = False


Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""From a model's output and targets to the mean over samples."""


class LossOfParts(Protocol):
    """The loss where each rank has a part of the model's output."""

    def part(self, output: torch.Tensor) -> torch.Tensor:
        """This rank's part of all of an output."""

    def share(self, loss: Loss, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """What this rank's part adds to the loss, times the number of ranks; ``targets`` are of all of the output."""

    def mean(self, share: torch.Tensor) -> torch.Tensor:
        """The loss, or several, from every rank's share; a collective."""


class Sharding(NamedTuple):
    """What one axis makes of a module, or several do (:mod:`~paradl_bench.strategies.running.nested_sharding`).

    Attributes:
        rules: by index of the layer in the network.
        network: with the shapes that the parameters have on this rank.
        enter: what is done to the input first. leave: what is done to the output last.
        whole_shape: the shape that the serial model has in the place of an activation; None where it is the tensor's.
            What the module's own code asks about a tensor's extents is answered of that shape.
        whole: what calls without a rule are given; None where they are given no parts.
        receive: what is done first to this rank's part of what an earlier stage of a pipeline made, given with the
            layer's index and the output's number. forget: lets go of what operations share that do not run here: of
            later stages, or outside of what runs again.
        randomness: of layers that draw other numbers on each rank, an axis each.
        own_part: this rank's part of what the serial model has in the place of a tensor, and how many times as large
            the tensor's gradient is here; called with both tensors. None where this rank has other rows.
        run_layer: what runs layers, below all rules; None for torch's own functions.
        loss: what the loss is taken by; None where every rank has all of the output.
        apart: as of :class:`~paradl_bench.plan.axis_planner.ShardedLayers`.
        within: what it is where another axis cuts the tokens first, in so many parts; None where that changes nothing.
        inside: rules that run inside of such an axis', since they take their part of what that leaves.
    """

    rules: Mapping[int, Rule]
    network: ModelGraph
    enter: Callable[[Any], Any] | None = None
    leave: Callable[[Any], Any] | None = None
    whole_shape: Callable[[torch.Tensor], torch.Size | None] | None = None
    whole: Whole | None = None
    receive: Callable[[int, int, torch.Tensor], torch.Tensor] | None = None
    forget: Callable[[], None] | None = None
    randomness: tuple[OwnRandomness, ...] = ()
    own_part: OwnPart | None = None
    run_layer: RunLayer | None = None
    loss: LossOfParts | None = None
    apart: frozenset[str] = frozenset()
    within: Callable[[int], Sharding] | None = None
    inside: Mapping[int, Rule] = {}


class ShardedModule(torch.nn.Module):
    """Runs ``module`` under rules."""

    def __init__(self, module: torch.nn.Module, sharding: Sharding) -> None:
        super().__init__()
        self.module = module
        self._sharding = sharding
        self.observer: TorchFunctionMode | None = None
        """Entered inside the rules, so that it sees the model's own calls, one a layer."""

    def forward(self, inputs: Any) -> Any:
        """The module's output.

        Raises:
            WorkError: forward called other operations than when the network was traced.
        """
        sharding, walk = self._sharding, Walk(self._sharding)
        # Outside the walk, which would take what it calls for layers.
        entered = sharding.enter(inputs) if sharding.enter else inputs
        with walk, self.observer or contextlib.nullcontext():
            outputs = self.module(entered)
        expected = operations_of_forward(sharding.network)
        if walk.index != expected:
            name = sharding.network.name
            raise control_flow_varies(
                f"{name} called {walk.index} operations and {expected} when it was traced", _SHARDED
            )
        return sharding.leave(outputs) if sharding.leave else outputs


def sharded_loss(loss: Loss, sharding: Sharding, observer: TorchFunctionMode | None = None) -> Loss:
    """The loss under the rules of its operations, which follow the model's; itself where it has none.

    Where ranks have parts of the output, it is this rank's share.

    Args:
        observer: entered inside the rules, as that of a :class:`ShardedModule`.
    """
    first, of_parts = operations_of_forward(sharding.network), sharding.loss
    ruled = bool(of_parts or sharding.run_layer) or any(index >= first for index in sharding.rules)

    def walked(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        walk = Walk(sharding, first) if ruled else contextlib.nullcontext()
        with walk, observer or contextlib.nullcontext():
            return loss(outputs, targets)

    def run(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return walked(outputs, targets) if of_parts is None else of_parts.share(walked, outputs, targets)

    return run if ruled or observer else loss


_SHARDED = "sharded"


def control_flow_varies(what: str, runs: str) -> WorkError:
    """The error of a forward that does not call the operations that are known of it."""
    return WorkError(f"forward of {what}: its control flow varies, and a module that runs {runs} needs a fixed one")


WHOLE = "_paradl_whole"
"""Attribute of this rank's part of a tensor: all of it, once it was gathered. Operations on all of it change that
alone."""


def marks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What is noted of a tensor that is a rank's part, which tensors that stand for it have to be given."""
    return {name: value for name, value in vars(tensor).items() if name.startswith("_paradl_")}


def as_it_stands(tensor: torch.Tensor) -> torch.Tensor:
    """What holds a tensor's values now: all of it where that was gathered, else the tensor itself."""
    whole: torch.Tensor | None = getattr(tensor, WHOLE, None)
    return tensor if whole is None else whole


def _stand_in(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A tensor without memory, of another shape, whose dims lie in memory in the order that the tensor's do."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    dense = torch.empty([shape[dim] for dim in order], dtype=tensor.dtype, device="meta")
    return dense.permute([order.index(dim) for dim in range(len(order))])


@runtime_checkable
class Repeated(Protocol):
    """A mode that is entered again where operations run a second time."""

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """A mode that is where this one is now."""

    def computes_again(self, layers: range) -> bool:
        """Whether any layers among these run a second time."""


@contextlib.contextmanager
def _forgetting(
    made: Callable[[], contextlib.AbstractContextManager[Any]], forget: Callable[[], None] | None
) -> Iterator[None]:
    with made():
        yield
    if forget is not None:
        forget()


class Walk(TorchFunctionMode):
    """Counts operations, and runs those that have a rule by it.

    Attributes:
        index: of the operation that comes next, in the network.
    """

    def __init__(self, sharding: Sharding, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self._sharding = sharding

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """A walk that starts where this one is, to be entered where the same operations run again."""
        index = self.index
        return self._by_itself(lambda: Walk(self._sharding, index))

    def _by_itself(
        self, made: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> contextlib.AbstractContextManager[None]:
        """A mode that is made later. It draws the numbers of now, and leaves nothing that later operations share."""
        return entered_later(self._sharding.randomness, partial(_forgetting, made, self._sharding.forget))

    def computes_again(self, layers: range) -> bool:
        """Whatever is asked for: it runs all layers."""
        return True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self._converts_alone(function, args) and not self._comes_next(function):
            with torch._C.DisableTorchFunction():
                return as_noted(function(*args, **given), args[0])
        rule = self._sharding.rules.get(self.index)
        ruled = rule is not None and function_name(function)[0] in rule.functions
        # What a rule calls is no layer: modes that are entered further out do not see it.
        with torch._C.DisableTorchFunction():
            run_layer = self._sharding.run_layer
            called = function if run_layer is None else run_layer(self.index, function)
            if rule is not None and ruled:
                result = rule.run(called, args, given)
            elif asks_extent(function):
                # The answer is the serial model's.
                args, given = tree_map_only(torch.Tensor, self._as_whole, (args, given))
                return function(*args, **given)
            else:
                if self._sharding.whole is not None and not asks_else(function):
                    args, given = self._sharding.whole((args, given))
                result = called(*args, **given)
        if is_operation(function, result):
            if rule is not None and not ruled:
                network = self._sharding.network
                called_instead = f"called {function.__name__} where {network.layers[self.index].name} was"
                raise control_flow_varies(f"{network.name} {called_instead} when it was traced", _SHARDED)
            self.index += 1
        return result

    def _converts_alone(self, function: Any, args: tuple[Any, ...]) -> bool:
        return converts_alone(function, args)

    def _comes_next(self, function: Any) -> bool:
        layers = self._sharding.network.layers
        return self.index < len(layers) and function_name(function)[0] in functions_of(layers[self.index])

    def _as_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        of_activation = self._sharding.whole_shape
        shape = getattr(tensor, WHOLE_SHAPE, None) or (of_activation(tensor) if of_activation else None)
        return tensor if shape is None else _stand_in(tensor, shape)


def functions_of(layer: Layer) -> frozenset[str]:
    """Normalised names of the torch functions that a layer may be a call of."""
    kind = layer_kinds().get(layer.kind)
    # Calls that did nothing are views, whatever they are called.
    return frozenset((str(layer.attributes.get("function", layer.kind)), *(kind.functions if kind else ())))


_CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LINEAR_ARGUMENTS = ("input", "weight", "bias")


def bind(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a convolution or fully connected layer by name."""
    names = _LINEAR_ARGUMENTS if layer.kind == "linear" else _CONVOLUTION_ARGUMENTS
    return dict(zip(names, args, strict=False)) | kwargs
