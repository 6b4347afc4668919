"""Statistics of samples that come in blocks spread over time.

A shared machine has slow spells that outlast a block, so that samples of one block are alike: what matters for a
prediction is the spread between blocks, and intervals resample blocks, not samples (cluster bootstrap: Davison and
Hinkley, Bootstrap Methods and their Application, section 3.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paradl_bench.core.statistics import MAD_TO_SD, Z90, Floats

_OUTLIER = 5.0
_FEWEST_FOR_OUTLIERS = 4
_MOST_OUTLIERS = 1 / 3
_LEAST_RELATIVE_SD = 0.05

_DEGREES = np.array([1, 2, 3, 4, 5, 6, 8, 10, 15, 30, np.inf])
_STUDENT = np.array([6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8595, 1.8125, 1.7531, 1.6973, Z90])
"""Quantiles of Student's t that hold 90% between them, by degrees of freedom.

A table, since predictions need them and scipy takes longer to load than a prediction to make."""


def block_sd(values: ArrayLike) -> float:
    """Standard deviation of one value a block, without the bias of few values; 0 for one value.

    A block that something else on the machine held up tenfold would make it meaningless: it is pulled in
    (:func:`pull_in`). Normal values lose at most 4% by it.
    """
    array = np.asarray(values, float)
    count = array.size
    if count < 2:
        return 0.0
    array = pull_in(array, middle=float(np.median(array)))
    return float(np.std(array, ddof=1)) / bias_of_sd(count)


def bias_of_sd(count: int) -> float:
    """How much of a normal distribution's deviation that of so many values, at least two, is in the mean: c4."""
    return math.sqrt(2 / (count - 1)) * math.exp(math.lgamma(count / 2) - math.lgamma((count - 1) / 2))


def student_90(freedom: float) -> float:
    """Half the width of Student's t that holds 90%, in its own scale."""
    return float(np.interp(-1 / freedom, -1 / _DEGREES, _STUDENT))


def next_block_stretch(blocks: int, *, of_many: bool = False) -> float:
    """What a deviation between blocks (:func:`block_sd`) is multiplied by so that Z90 of it holds 90% of further ones.

    A run that is predicted is a block of time like those measured: it has its own deviation, and the mean of n of them
    has 1 / n of the variance besides. Few blocks leave the deviation itself uncertain: Student's quantile, for it as it
    was before it was freed of its bias.

    Args:
        blocks: how many; 0 where it is not known, which stretches nothing.
        of_many: whether many deviations, each of as many blocks, add up in quadrature: theirs together is well known.
    """
    if blocks < 2:
        return 1.0
    stretch = math.sqrt(1 + 1 / blocks)
    return stretch if of_many else stretch * student_90(blocks - 1) / Z90 * bias_of_sd(blocks)


def pull_in(values: ArrayLike, *, middle: float) -> Floats:
    """Values, of at least four those farther from ``middle`` than five robust standard deviations moved to there."""
    array = np.asarray(values, float)
    if array.size < _FEWEST_FOR_OUTLIERS:
        return array
    reach = _OUTLIER * MAD_TO_SD * float(np.median(np.abs(array - middle)))
    return np.asarray(np.clip(array, middle - reach, middle + reach))


def far_from_the_rest(blocks: Sequence[Floats]) -> list[NDArray[np.bool_]]:
    """Which samples lie far from the median of all, block by block.

    Farther than five robust standard deviations, and than a quarter of the median. Where more than a third of the
    samples lie so far they are another mode of what was measured, and none is.
    """
    everything = np.concatenate(blocks)
    middle = float(np.median(everything))
    sd = max(MAD_TO_SD * float(np.median(np.abs(everything - middle))), _LEAST_RELATIVE_SD * middle)
    far = [np.abs(block - middle) > _OUTLIER * sd for block in blocks]
    if everything.size < _FEWEST_FOR_OUTLIERS or np.concatenate(far).mean() > _MOST_OUTLIERS:
        return [np.zeros(len(block), bool) for block in blocks]
    return far


def quantile_covariance(draws: Floats) -> Floats:
    """Covariance of bootstrap draws, (draws, parameters), from their central 90%: a tail counts for no more than that.

    Standard deviations are the width of the central 90% over that of a standard normal; correlations are of draws
    pulled in to it.
    """
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    sd = (high - low) / (2 * Z90)
    inside = np.clip(draws, low, high)
    spread = np.std(inside, axis=0)
    centred = (inside - inside.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return np.asarray(centred.T @ centred / len(draws) * np.outer(sd, sd))


def between_block_sd(blocks: Sequence[Floats]) -> float:
    """Standard deviation of the blocks' medians, relative to the median over all samples; 0 for a single sample.

    A single block is taken as its two halves: the little that it knows of drift.
    """
    if len(blocks) == 1:
        half = len(blocks[0]) // 2
        blocks = [blocks[0][:half], blocks[0][half:]]
    medians = [float(np.median(block)) for block in blocks if len(block)]
    middle = float(np.median(np.concatenate(blocks)))
    return block_sd(medians) / middle if middle > 0 else 0.0


def split_half_difference(blocks: Sequence[Floats], *, splits: int = 200) -> float:
    """How much the median of one random half of the samples differs from that of the other, relative; median of splits.

    Halves are drawn within each block. This is what a comparison of equal things would show by noise alone.
    """
    generator = np.random.default_rng(0)
    differences = []
    for _ in range(splits):
        shuffled = [generator.permutation(block) for block in blocks]
        first = np.concatenate([block[: (block.size + 1) // 2] for block in shuffled])
        second = np.concatenate([block[(block.size + 1) // 2 :] for block in shuffled])
        if not second.size:
            return 0.0
        low, high = sorted((float(np.median(first)), float(np.median(second))))
        differences.append((high - low) / ((high + low) / 2) if high > 0 else 0.0)
    return float(np.median(differences))
