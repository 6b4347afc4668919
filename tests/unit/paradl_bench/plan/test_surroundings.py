"""Actions that are alike: those that the same actions are around, and around whose neighbours the same are."""

from __future__ import annotations

import numpy as np
import pytest

from paradl_bench.plan.schedules.catalog import schedules
from paradl_bench.plan.schedules.ordered import Order, ordered
from paradl_bench.plan.schedules.schedule import Extent
from paradl_bench.plan.schedules.surroundings import representatives


def order_of(schedule: str, extent: Extent, *, is_first: bool) -> Order:
    actions = schedules()[schedule].order(*extent)
    found = ordered(actions, extent, is_first=is_first, exchanges=True, adds_first=False, opens=False)
    order = found.order([*range(256)])
    assert order is not None
    return order


def around(order: Order, action: int, reach: int) -> tuple[object, ...]:
    """What is around an action: kinds, and how near forwards are, as far as an end."""
    places = range(action - reach, action + reach + 1)
    inside = [place if 0 <= place < len(order.kinds) else None for place in places]
    return tuple(
        None
        if place is None
        else (int(order.kinds[place]), int(order.marks[place]), min(place - int(order.forwards[place]), 3))
        for place in inside
    )


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize(("rank", "ranks"), [(0, 4), (1, 4), (2, 4), (3, 4), (0, 30), (7, 30), (20, 30), (29, 30)])
def test_the_same_is_around_actions_that_are_alike(schedule: str, rank: int, ranks: int) -> None:
    order = order_of(schedule, Extent(rank, ranks, 16 * ranks), is_first=rank == 0)
    for extent in schedules()[schedule].shorter(rank, ranks, 16 * ranks):
        shorter = order_of(schedule, extent, is_first=rank == 0)
        like = representatives(order, shorter)
        if like is None:
            continue
        for action, other in enumerate(like.tolist()):
            assert around(order, action, 4) == around(shorter, other, 4)
            assert around(order, int(order.forwards[action]), 2) == around(shorter, int(shorter.forwards[other]), 2)
        return
    raise AssertionError("no shorter pipeline tells what this one does")


def test_an_action_that_no_shorter_order_has_is_like_none() -> None:
    every = np.arange(12)
    alone = Order(np.array([0] * 6 + [1] + [0] * 5), every, np.zeros(12, int))
    assert representatives(alone, Order(np.zeros(11, int), every[:11], np.zeros(11, int))) is None
    like = representatives(alone, alone)
    assert like is not None
    assert like.tolist() == every.tolist()


def test_actions_of_unlike_stretches_are_not_alike() -> None:
    kinds, every = np.zeros(30, int), np.arange(30)
    longer = Order(kinds, every, np.repeat([0, 1], 15))
    assert representatives(longer, Order(kinds[:20], every[:20], np.zeros(20, int))) is None
    like = representatives(longer, Order(kinds[:24], every[:24], np.repeat([0, 1], 12)))
    assert like is not None
    assert like[:15].max() < 12 <= like[15:].min()


def test_shorter_pipelines_have_half_of_the_micro_batches_at_most() -> None:
    for schedule in schedules().values():
        for rank in range(40):
            extents = list(schedule.shorter(rank, 40, 200))
            assert extents
            assert max(extent.micro_batches for extent in extents) <= 100
            assert all(0 <= extent.rank < extent.ranks <= 40 for extent in extents)
            assert all((extent.rank > 0) == (rank > 0) for extent in extents)
            assert not any(schedule.refusal(extent.ranks, extent.micro_batches) for extent in extents)
            assert not list(schedule.shorter(rank, 40, 8))
