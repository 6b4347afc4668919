"""Memory of micro-batches that pass one after the other through the same stage: walked once, then repeated.

What a forward does to a ledger depends on nothing that came before it. What a backward does depends on whether it is
the stage's first, which makes the gradients that later ones add to, and on who else holds the outputs that it lets go
of. So each is walked once on a ledger of its own, for each such case, and its effect is repeated: the same bytes, in
time that does not grow with the layers. The walk of a first backward tells what a later one does as well, whose
gradients alone differ: none stays. Either part of backward, where that runs in two, is such a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paradl_bench.plan.schedules.schedule import Direction
from paradl_bench.strategies.memory.ledger import UNMARKED, Gradient, Ledger, Storage
from paradl_bench.strategies.memory.liveness import Pass
from paradl_bench.strategies.memory.parted_liveness import PartedLiveness


@dataclass(slots=True)
class _Scratch(Ledger):
    """A walk's own ledger.

    Attributes:
        peak_later: the peak, were all gradients of parameters added to earlier ones.
    """

    peak_later: tuple[int, int] = UNMARKED

    def mark(self, more: int = 0, gradients: int = 0) -> None:
        """See :class:`Ledger`."""
        # Not by super(): a class with slots is not the one that was written down.
        Ledger.mark(self, more, gradients)
        activations = self.activations + more
        if activations + gradients > self.peak_later[0] + self.peak_later[1]:
            self.peak_later = activations, gradients

    def start_over(self) -> None:
        """Count from here on."""
        self.activations = self.gradients = 0
        self.peak = self.peak_later = UNMARKED


class _Effect(NamedTuple):
    """What a pass does to a ledger, counted from what is held when it starts.

    Attributes:
        peak: (activations, gradients) when their sum is largest. activations, gradients: at its end.
        made: storages that it leaves to its caller.
        holders: of the storages that it was given, at its end.
    """

    peak: tuple[int, int]
    activations: int
    gradients: int
    made: tuple[Storage, ...]
    holders: tuple[int, ...] = ()


class Walks:
    """The passes of a stage, each walked once on a ledger of its own; stages that are alike have the same.

    Args:
        walk: makes the stage's walk over a ledger.
        received_bytes: of what forward of a micro-batch holds of its own while it runs, beside what it makes.
        sent: bytes of the gradient of each of its outputs.
        into_buffers: whether these lie in memory of the caller's; else backward lets go of them.
    """

    def __init__(
        self,
        walk: Callable[[Ledger], PartedLiveness],
        received_bytes: int,
        sent: Sequence[int],
        *,
        into_buffers: bool = True,
    ) -> None:
        self._scratch, self._make = _Scratch(), walk
        self._received_bytes, self._sent, self._into_buffers = received_bytes, tuple(sent), into_buffers
        self._forward: _Effect | None = None
        self._backward: dict[tuple[Direction, bool, tuple[int, ...]], _Effect] = {}
        # One that forward has passed alone, with what that left; and one that has been through a backward.
        self._fresh: tuple[PartedLiveness, Pass] | None = None
        self._later: PartedLiveness | None = None

    def forward(self) -> _Effect:
        """What forward of a micro-batch does."""
        if self._forward is None:
            self._scratch.start_over()
            walk = self._make(self._scratch)
            left = self._walk_forward(walk)
            self._forward, self._fresh = self._effect(left.outputs), (walk, left)
        return self._forward

    def backward(self, direction: Direction, is_first: bool, held: tuple[int, ...]) -> _Effect:
        """What backward does, or a part of it; ``held``: by how many each output of the micro-batch is held."""
        # The input's part makes no gradients of parameters: the first is like all others.
        case = direction, is_first or direction == "BW_input", held
        if case not in self._backward:
            effect = self._backward[case] = self._walk_backward(*case)
            later = effect._replace(peak=self._scratch.peak_later, gradients=0)
            self._backward.setdefault((direction, False, held), later)
        return self._backward[case]

    def _walk_backward(self, direction: Direction, is_first: bool, held: tuple[int, ...]) -> _Effect:
        stage, left = self._before_first() if is_first else self._after_first()
        if is_first and direction != "BW_input":
            self._later = stage
        given = self._given() if direction == "BW_weight" else []
        if direction == "BW_weight":
            stage.backward_input(left, given)
        for output, holders in zip(left.outputs, held, strict=True):
            output.holders = holders
        self._scratch.start_over()
        if direction == "BW_weight":
            # What the first part has not let go of, it has left for the second.
            stage.backward_weight(left, given)
            return self._effect((), left.outputs)
        walk = stage.backward if direction == "BW" else stage.backward_input
        made = walk(left, self._given())
        effect = self._effect(made, left.outputs)
        # What waits for the parameters' part is let go of by that, and not by whoever takes the gradients.
        waiting = [id(gradient.storage) for gradients in left.waiting.values() for gradient in gradients]
        for copy, storage in zip(effect.made, made, strict=True):
            copy.holders = storage.holders - waiting.count(id(storage))
        return effect

    def _before_first(self) -> tuple[PartedLiveness, Pass]:
        """A walk that no backward has been through. One uses up what forward left."""
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            return fresh
        walk = self._make(self._scratch)
        return walk, self._walk_forward(walk)

    def _after_first(self) -> tuple[PartedLiveness, Pass]:
        """A walk that holds gradients already, which others are added to."""
        if self._later is None:
            self._later, left = self._before_first()
            self._later.backward(left, self._given())
        return self._later, self._walk_forward(self._later)

    def _given(self) -> list[Gradient]:
        return [Gradient(self._scratch.allocate(0 if self._into_buffers else size), size) for size in self._sent]

    def _walk_forward(self, walk: PartedLiveness) -> Pass:
        received = self._scratch.allocate(self._received_bytes)
        left = walk.forward(received)
        self._scratch.release(received)
        return left

    def _effect(self, made: Sequence[Storage], given: Sequence[Storage] = ()) -> _Effect:
        scratch = self._scratch
        holders = tuple(storage.holders for storage in given)
        # What is made is copied, since what it is made of may go on to change.
        return _Effect(scratch.peak, scratch.activations, scratch.gradients, tuple(_copies(made)), holders)


class RepeatedPasses:
    """Forward and backward of micro-batches through a stage, counted on a ledger."""

    def __init__(self, ledger: Ledger, walks: Walks) -> None:
        self._ledger, self._walks = ledger, walks
        self._is_first = True

    def forward(self) -> list[Storage]:
        """Run forward of a micro-batch; returns its outputs, which backward lets go of."""
        return self._repeat(self._walks.forward())

    def backward(self, direction: Direction, outputs: Sequence[Storage]) -> list[Storage]:
        """Run backward, or a part of it, of the micro-batch of these outputs.

        Returns the gradients of what it had received; the weights' part returns none, and lets go of the outputs.
        """
        effect = self._walks.backward(direction, self._is_first, tuple(output.holders for output in outputs))
        for output, holders in zip(outputs, effect.holders, strict=True):
            output.holders = holders
        self._is_first = self._is_first and direction == "BW_input"
        return self._repeat(effect)

    def _repeat(self, effect: _Effect) -> list[Storage]:
        ledger = self._ledger
        if effect.peak != UNMARKED:
            ledger.mark(*effect.peak)
        ledger.activations += effect.activations
        ledger.gradients += effect.gradients
        return _copies(effect.made)


def _copies(storages: Sequence[Storage]) -> list[Storage]:
    """Storages like these; where the same one stands twice, so does its copy."""
    if len(storages) == 1:
        return [Storage(storages[0].size, storages[0].holders)]
    made = {id(storage): Storage(storage.size, storage.holders) for storage in storages}
    return [made[id(storage)] for storage in storages]
