"""How an operation runs that reads things whole on every rank, each of which makes a part of their gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from paradl_bench.strategies.running.group_functions import Group, reduce_gradient, sum_gradients
from paradl_bench.strategies.running.sharded_module import Call

Run = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]


def _called(function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class SummedGradients:
    """Gradients of the operation's parameters are summed over the group, and of tensors that it reads whole.

    Args:
        run: how it runs otherwise. is_part: whether a tensor is this rank's part; None where none is looked at.
    """

    def __init__(self, group: Group, run: Run = _called, is_part: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._group, self._run, self._is_part = group, run, is_part

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it."""
        if torch.is_grad_enabled():
            args, kwargs = self._with_sums(args, kwargs)
        return self._run(function, args, kwargs)

    def _with_sums(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given: dict[int, torch.Tensor] = {}
        tree_map_only(torch.Tensor, lambda tensor: given.setdefault(id(tensor), tensor), (args, kwargs))
        trained = {key: tensor for key, tensor in given.items() if tensor.requires_grad}
        parameters = {key: tensor for key, tensor in trained.items() if isinstance(tensor, torch.nn.Parameter)}
        summed: dict[int, torch.Tensor] = {}
        if parameters:
            summed = dict(zip(parameters, sum_gradients(list(parameters.values()), self._group), strict=True))
        if self._is_part is not None:
            whole = {
                key: tensor for key, tensor in trained.items() if key not in parameters and not self._is_part(tensor)
            }
            summed |= {key: reduce_gradient(tensor, self._group) for key, tensor in whole.items()}
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, lambda tensor: summed.get(id(tensor), tensor), (args, kwargs)
        )
        return replaced
