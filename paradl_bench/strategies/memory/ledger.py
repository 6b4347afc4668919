"""Bytes that a walk over a network holds: storages with their holders, and the sums now and at their largest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Storage:
    """Memory that one or several tensors share; it is freed when the last holder lets go."""

    size: int
    holders: int = 1


@dataclass(slots=True)
class Ledger:
    """Bytes of activations (with their gradients) and of parameters' gradients, now and when the sum was largest."""

    activations: int = 0
    gradients: int = 0
    peak: tuple[int, int] = (0, 0)

    def allocate(self, size: int) -> Storage:
        """New memory, held once."""
        self.activations += size
        return Storage(size)

    def release(self, storage: Storage) -> None:
        """One holder less."""
        storage.holders -= 1
        if not storage.holders:
            self.activations -= storage.size

    def mark(self, more: int = 0, gradients: int = 0) -> None:
        """Note the moment, with bytes beside activations, and of parameters' gradients, that are held in it alone."""
        activations, of_parameters = self.activations + more, self.gradients + gradients
        if activations + of_parameters > self.peak[0] + self.peak[1]:
            self.peak = activations, of_parameters


def hold(storage: Storage) -> Storage:
    """One holder more."""
    storage.holders += 1
    return storage


@dataclass(slots=True)
class Gradient:
    """A gradient on its way to a layer: its memory, and its own bytes, which are fewer in a view of a part.

    Attributes:
        output: which of the layer's outputs it is of.
    """

    storage: Storage
    size: int
    output: int = 0
