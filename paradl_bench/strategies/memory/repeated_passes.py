"""Memory of micro-batches that pass one after the other through the same stage: walked once, then repeated.

What a forward does to a ledger depends on nothing that came before it. What a backward does depends on whether it is
the stage's first, which makes the gradients that later ones add to, and on who else holds the outputs that it lets go
of. So each is walked once on a ledger of its own, for each such case, and its effect is repeated: the same bytes, in
time that does not grow with the layers. Either part of backward, where that runs in two, is such a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paradl_bench.plan.schedules.schedule import Direction
from paradl_bench.strategies.memory.ledger import Gradient, Ledger, Storage
from paradl_bench.strategies.memory.liveness import Pass
from paradl_bench.strategies.memory.parted_liveness import PartedLiveness

_UNMARKED = (-(1 << 62), 0)


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


class RepeatedPasses:
    """Forward and backward of micro-batches through a stage.

    Args:
        ledger: that they are counted on.
        walk: makes the stage's walk over a ledger.
        received_bytes: of what forward of a micro-batch holds of its own while it runs, beside what it makes.
        sent: bytes of the gradient of each of its outputs, which lie in memory of the caller's.
    """

    def __init__(
        self, ledger: Ledger, walk: Callable[[Ledger], PartedLiveness], received_bytes: int, sent: Sequence[int]
    ) -> None:
        self._ledger, self._scratch = ledger, Ledger()
        self._walk = walk(self._scratch)
        self._received_bytes, self._sent = received_bytes, tuple(sent)
        self._forward: _Effect | None = None
        self._left: Pass | None = None
        self._backward: dict[tuple[Direction, bool, tuple[int, ...]], _Effect] = {}
        self._is_first = True

    def forward(self) -> list[Storage]:
        """Run forward of a micro-batch; returns its outputs, which backward lets go of."""
        if self._forward is None:
            self._start_over()
            self._left = self._walk_forward()
            self._forward = self._effect(self._left.outputs)
        return self._repeat(self._forward)

    def backward(self, direction: Direction, outputs: Sequence[Storage]) -> list[Storage]:
        """Run backward, or a part of it, of the micro-batch of these outputs.

        Returns the gradients of what it had received; the weights' part returns none, and lets go of the outputs.
        """
        held = tuple(output.holders for output in outputs)
        case = direction, self._is_first, held
        if case not in self._backward:
            self._backward[case] = self._walk_backward(direction, held)
        effect = self._backward[case]
        for output, holders in zip(outputs, effect.holders, strict=True):
            output.holders = holders
        self._is_first = self._is_first and direction == "BW_input"
        return self._repeat(effect)

    def _walk_backward(self, direction: Direction, held: tuple[int, ...]) -> _Effect:
        # A walk backward uses up what one forward left; that of the effect has not been used yet.
        left, self._left = self._left or self._walk_forward(), None
        if direction == "BW_weight":
            self._walk.backward_input(left, self._given())
        for output, holders in zip(left.outputs, held, strict=True):
            output.holders = holders
        self._start_over()
        if direction == "BW_weight":
            self._walk.backward_weight(left, self._given())
            return self._effect((), left.outputs)
        walk = self._walk.backward if direction == "BW" else self._walk.backward_input
        made = walk(left, self._given())
        effect = self._effect(made, left.outputs)
        # What waits for the parameters' part is let go of by that, and not by whoever takes the gradients.
        waiting = [id(gradient.storage) for gradients in left.waiting.values() for gradient in gradients]
        for copy, storage in zip(effect.made, made, strict=True):
            copy.holders = storage.holders - waiting.count(id(storage))
        return effect

    def _given(self) -> list[Gradient]:
        return [Gradient(Storage(0), size) for size in self._sent]

    def _walk_forward(self) -> Pass:
        received = self._scratch.allocate(self._received_bytes)
        left = self._walk.forward(received)
        self._scratch.release(received)
        return left

    def _start_over(self) -> None:
        self._scratch.activations = self._scratch.gradients = 0
        self._scratch.peak = _UNMARKED

    def _effect(self, made: Sequence[Storage], given: Sequence[Storage] = ()) -> _Effect:
        scratch = self._scratch
        holders = tuple(storage.holders for storage in given)
        # What is made is copied, since what it is made of may go on to change.
        return _Effect(scratch.peak, scratch.activations, scratch.gradients, tuple(_copies(made)), holders)

    def _repeat(self, effect: _Effect) -> list[Storage]:
        ledger = self._ledger
        if effect.peak != _UNMARKED:
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
