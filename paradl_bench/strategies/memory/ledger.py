"""Bytes that a walk over a network holds: storages with their holders, and the sums now and at their largest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

UNMARKED = (-(1 << 62), 0)
"""The peak of a ledger on which no moment was noted yet."""


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


Place = Literal["start", "FW", "again", "BW", "behind", "end"]
"""In the pass of a micro-batch: forward of a layer, forward again before backward of one, backward, and behind it."""


class Moment(NamedTuple):
    """What a walk holds from a place on, until it comes to the next.

    Attributes:
        activations: bytes when it comes there. peak: from then on, with the gradients that are made meanwhile alone.
    """

    place: Place
    layer: int
    activations: int
    peak: tuple[int, int]


@dataclass(slots=True)
class Moments(Ledger):
    """A ledger of a walk whose gradients follow from the places that it comes to."""

    peak: tuple[int, int] = UNMARKED
    _passed: list[Moment] = field(default_factory=list)
    _here: Moment = field(default_factory=lambda: Moment("start", 0, 0, UNMARKED))

    def come_to(self, place: Place, layer: int = 0) -> None:
        """What is marked from now on belongs to this place."""
        self._passed.append(self._here._replace(peak=self.peak))
        self._here = Moment(place, layer, self.activations, UNMARKED)
        self.gradients, self.peak = 0, UNMARKED

    def passed(self) -> list[Moment]:
        """Those of the pass that ends here; the next one starts."""
        self.come_to("end")
        self.come_to("start")
        passed, self._passed = self._passed, []
        return passed


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
