"""Dropout on parts of a tensor: every rank draws its own numbers, and what ranks have in common stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from paradl_bench.strategies.running.group_functions import Group
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.spans import Spans


def randomness(rank: int) -> OwnRandomness:
    nobody: Any = None
    return OwnRandomness(Group(process_group=nobody, rank=rank, size=2, spans=Spans()))


def draw(own: OwnRandomness, count: int = 8) -> list[float]:
    with own.used(torch.zeros(1)):
        numbers: list[float] = torch.rand(count).tolist()
    return numbers


def test_ranks_and_replicas_and_calls_draw_unlike_numbers() -> None:
    drawn = []
    for replica in (0, 1):
        for rank in (0, 1):
            torch.manual_seed(replica)
            own = randomness(rank)
            drawn += [draw(own), draw(own), torch.rand(8).tolist()]
    # What replicas draw in common is the same on both of their ranks.
    assert drawn[2] == drawn[5] != drawn[8] == drawn[11]
    assert len({tuple(numbers) for numbers in drawn}) == 10


def test_blocks_of_unlike_extents_leave_the_common_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    for count in (1, 100):
        torch.manual_seed(5)
        draw(randomness(0), count)
        assert torch.rand(3).tolist() == expected


def test_parts_that_two_axes_cut_are_drawn_by_both() -> None:
    drawn = []
    for outer_rank in (0, 1):
        for inner_rank in (0, 1):
            torch.manual_seed(5)
            outer, inner = randomness(outer_rank), randomness(inner_rank)
            with outer.used(torch.zeros(1)):
                both = draw(inner)
            drawn += [both, draw(outer), draw(inner)]
            with outer.used(torch.zeros(1)):
                assert draw(inner) not in drawn
    # What one axis draws is the same along the other.
    assert len({tuple(numbers) for numbers in drawn[::3]}) == 4
    assert drawn[1] == drawn[4] != drawn[7] == drawn[10]
    assert drawn[2] == drawn[8] != drawn[5] == drawn[11]


def test_numbers_are_the_same_in_every_run() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(draw(randomness(1)))
    assert found[0] == found[1]
