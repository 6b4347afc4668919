"""What few blocks of time say of a further one, such as a run: intervals made of them hold as much as they claim."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.statistics.blocks import block_sd, next_block_stretch
from calibrate.statistics.pair_draws import Pair, by_block, covariance_of_next
from paradl_bench.core.statistics import Z90


@pytest.mark.parametrize("blocks", [2, 3, 5, 10])
def test_nine_of_ten_further_blocks_lie_inside(blocks: int) -> None:
    """Blocks drawn from a normal distribution, a further one from the same: an independent check of the quantile."""
    values = np.random.default_rng(blocks).normal(100.0, 4.0, size=(20_000, blocks + 1))
    sd = np.array([block_sd(row) for row in values[:, :blocks]])
    reach = Z90 * sd * next_block_stretch(blocks)
    held = np.abs(values[:, blocks] - values[:, :blocks].mean(axis=1)) <= reach
    # Values far out are pulled in where there are at least four, which costs a little.
    assert held.mean() == pytest.approx(0.9, abs=0.015)


def test_the_block_stretch_is_1_without_blocks_and_with_many() -> None:
    assert next_block_stretch(0) == next_block_stretch(1) == 1.0
    assert next_block_stretch(2, of_many=True) == pytest.approx(1.5**0.5)
    assert next_block_stretch(10_000) == pytest.approx(1.0, abs=1e-3)


def test_what_blocks_differ_in_joins_the_covariance_of_resampling() -> None:
    drawn = np.random.default_rng(0).normal(0.0, 1e-3, size=(4000, 2))
    alone = covariance_of_next(drawn, np.array([[1.0, 2.0]]))
    assert np.sqrt(np.diag(alone)) == pytest.approx([1e-3, 1e-3], rel=0.05)
    of_two = covariance_of_next(drawn, np.array([[1.0, 2.0], [3.0, 2.0]]))
    # Of two values the variance is 2; Student's quantile of one degree of freedom is 6.31.
    assert of_two[0, 0] == pytest.approx(2 * (6.3138 / Z90) ** 2, rel=1e-3)
    assert of_two[1, 1] == pytest.approx(alone[1, 1] * (6.3138 / Z90) ** 2, rel=1e-3)


def test_pairs_are_told_apart_by_block() -> None:
    seconds = np.ones(1)
    pairs = [Pair(block, at, seconds, seconds) for block, at in ((1, 0), (0, 0), (1, 1))]
    assert [[pair.at for pair in own] for own in by_block(pairs)] == [[0], [0, 1]]
