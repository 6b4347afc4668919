"""Contention: how much longer bytes take when several groups of ranks communicate at once (ParaDL's phi).

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

from paradl_bench.core.bounds import Bytes, Groups, PositiveCount, Ranks, Ratio, Relative, Slowdown
from paradl_bench.core.checks import check_rises
from paradl_bench.core.statistics import Z90


class ContentionPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time at once over time alone at one size: measured, and under the fit of all sizes."""

    ranks: Ranks
    message_bytes: Bytes
    measured_ratio: Ratio
    fitted_ratio: Ratio


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
    concurrent: Groups
    ranks: tuple[Ranks, Ranks]
    bytes_range: tuple[Bytes, Bytes]
    factor: Slowdown
    factor_interval: tuple[Slowdown, Slowdown]
    residual_relative_median: Relative
    samples: PositiveCount
    points: tuple[ContentionPoint, ...] = ()

    def __post_init__(self) -> None:
        check_rises(self, "ranks", "bytes_range", "factor_interval")

    @property
    def factor_sd(self) -> float:
        """Standard deviation of phi: the interval's half-width over that of a standard normal."""
        low, high = self.factor_interval
        return (high - low) / (2 * Z90)


class ContentionAt(NamedTuple):
    """phi for a number of groups at once, and whether that is beyond what was measured."""

    factor: float
    factor_sd: float
    extrapolated: bool


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
