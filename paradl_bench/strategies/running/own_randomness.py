"""Dropout on a part of a tensor: every rank draws its own numbers, and what ranks have in common stays as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar

import torch

from paradl_bench.strategies.running.group_functions import Group

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: seeds of ranks lie far from each other and from those of other replicas. An axis that
draws inside of n others takes its power n + 1, so that seeds of two axes lie far from each other too."""
_AXES_DRAWING: ContextVar[int] = ContextVar("_AXES_DRAWING", default=0)
States = Mapping[int, torch.Tensor]
"""Where numbers are, by how many other axes they are drawn inside of."""


class OwnRandomness:
    """Random numbers of this rank's own, so that no two parts are dropped alike.

    The state that ranks have in common is left as it was: parts may be of unlike extents, and what runs whole has to
    draw alike on every rank. So is what ranks of another axis each draw, inside of which further numbers are drawn for
    parts that both axes cut.
    """

    def __init__(self, group: Group) -> None:
        self._rank = group.rank
        self._states: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def replayed(self, states: States) -> Iterator[None]:
        """Draw inside what was drawn from earlier :attr:`states` on; then go on as if nothing had been drawn."""
        now, self._states = self._states, dict(states)
        try:
            yield
        finally:
            self._states = now

    @property
    def states(self) -> States:
        """Where the numbers are; nowhere before the first is drawn."""
        return dict(self._states)

    @contextlib.contextmanager
    def used(self, like: torch.Tensor) -> Iterator[None]:
        """Draw own numbers on the tensor's device inside."""
        cuda = like.device.type == "cuda"
        generator = torch.cuda.default_generators[like.device.index] if cuda else torch.default_generator
        common, drawing = generator.get_state(), _AXES_DRAWING.get()
        if drawing not in self._states:
            stride = pow(_SEED_STRIDE, drawing + 1, 2**63)
            seed = (generator.initial_seed() + (self._rank + 1) * stride) % 2**63
            self._states[drawing] = torch.Generator(like.device).manual_seed(seed).get_state()
        generator.set_state(self._states[drawing])
        token = _AXES_DRAWING.set(drawing + 1)
        try:
            yield
        finally:
            _AXES_DRAWING.reset(token)
            self._states[drawing] = generator.get_state()
            generator.set_state(common)


def entered_later(
    randoms: Sequence[OwnRandomness], made: Callable[[], contextlib.AbstractContextManager[object]]
) -> contextlib.AbstractContextManager[None]:
    """A context that is made and entered later, in which the numbers are drawn that are drawn from now on."""
    return _entered([(random, random.states) for random in randoms], made)


@contextlib.contextmanager
def _entered(
    replayed: Sequence[tuple[OwnRandomness, States]], made: Callable[[], contextlib.AbstractContextManager[object]]
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for random, states in replayed:
            stack.enter_context(random.replayed(states))
        stack.enter_context(made())
        yield
