"""Turns of a schedule: what a rank does again and again with later micro-batches, and how to leave most of them out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paradl_bench.plan.schedules.schedule import Action

_MOST_TRIED = 256
"""Lengths of a turn, which is as long as a group of interleaved micro-batches takes at most."""
_SETTLED = 3
"""Turns behind those in which the rank gets rid of all that it had under way before: they are alike in all."""


class _Turns(NamedTuple):
    """Equal turns, but for the numbers of micro-batches.

    Attributes:
        start: index of the first one's first action. length: actions of each. later: by how much micro-batches are.
        turns: how many.
    """

    start: int
    length: int
    later: int
    turns: int


def fewer_turns(actions: Sequence[Action]) -> Sequence[Action]:
    """A rank's actions without most turns in its middle, each of which leaves under way what it found, moved on.

    Whatever the rank holds at some time, it holds in the actions that are left too, of other micro-batches. That is
    true of what it holds for micro-batches under way, and not of what grows with every action. All actions, if there
    are no such turns.
    """
    turns = _longest(actions)
    if turns is None:
        return actions
    under_way, after = (_under_way(actions[: turns.start + done * turns.length]) for done in (0, 1))
    if after != {(stage, number + turns.later): done for (stage, number), done in under_way.items()}:
        return actions
    completed = sum(action.completes for action in actions[turns.start : turns.start + turns.length])
    kept = -(-len(under_way) // max(completed, 1)) + _SETTLED
    left_out = turns.turns - kept
    if left_out <= 0 or not completed:
        return actions
    end = turns.start + kept * turns.length
    behind = actions[end + left_out * turns.length :]
    earlier = left_out * turns.later
    return (*actions[:end], *(action._replace(micro_batch=action.micro_batch - earlier) for action in behind))


def _longest(actions: Sequence[Action]) -> _Turns | None:
    """Turns around the middle of all actions that take most of them."""
    numbers: dict[tuple[str, int], int] = {}
    kind = np.array([numbers.setdefault(action[:2], len(numbers)) for action in actions])
    micro_batch = np.array([action.micro_batch for action in actions])
    middle = len(actions) // 2
    best: _Turns | None = None
    for again in itertools.islice(middle + np.flatnonzero(kind[middle:] == kind[middle])[1:], _MOST_TRIED):
        length, later = int(again) - middle, int(micro_batch[again] - micro_batch[middle])
        alike = (kind[length:] == kind[:-length]) & (micro_batch[length:] - micro_batch[:-length] == later)
        breaks = np.flatnonzero(~alike)
        before, behind = breaks[breaks < middle], breaks[breaks > middle]
        start = int(before[-1]) + 1 if len(before) else 0
        end = int(behind[0]) if len(behind) else len(alike)
        found = _Turns(start, length, later, (end - start) // length + 1)
        if later > 0 and (best is None or found.length * found.turns > best.length * best.turns):
            best = found
        if best is not None and 2 * best.length * best.turns >= len(actions):
            break
    return best


def _under_way(done: Sequence[Action]) -> dict[tuple[int, int], int]:
    """(stage, micro-batch) that some of its actions were done with, and not the last one: how many of them."""
    counts = Counter((action.stage, action.micro_batch) for action in done)
    completed = {(action.stage, action.micro_batch) for action in done if action.completes}
    return {key: count for key, count in counts.items() if key not in completed}
