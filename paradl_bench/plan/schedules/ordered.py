"""The actions of a rank in arrays: what each one does, and which one its backward goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.schedules.schedule import Action, Extent

_FORWARD, _INPUT, _WHOLE, _WEIGHT = range(4)
_DIRECTIONS = {"FW": _FORWARD, "BW_input": _INPUT, "BW": _WHOLE, "BW_weight": _WEIGHT}


class Order(NamedTuple):
    """What a rank does, action after action.

    Attributes:
        kinds: per action, the number of what it does.
        forwards: per action, the index of the one that computes its micro-batch forward on its stage.
        marks: per action, the number of a stretch of the iteration: actions of unlike ones are never alike.
    """

    kinds: NDArray[np.intp]
    forwards: NDArray[np.intp]
    marks: NDArray[np.intp]


class Occurrence(NamedTuple):
    """An action where it stands.

    Attributes:
        exchanging, opening: as of :class:`OrderedActions`.
        other: of a step of two actions, the other one.
    """

    action: Action
    exchanging: bool
    opening: bool
    other: Action | None


class OrderedActions(NamedTuple):
    """The actions of a rank.

    Attributes:
        kinds: per action, a number for all that decides its tasks.
        exchanging: whether gradients are exchanged in it. opening: whether it is unlike others, since none is before.
        joined: whether it is one step with the action behind it.
        forwards: as of an :class:`Order`.
    """

    actions: Sequence[Action]
    kinds: NDArray[np.integer]
    exchanging: NDArray[np.bool_]
    opening: NDArray[np.bool_]
    joined: NDArray[np.bool_]
    forwards: NDArray[np.integer]

    @property
    def first_of_kinds(self) -> list[int]:
        """The first action of each kind, in their order."""
        first: list[int] = np.unique(self.kinds, return_index=True)[1].tolist()
        return sorted(first)

    def at(self, number: int) -> Occurrence:
        """The action of a number."""
        action = self.actions[number]
        beside = number + 1 if self.joined[number] else number - 1 if action.joins else None
        other = None if beside is None else self.actions[beside]
        return Occurrence(action, bool(self.exchanging[number]), bool(self.opening[number]), other)

    def order(self, kinds: Sequence[int]) -> Order | None:
        """Their order, by the places of their kinds among these; None where one is not among them."""
        found, number = np.unique(self.kinds, return_inverse=True)
        if not set(found.tolist()) <= set(kinds):
            return None
        places = np.array([kinds.index(kind) for kind in found.tolist()], np.intp)
        return Order(places[number], self.forwards.astype(np.intp), np.cumsum(self.exchanging))


def ordered(
    actions: Sequence[Action], extent: Extent, *, is_first: bool, exchanges: bool, adds_first: bool, opens: bool
) -> OrderedActions:
    """Arrays of a rank's actions.

    Args:
        is_first: whether the rank has the network's first stage.
        exchanges: whether replicas exchange gradients, in the last backward of each stage.
        adds_first: whether the gradients of the first micro-batch are added to something, as all others are.
        opens: whether the rank's first forward does more than others; that of the network's first stage waits for
            nothing, and so is unlike others too.
    """
    directions, of_stages, of_micro_batches, joining = zip(*actions, strict=True)
    # Numbers compare faster than words.
    direction = np.array([_DIRECTIONS[name] for name in directions])
    # Of the rank's own, from 0 on.
    stages, number = np.array(of_stages) // extent.ranks, np.array(of_micro_batches)
    is_forward, completes = direction == _FORWARD, direction >= _WHOLE
    joins = np.array(joining)
    # What it makes is sent behind the next one.
    joined = np.append(joins[1:], False)
    exchanging = completes & (number == extent.micro_batches - 1) & exchanges
    adding = completes & ((number > 0) | adds_first)
    # A backward goes on from its forward.
    opening = (stages == 0) & (number == 0) & ((is_first & is_forward) | opens)
    forward_of = np.zeros((stages.max() + 1, extent.micro_batches), np.int64)
    forward_of[stages[is_forward], number[is_forward]] = np.flatnonzero(is_forward)
    return OrderedActions(
        actions=actions,
        kinds=_numbers(stages, joins, joined, ~opening, adding, exchanging) * len(_DIRECTIONS) + direction,
        exchanging=exchanging,
        opening=opening,
        joined=joined,
        forwards=forward_of[stages, number],
    )


def _numbers(first: NDArray[np.integer], *bits: NDArray[np.bool_]) -> NDArray[np.integer]:
    """A number for each row of what tells actions apart."""
    numbers = first
    for bit in bits:
        numbers = 2 * numbers + bit
    return numbers
