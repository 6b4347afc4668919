"""Segments whose tasks are alike are added up once, to the last bit as each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from predict.simulation.pipelines.alike_segments import alike_segments, joined


def drawn(seed: int, micro_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments and works of tasks: a few distinct runs, repeated, with the tasks of neighbours in turn."""
    generator = np.random.default_rng(seed)
    runs = [generator.integers(0, 9, generator.integers(1, 6)) for _ in range(4)]
    segment, work = [], []
    for number, which in enumerate(generator.integers(0, 4, micro_batches)):
        segment += [2 * number, *(2 * number + 1 for _ in runs[which]), 2 * number]
        work += [9, *runs[which].tolist(), 10]
    return np.array(segment, np.int32), np.array(work, np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_seconds_are_those_of_each_segment_by_itself(seed: int) -> None:
    segment, work = drawn(seed, 200)
    of_works = np.random.default_rng(seed + 1).random(11)
    found = alike_segments(segment, work)
    assert found.seconds(of_works).tolist() == np.bincount(segment, weights=of_works[work]).tolist()
    assert len(found.work) < 40


def test_rows_take_what_each_takes_alone() -> None:
    segment, work = drawn(3, 200)
    found, rows = alike_segments(segment, work), np.random.default_rng(4).random((4, 11))
    # Equal in what is added up, and unlike with an equal sum.
    rows[1], rows[2] = rows[0], rows[0][::-1]
    rows[1, 9] = 7.0
    for of_works in (rows, rows[:2], rows[1:]):
        assert found.seconds(of_works).tolist() == [found.seconds(row).tolist() for row in of_works]


def test_order_of_tasks_tells_segments_apart() -> None:
    segment, work = np.array([0, 0, 1, 1, 2, 2], np.int32), np.array([3, 4, 4, 3, 3, 4], np.int32)
    assert alike_segments(segment, work).of_segments.tolist() in ([0, 1, 0], [1, 0, 1])


def test_roles_stand_one_behind_the_other() -> None:
    roles = [drawn(seed, 50) for seed in range(3)]
    of_works = np.random.default_rng(7).random(11)
    alone = [np.bincount(segment, weights=of_works[work]) for segment, work in roles]
    together = joined([alike_segments(*role) for role in roles])
    assert together.seconds(of_works).tolist() == np.concatenate(alone).tolist()


def test_a_role_without_tasks_has_no_segments() -> None:
    nothing = np.zeros(0, np.int32)
    assert alike_segments(nothing, nothing).seconds(np.ones(1)).tolist() == []
