"""What a call of an operation returns, as forms without content: found once on meta, made again at every call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from paradl_bench.strategies.running.operations import function_name
from paradl_bench.strategies.running.sharded_module import Call


class Output(NamedTuple):
    """One leaf of what a function returns.

    Attributes:
        argument: of a function that works in place: which tensor argument it is.
        choices: of places that a function chose by values: among how many; None of what is no such place.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    argument: int | None
    choices: int | None = None

    @property
    def floats(self) -> bool:
        """Whether it may have a gradient."""
        return self.dtype.is_floating_point


class Form(NamedTuple):
    """What a function returns of arguments of certain shapes.

    Attributes:
        outputs: its tensors; None where it runs for real.
        structure, leaves: of what it returns, where that is more than one tensor; what is no tensor stays as it was.
    """

    outputs: tuple[Output, ...] | None
    structure: TreeSpec | None = None
    leaves: tuple[Any, ...] = ()

    def returned(self, made: Sequence[torch.Tensor]) -> Any:
        """What the function returns, with these tensors."""
        if self.structure is None:
            return made[0]
        tensors = iter(made)
        return tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves], self.structure)


_TENSOR = object()
_CHOOSING = {"topk": 2, "max": 1, "min": 1}
"""Functions that return values and their places along a dim, and which argument the dim is."""


def describe(value: Any, tensors: list[torch.Tensor], key: list[Hashable]) -> None:
    """Append the tensors of an argument, and what of it decides the form of what is returned."""
    # torch's own walks through arguments take several times as long, on every call of every layer.
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key += (value.shape, value.stride(), value.dtype)
    elif isinstance(value, (tuple, list, dict)):
        key.append(len(value))
        for item in value.items() if isinstance(value, dict) else value:
            describe(item, tensors, key)
    else:
        key.append(value if value is None or type(value) in (int, str) else repr(value))


def form_of(function: Call, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Form:
    """What the function returns, seen on the meta device, which computes nothing."""
    twins = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    on_meta = kwargs | {"device": torch.device("meta")} if kwargs.get("device") is not None else kwargs
    with torch.no_grad():
        try:
            result = _called(function, args, on_meta, tensors, twins)
        except RuntimeError:
            # What the meta device does not know, or not in this dtype, computes once, on zeros.
            twins = [torch.zeros_like(tensor) for tensor in tensors]
            result = _called(function, args, kwargs, tensors, twins)
    flat, structure = tree_flatten(result)
    returned = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    if not any(tensor.is_floating_point() for tensor in returned):
        return Form(None)
    given = {id(twin): place for place, twin in enumerate(twins)}
    choices = _choices(function, args, kwargs, tensors)
    outputs = tuple(
        Output(tuple(t.shape), t.stride(), t.dtype, given.get(id(t)), None if t.is_floating_point() else choices)
        for t in returned
    )
    if isinstance(result, torch.Tensor):
        return Form(outputs)
    return Form(outputs, structure, tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat))


def _choices(
    function: Call, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> int | None:
    """Among how many places a function chooses; None of another function."""
    at = _CHOOSING.get(function_name(function)[0])
    if at is None:
        return None
    dim = kwargs.get("dim", args[at] if len(args) > at else -1)
    return tensors[0].shape[dim] if isinstance(dim, int) else None


def _called(
    function: Call, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], twins: Sequence[torch.Tensor]
) -> Any:
    """Call the function with twins in the place of tensors."""
    twin_of = {id(tensor): twin for tensor, twin in zip(tensors, twins, strict=True)}
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: twin_of[id(tensor)], (args, kwargs))
    return function(*args, **kwargs)
