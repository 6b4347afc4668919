"""Turns that are left out of a schedule leave no state of a rank out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from paradl_bench.plan.schedules.catalog import schedule_of, schedules
from paradl_bench.plan.schedules.schedule import Action
from paradl_bench.plan.schedules.turns import fewer_turns

State = frozenset[tuple[int, int, int]]


def states(actions: Sequence[Action]) -> set[tuple[State, str, int]]:
    """What is under way at every moment, by how many micro-batches apart, and the action that comes then."""
    found, done = set(), Counter[tuple[int, int]]()
    for action in actions:
        first = min((number for _, number in done), default=action.micro_batch)
        relative = frozenset((stage, number - first, times) for (stage, number), times in done.items())
        found.add((relative, action.direction, action.stage))
        done[action.stage, action.micro_batch] += 1
        if action.completes:
            del done[action.stage, action.micro_batch]
    assert not done
    return found


@pytest.mark.parametrize("name", sorted(schedules()))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_state_is_there_and_the_rest_is_shorter(name: str, ranks: int) -> None:
    schedule = schedule_of(name)
    for count in (ranks, 2 * ranks, 24, 96, 97, 240):
        if schedule.refusal(ranks, count):
            continue
        for rank in range(ranks):
            actions = schedule.order(rank, ranks, count)
            fewer = fewer_turns(actions)
            assert states(fewer) == states(actions)
            by_stage = Counter((action.direction, action.stage) for action in fewer)
            assert len(set(by_stage.values())) == 1
            if count >= 96 and name == "1f1b":
                assert len(fewer) < len(actions) / 2


def test_gpipe_keeps_all_that_are_under_way_at_once() -> None:
    actions = schedule_of("gpipe").order(0, 4, 64)
    assert fewer_turns(actions) is actions


def test_what_grows_from_turn_to_turn_is_left_alone() -> None:
    turns = [Action(way, 0, number) for number in range(40) for way in ("FW", "FW", "BW")]
    growing = [action._replace(micro_batch=2 * (at // 3) + at % 3 % 2) for at, action in enumerate(turns)]
    assert fewer_turns(growing) is growing
