"""Hooks of torch's ``fully_shard`` round the forward of a unit: what runs layers by rules is not to see them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from paradl_bench.strategies.running.sharded_module import marks_of


def hide_hooks(part: torch.nn.Module) -> None:
    """Have no torch-function mode see what ``fully_shard`` does round a forward: it is no layer of the model."""
    for hooks, wrap in ((part._forward_pre_hooks, entering), (part._forward_hooks, unseen)):
        for number, hook in hooks.items():
            if "fsdp" in (getattr(hook, "__module__", None) or ""):
                hooks[number] = wrap(hook)


def entering(hook: Callable[..., Any]) -> Callable[..., Any]:
    """What comes before a unit's forward, and gives it other tensors for its arguments: they are marked alike.

    A tensor that is given several times is one tensor afterwards too: attention asks whether its queries are its keys.
    """

    @functools.wraps(hook)
    def called(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            taken = hook(module, args, kwargs)
            leaves, structure = tree_flatten(taken)
            first: dict[int, torch.Tensor] = {}
            for number, (old, new) in enumerate(zip(tree_leaves((args, kwargs)), leaves, strict=True)):
                if isinstance(old, torch.Tensor) and old is not new:
                    vars(new).update(marks_of(old))
                    leaves[number] = first.setdefault(id(old), new)
            return tree_unflatten(leaves, structure)

    return called


def unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, unseen by torch-function modes."""

    @functools.wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return hook(*args, **kwargs)

    return called
