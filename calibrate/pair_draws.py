"""Bootstrap of pairs (time under some condition, time alone) that were measured in turn, in blocks over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DRAWS = 400
_OF_POINT = 60


class Pair(NamedTuple):
    """Times of one size in one block: alone, and under the condition; not necessarily equally many.

    Attributes:
        block: of whatever number; pairs of one block were measured at about the same time.
        at: which size (and rank count) it is.
    """

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


class Draws(NamedTuple):
    """Resampled pairs: which ones each draw holds, (draws, pairs), and their medians, likewise."""

    chosen: Ints
    alone_s: Floats
    condition_s: Floats


def draw_pairs(pairs: Sequence[Pair], *, seed: int = 0, draws: int = DRAWS) -> Draws:
    """Resample blocks, then sizes, then repetitions.

    Blocks, because a slow spell outlasts one; sizes, because what a form misses is not the same at all of them.
    """
    generator = np.random.default_rng(seed)
    tables = [
        np.stack([_resampled_medians(values, generator) for values in (pair.alone_s, pair.condition_s)])
        for pair in pairs
    ]
    blocks = sorted({pair.block for pair in pairs})
    members = [[index for index, pair in enumerate(pairs) if pair.block == block] for block in blocks]
    rows = []
    for _ in range(draws):
        taken = generator.integers(len(blocks), size=len(blocks))
        picked = np.concatenate([np.array(members[block])[_places(len(members[block]), generator)] for block in taken])
        # Blocks of unlike length: a draw holds as many pairs as there are.
        rows.append(np.resize(picked, len(pairs)))
    chosen = np.stack(rows)
    which = generator.integers(_OF_POINT, size=chosen.shape)
    stacked = np.stack(tables)
    return Draws(chosen, stacked[chosen, 0, which], stacked[chosen, 1, which])


def _places(count: int, generator: np.random.Generator) -> Ints:
    return np.asarray(generator.integers(count, size=count))


def _resampled_medians(values: Floats, generator: np.random.Generator) -> Floats:
    picked = generator.integers(values.size, size=(_OF_POINT, values.size))
    return np.asarray(np.median(values[picked], axis=1))
