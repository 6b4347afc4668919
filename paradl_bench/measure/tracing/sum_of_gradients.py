"""Sums of gradients where branches meet, as a dispatch mode sees them."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

Moment = TypeVar("Moment")


class SumOfGradients(Generic[Moment]):
    """A sum that autograd makes in place where nobody else holds the first.

    Not so under a dispatch mode, such as a tracker: it then makes a third tensor. Whether somebody holds the first is
    known when the next operation runs.

    Attributes:
        moment: memory while the third tensor is there.
    """

    def __init__(self, first: torch.Tensor) -> None:
        storage = first.untyped_storage()
        self._first = weakref.ref(storage)
        self._dense = storage.nbytes() == first.numel() * first.element_size()
        self.moment: Moment | None = None

    @property
    def in_place(self) -> bool:
        """Whether autograd would have added in place."""
        return self._dense and self._first() is None
