"""Contention: how much longer bytes take when several groups of ranks communicate at once (MODELS.md's phi).

phi multiplies beta and leaves the start-up alone (ParaDL section 4.3: data and filter parallelism on four GPUs a node,
phi = 2, since two all-reduces share a link). Between the numbers of groups that were measured it is interpolated; one
group alone has 1 by definition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.spec.checks import check_counts, check_finite, check_not_negative, check_positive, check_slowdowns
from paradl_bench.spec.statistics import Z90


class ContentionPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time at once over time alone at one size: measured, and under the fit of all sizes."""

    ranks: int
    message_bytes: int
    measured_ratio: float
    fitted_ratio: float

    def __post_init__(self) -> None:
        check_positive(self, "measured_ratio", "fitted_ratio")


class Contention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """phi of one (library, operation, level) with so many groups at once.

    Attributes:
        concurrent: groups at once. ranks: the range of ranks of a group; bytes_range: of message sizes.
        factor: phi, at least 1. factor_interval: of 90%, by bootstrap over blocks, sizes and repetitions.
        residual_relative_median: median over sizes of how far the fit is off the measured ratio.
        samples: calls at once. points: every size.
    """

    library: str
    operation: str
    level: str
    concurrent: int
    ranks: tuple[int, int]
    bytes_range: tuple[int, int]
    factor: float
    factor_interval: tuple[float, float]
    residual_relative_median: float
    samples: int
    points: tuple[ContentionPoint, ...] = ()

    def __post_init__(self) -> None:
        check_counts(self, "concurrent", least=2)
        check_slowdowns(self, "factor")
        check_finite(self, "factor_interval")
        low, high = self.factor_interval
        if not 1 <= low <= high:
            raise ValueError(f"factor_interval has to rise from 1 or more, not {low} to {high}")
        check_not_negative(self, "residual_relative_median")

    @property
    def factor_sd(self) -> float:
        """Standard deviation of phi: the interval's half-width over that of a standard normal."""
        low, high = self.factor_interval
        return (high - low) / (2 * Z90)


class ContentionAt(NamedTuple):
    """phi for a number of groups at once, and whether that is beyond what was measured."""

    factor: float
    factor_sd: float
    beyond: bool


def contention_at(entries: Sequence[Contention], groups: float) -> ContentionAt:
    """phi for ``groups`` groups from entries of one (library, operation, level), at least one.

    Straight between neighbouring numbers of groups, from 1 for one group on. Beyond the largest the last slope goes on:
    flows that fill a link share it evenly, so that phi grows with their number.
    """
    if groups <= 1:
        return ContentionAt(1.0, 0.0, False)
    known = [(1.0, 1.0, 0.0)]
    known += sorted((float(each.concurrent), each.factor, each.factor_sd) for each in entries)
    lower, upper = next((pair for pair in itertools.pairwise(known) if groups <= pair[1][0]), (known[-2], known[-1]))
    share = (groups - lower[0]) / (upper[0] - lower[0])
    factor = lower[1] + share * (upper[1] - lower[1])
    # Neighbours are measured apart: their errors are independent.
    sd = math.hypot((1 - share) * lower[2], share * upper[2])
    return ContentionAt(max(1.0, factor), sd, groups > known[-1][0])
