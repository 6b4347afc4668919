"""Dropout on a part of a tensor: every rank draws its own numbers, and what ranks have in common stays as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from paradl_bench.strategies.running.group_functions import Group

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: seeds of ranks lie far from each other and from those of other replicas."""


class OwnRandomness:
    """Random numbers of this rank's own, so that no two parts are dropped alike.

    The state that ranks have in common is left as it was: parts may be of unlike extents, and what runs whole has to
    draw alike on every rank.
    """

    def __init__(self, group: Group) -> None:
        self._rank = group.rank
        self._state: torch.Tensor | None = None

    @contextlib.contextmanager
    def replayed(self, state: torch.Tensor | None) -> Iterator[None]:
        """Draw inside what was drawn from an earlier :attr:`state` on; then go on as if nothing had been drawn."""
        now, self._state = self._state, state
        try:
            yield
        finally:
            self._state = now

    @property
    def state(self) -> torch.Tensor | None:
        """Where the numbers are; None before the first is drawn."""
        return self._state

    @contextlib.contextmanager
    def used(self, like: torch.Tensor) -> Iterator[None]:
        """Draw own numbers on the tensor's device inside."""
        cuda = like.device.type == "cuda"
        generator = torch.cuda.default_generators[like.device.index] if cuda else torch.default_generator
        common = generator.get_state()
        if self._state is None:
            seed = (generator.initial_seed() + (self._rank + 1) * _SEED_STRIDE) % 2**63
            self._state = torch.Generator(like.device).manual_seed(seed).get_state()
        generator.set_state(self._state)
        try:
            yield
        finally:
            self._state = generator.get_state()
            generator.set_state(common)


def entered_later(
    random: OwnRandomness | None, made: Callable[[], contextlib.AbstractContextManager[object]]
) -> contextlib.AbstractContextManager[None]:
    """A context that is made and entered later, in which the numbers are drawn that are drawn from now on."""
    return _entered(random, random.state if random else None, made)


@contextlib.contextmanager
def _entered(
    random: OwnRandomness | None,
    state: torch.Tensor | None,
    made: Callable[[], contextlib.AbstractContextManager[object]],
) -> Iterator[None]:
    with random.replayed(state) if random else contextlib.nullcontext(), made():
        yield
