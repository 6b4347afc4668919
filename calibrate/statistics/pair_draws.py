"""Bootstrap of pairs (time under some condition, time alone) that were measured in turn, in blocks over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.statistics.blocks import quantile_covariance, student_90
from paradl_bench.core.statistics import Z90, Floats

Ints = NDArray[np.int64]

DRAWS = 400
_OF_POINT = 60


class Pair(NamedTuple):
    """Times of one size (``at``) in one block of time: alone, and under the condition; not necessarily equally many."""

    block: int
    at: int
    alone_s: Floats
    condition_s: Floats


def medians(pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
    """(pairs,) medians alone and under the condition."""
    alone, condition = (
        [float(np.median(values)) for values in column] for column in list(zip(*pairs, strict=True))[2:]
    )
    return np.array(alone), np.array(condition)


def by_block(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs of each block."""
    return [[pair for pair in pairs if pair.block == block] for block in sorted({pair.block for pair in pairs})]


class Draws(NamedTuple):
    """Resampled pairs: which ones each draw holds, (draws, pairs), and their medians, likewise."""

    chosen: Ints
    alone_s: Floats
    condition_s: Floats


def draw_pairs(pairs: Sequence[Pair]) -> Draws:
    """Resample blocks, then sizes, then repetitions.

    Blocks, because a slow spell outlasts one; sizes, because what a form misses is not the same at all of them.
    """
    generator = np.random.default_rng(0)
    tables = [
        np.stack([_resampled_medians(values, generator) for values in (pair.alone_s, pair.condition_s)])
        for pair in pairs
    ]
    block_of = np.array([pair.block for pair in pairs])
    members = [np.flatnonzero(block_of == block) for block in np.unique(block_of)]
    rows = []
    for _ in range(DRAWS):
        taken = generator.integers(len(members), size=len(members))
        picked = np.concatenate([generator.choice(members[block], size=len(members[block])) for block in taken])
        # Blocks of unlike length: a draw holds as many pairs as there are.
        rows.append(np.resize(picked, len(pairs)))
    chosen = np.stack(rows)
    which = generator.integers(_OF_POINT, size=chosen.shape)
    stacked = np.stack(tables)
    return Draws(chosen, stacked[chosen, 0, which], stacked[chosen, 1, which])


def covariance_of_next(drawn: Floats, of_blocks: Floats) -> Floats:
    """Covariance of parameters as a further block of time, such as a run, may have them.

    What resampling leaves open (``drawn``), and how blocks differ (``of_blocks``), each a row of parameters; both known
    from as few blocks as there are (Student's t). Of one block, what resampling says.
    """
    covariance = quantile_covariance(drawn)
    count = len(of_blocks)
    if count < 2:
        return covariance
    between = np.atleast_2d(np.cov(of_blocks, rowvar=False))
    return np.asarray((covariance + between) * (student_90(count - 1) / Z90) ** 2)


def _resampled_medians(values: Floats, generator: np.random.Generator) -> Floats:
    picked = generator.integers(values.size, size=(_OF_POINT, values.size))
    return np.asarray(np.median(values[picked], axis=1))
