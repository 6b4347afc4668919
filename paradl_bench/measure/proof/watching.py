"""A torch-function mode inside of a model's forward, which makes two runs of it comparable and notes what layers give.

Ranks that share a layer draw other random numbers than the serial model. So in a proof dropout drops nothing, and
numbers that are drawn are constants.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from paradl_bench.measure.proof.parts import NormCuts, normalise_apart
from paradl_bench.strategies.running.operations import function_name, is_operation, output_of
from paradl_bench.strategies.running.sharded_module import as_it_stands

_PROBABILITY = {
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
        (1, "p"),
    ),
    "scaled_dot_product_attention": (4, "dropout_p"),
    "multi_head_attention_forward": (10, "dropout_p"),
}
"""Per function, where the probability is that it drops something with."""
_RECURRENT = {"lstm": 5, "gru": 5, "rnn_tanh": 5, "rnn_relu": 5}
"""Per function, which argument that is; one further where the input is packed."""
_ONES = frozenset(("bernoulli",))
_HALVES = frozenset(("rand", "rand_like", "randn", "randn_like", "normal", "uniform", "exponential", "log_normal"))
_ZEROS = frozenset(("randint", "randint_like", "random", "multinomial", "geometric", "poisson"))
_BATCH_NORM = tuple(inspect.signature(torch.nn.functional.batch_norm).parameters)


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """The tensors in what a model gives."""
    return [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]


Key = tuple[int, int]
"""Index of a layer in the network, and which of its output tensors."""


@dataclass(slots=True)
class Passage:
    """What layers gave in one forward, and the gradients of that.

    Attributes:
        outputs: copies, since an operation in place may change what a layer gave; those of other ranks are missing.
    """

    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)

    def note(self, index: int, result: Any) -> None:
        """Copy what a layer gave, and its gradient when that comes."""
        tensors = [result] if isinstance(result, torch.Tensor) else list(result)
        with torch._C.DisableTorchFunction():
            for place, given in enumerate(tensors):
                if not isinstance(given, torch.Tensor) or given.device.type == "meta":
                    continue
                tensor = as_it_stands(given)
                copied = tensor.detach().clone()
                # What strategies noted on the tensor says which part of the whole it is.
                vars(copied).update(vars(tensor))
                self.outputs[index, place] = copied
                if tensor.requires_grad:
                    tensor.register_hook(self._noting((index, place)))  # type: ignore[no-untyped-call]

    def _noting(self, key: Key) -> Callable[[torch.Tensor], None]:
        gradients = self.gradients

        def note(gradient: torch.Tensor) -> None:
            # The first is the whole one: backward that runs in two parts passes here twice.
            gradients.setdefault(key, gradient.detach().clone())

        return note


class Watch(TorchFunctionMode):
    """Holds drawn numbers still, and sees what every layer gives.

    Args:
        cuts: parts of batch norms that take statistics apart, by index of the layer.
        index: of the layer that comes next.
    """

    def __init__(
        self,
        *,
        hold: bool = True,
        cuts: Mapping[int, NormCuts] | None = None,
        passage: Passage | None = None,
        index: int = 0,
    ) -> None:
        super().__init__()
        self._hold, self._cuts, self._passage, self._index = hold, cuts or {}, passage, index
        self.dtypes: set[torch.dtype] = set()

    def again(self) -> AbstractContextManager[Any]:
        """A watch from here on, where the same operations run a second time; it notes nothing."""
        return Watch(hold=self._hold, cuts=self._cuts, index=self._index)

    def computes_again(self, layers: range) -> bool:
        """Whatever is asked for."""
        return True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        name = function_name(function)[0]
        if self._hold:
            args, given = _without_dropout(name, args, given)
        cuts = self._cuts.get(self._index)
        if cuts and name == "batch_norm":
            arguments = dict(zip(_BATCH_NORM, args, strict=False)) | given
            with torch._C.DisableTorchFunction():
                result: Any = normalise_apart(function, arguments, cuts)
        else:
            result = function(*args, **given)
        if self._hold:
            _hold_still(name, result)
        if is_operation(function, result):
            output = output_of(function, args, result)
            first = output if isinstance(output, torch.Tensor) else output[0]
            if first.is_floating_point():
                self.dtypes.add(first.dtype)
            if self._passage is not None:
                self._passage.note(self._index, output)
            self._index += 1
        return result


def _without_dropout(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name in _RECURRENT:
        # The second argument of a packed input says how long its sequences are.
        packed = len(args) > 1 and isinstance(args[1], torch.Tensor) and not args[1].is_floating_point()
        place, keyword = _RECURRENT[name] + packed, "dropout"
    elif name in _PROBABILITY:
        place, keyword = _PROBABILITY[name]
    elif name == "rrelu":
        place, keyword = 3, "training"
    else:
        return args, given
    if len(args) > place:
        return (*args[:place], type(args[place])(0), *args[place + 1 :]), given
    if keyword in given or name in _PROBABILITY:
        return args, given | {keyword: False if name == "rrelu" else 0.0}
    return args, given


def _hold_still(name: str, result: Any) -> None:
    """Replace numbers that were drawn by constants."""
    if not isinstance(result, torch.Tensor) or result.device.type == "meta":
        return
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if name == "randperm":
            result.copy_(torch.arange(len(result), device=result.device))
            return
        value = 1.0 if name in _ONES else 0.5 if name in _HALVES else 0.0 if name in _ZEROS else None
        if value is not None:
            result.fill_(value)


class WatchedForward:
    """A model's forward that runs under a watch of its own each time; it takes the place of the module's from now on.

    Args:
        cuts, hold: of each :class:`Watch`.

    Attributes:
        cuts: of the next forward.
        outputs: what forward gave, in order. dtypes: as of the watches.
    """

    def __init__(
        self, module: torch.nn.Module, *, cuts: Mapping[int, NormCuts] | None = None, hold: bool = True
    ) -> None:
        self._module, self._forward, self.cuts, self._hold = module, module.forward, cuts, hold
        self.noting = False
        self.passages: list[Passage] = []
        self.outputs: list[Any] = []
        self.dtypes: set[torch.dtype] = set()
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's forward gives."""
        passage = Passage() if self.noting else None
        watch = Watch(hold=self._hold, cuts=self.cuts, passage=passage)
        with watch:
            outputs = self._forward(*args, **kwargs)
        self.dtypes |= watch.dtypes
        self.outputs.append(outputs)
        if passage is not None:
            self.passages.append(passage)
        return outputs

    def forget(self) -> None:
        """Let go of what was seen."""
        self.passages, self.outputs = [], []

    def remove(self) -> None:
        """Give the module its own forward back."""
        self._module.forward = self._forward
