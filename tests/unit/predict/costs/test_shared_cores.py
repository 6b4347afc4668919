"""Readers on cores that ranks compute on, against a schedule that is followed core by core."""

from __future__ import annotations

import numpy as np
import pytest

from predict.costs.input.shared_cores import reading_seconds


def followed_s(ranks: int, cores: int, rest_s: float, process_s: float) -> float:
    """Seconds an iteration of ranks that compute while as many readers as cores share all that is left of them."""
    busy = min(ranks, cores)
    left = cores - busy
    # Readers have the idle cores alone at first; then ranks and readers take turns on all cores.
    read_meanwhile_s = min(process_s, left * rest_s)
    return rest_s + (process_s - read_meanwhile_s) / cores


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("process_s", [0.5, 2.0, 7.0])
def test_reading_takes_what_ranks_leave_of_the_cores(ranks: int, process_s: float) -> None:
    cores, rest_s = 4, 1.0
    found = float(reading_seconds(0.01, rest_s, process_s, ranks, cores))
    expected = followed_s(ranks, cores, rest_s, process_s)
    assert max(found, rest_s) == pytest.approx(expected)


def test_readers_with_cores_of_their_own_are_not_slowed() -> None:
    assert float(reading_seconds(0.25, 1.0, 0.0, 9, 2)) == 0.25
    assert float(reading_seconds(3.0, 1.0, 1.0, 2, 4)) == 3.0


def test_arrays_are_worked_on_entry_by_entry() -> None:
    rest_s, process_s = np.array([1.0, 2.0, 1.0]), np.array([2.0, 2.0, 0.0])
    found = reading_seconds(np.full(3, 0.5), rest_s, process_s, 2, 2)
    assert np.asarray(found).tolist() == [2.0, 3.0, 0.5]
