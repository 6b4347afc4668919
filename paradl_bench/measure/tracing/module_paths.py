"""Which of a model's modules is running: operations are named by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class RunningModule(NamedTuple):
    """A module whose forward is under way.

    Attributes:
        name: its path in the model; empty for the model itself. leaf: whether it has no modules of its own.
    """

    name: str
    leaf: bool


@contextmanager
def following_modules(module: torch.nn.Module, running: list[RunningModule]) -> Iterator[None]:
    """Keep ``running`` up to date while the body runs: the innermost module is the last."""

    def leave(*_: Any) -> None:
        running.pop()

    handles: list[Any] = []
    for name, child in module.named_modules():
        entered = RunningModule(name, next(child.children(), None) is None)
        handles.append(child.register_forward_pre_hook(lambda *_, entered=entered: running.append(entered)))
        handles.append(child.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
