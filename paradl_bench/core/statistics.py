"""Statistics derived from raw samples: median, interquartile range, bootstrap intervals.

Medians, because shared machines have slow spells that move a mean; spreads are kept beside every number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paradl_bench.core.bounds import SHORTEST_S, PositiveCount, Seconds

Record = TypeVar("Record")
Key = TypeVar("Key", bound=Hashable)
Ordered = TypeVar("Ordered", bound=tuple[object, ...])
Floats = NDArray[np.float64]
Z90 = 1.6448536269514722
"""Standard normal quantile of a two-sided 90% interval."""
IQR_TO_SD = 1 / 1.3489795003921634
"""Standard deviation over interquartile range of a normal distribution."""
MAD_TO_SD = 1 / 0.6744897501960817
"""Standard deviation over median absolute deviation of a normal distribution."""


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Median and spread of samples in seconds, and how many there were.

    Attributes:
        typical_s: what adds up to a whole: the mean over the samples that belong to typical wholes (iterations whose
            total lies in the middle half), where the samples are parts of one; else the median. Medians of parts do
            not add up to the median of the whole when noise falls on one part at a time.
    """

    median_s: Seconds
    typical_s: Seconds
    iqr_s: Seconds
    minimum_s: Seconds
    samples: PositiveCount

    def __post_init__(self) -> None:
        # A profile holds more of these than of anything else: a call for one number would be seen in reading it.
        if 0.0 < self.median_s < SHORTEST_S or 0.0 < self.typical_s < SHORTEST_S:
            raise ValueError(f"median_s and typical_s have to be 0 or at least {SHORTEST_S:g}, not less")


def grouped(items: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """Lists of the items with one key, in the order in which each key comes first."""
    groups: dict[Key, list[Record]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def sorted_groups(items: Iterable[Record], key: Callable[[Record], Ordered]) -> dict[Ordered, list[Record]]:
    """Lists of the items with one key, in the order of keys."""
    groups = grouped(items, key)
    return {name: groups[name] for name in sorted(groups)}


def summarise(samples_s: ArrayLike, *, typical: ArrayLike | None = None) -> Summary:
    """Summary of at least one sample.

    Args:
        typical: which samples belong to typical wholes, one truth value each; None where samples stand for themselves.

    Raises:
        ValueError: no samples, or one that is no time (negative or not finite).
    """
    values = np.asarray(samples_s, float)
    if not values.size:
        raise ValueError("there are no samples to summarise")
    if not np.all(np.isfinite(values) & (values >= 0)):
        raise ValueError("samples have to be finite and not negative")
    low, median, high = np.percentile(values, [25, 50, 75])
    chosen = None if typical is None else values[np.asarray(typical, bool)]
    return Summary(
        median_s=float(median),
        typical_s=float(chosen.mean()) if chosen is not None and chosen.size else float(median),
        iqr_s=float(high - low),
        minimum_s=float(values.min()),
        samples=int(values.size),
    )


def middle_half(totals: ArrayLike) -> NDArray[np.bool_]:
    """Which totals lie between their quartiles, ends included."""
    values = np.asarray(totals, float)
    low, high = np.percentile(values, [25, 75])
    return np.asarray((values >= low) & (values <= high))


def bootstrap_interval(
    blocks: Sequence[Floats],
    *,
    level: float = 0.9,
    resamples: int = 1000,
    seed: int = 0,
    statistic: Callable[..., Floats] = np.median,
) -> tuple[float, float]:
    """Percentile interval of the median (or the mean) of all samples: blocks are drawn, then samples within each.

    Samples of a block are alike, which scipy's bootstrap has no way to say. A single sample gives a point.

    Raises:
        ValueError: no samples.
    """
    if not any(block.size for block in blocks):
        raise ValueError("no samples to resample")
    generator = np.random.default_rng(seed)
    # Blocks of unlike length repeat their samples up to the longest, so that all draws are one array.
    longest = max(block.size for block in blocks)
    table = np.stack([np.resize(block, longest) for block in blocks])
    chosen = generator.integers(len(blocks), size=(resamples, len(blocks), 1))
    within = generator.integers(longest, size=(resamples, len(blocks), longest))
    drawn = statistic(table[chosen, within].reshape(resamples, -1), axis=1)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
