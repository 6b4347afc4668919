"""What a model runs again in backward by ``torch.utils.checkpoint``, as its own code calls it.

A reentrant checkpoint runs forward without gradients, and a forward and a backward of its own later. Traced, its
operations shall have the gradients of that second forward: so its function runs once, with gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.utils.checkpoint


class Repeat(NamedTuple):
    """Whether an operation runs again in backward, as in :class:`~paradl_bench.network.graph.Layer`, and with which."""

    way: Literal["", "yes", "reentrant"]
    first: str


class _RunOnce:
    """In the place of torch's reentrant checkpoint: its function, within the graph of the rest."""

    @staticmethod
    def apply(function: Callable[..., Any], preserves_numbers: bool, *args: Any) -> Any:
        """Run it, with gradients where the checkpoint would hand any on."""
        graded = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
        with torch.set_grad_enabled(graded and torch.is_grad_enabled()):
            return function(*args)


@contextmanager
def reentrant_checkpoints_run_once() -> Iterator[None]:
    """While the body runs, reentrant checkpoints do not run again."""
    with mock.patch.object(torch.utils.checkpoint, "CheckpointFunction", _RunOnce):
        yield


class Repeats:
    """Tells which operations of a forward that is traced run again, by the calls that they are made from."""

    def __init__(self) -> None:
        self._call: FrameType | None = None
        self._first = ""

    def of(self, name: str) -> Repeat:
        """Of the operation that runs now, which is called ``name``."""
        way: Literal["", "yes", "reentrant"] = ""
        outermost: FrameType | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _RunOnce.apply.__code__:
                way = way or "reentrant"
            elif frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                way, outermost = way or "yes", frame
            frame = frame.f_back
        if outermost is not self._call:
            # Held, so that no other call is taken for it.
            self._call, self._first = outermost, name if outermost else ""
        return Repeat(way, self._first)
