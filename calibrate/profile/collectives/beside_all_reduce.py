"""What an all-reduce in flight adds to calls that a rank waits for."""

from __future__ import annotations

import msgspec

from paradl_bench.core.bounds import (
    Bytes,
    Covariance,
    PositiveBytes,
    PositiveCount,
    Ranks,
    Relative,
    Seconds,
    Share,
    Slowdown,
)
from paradl_bench.core.checks import check_covariance, check_rises

QUEUES = 0.5
"""Share of calls from which on they count as waiting for the all-reduce."""


class BesidePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size: medians apart from the all-reduce and beside it, and the latter under the fit of all sizes."""

    ranks: Ranks
    message_bytes: Bytes
    apart_s: Seconds
    beside_s: Seconds
    fitted_s: Seconds


class BesideAllReduce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time beside an all-reduce = added + factor x time apart, of one (library, operation, level, exchange level).

    Attributes:
        exchange_level: that the all-reduces span, which go over more ranks than the calls; empty where over the same.
        ranks: the range of ranks; bytes_range: of message sizes; exchange_bytes: of the all-reduces in flight.
        queued: share of the calls begun beside an all-reduce that ended after it. Above :data:`QUEUES` the library has
            calls wait for it, and the rest says nothing.
        added_s: at least 0. factor: at least 1. Both of calls behind compute, with and without the all-reduce.
        covariance: of (added_s, factor), by bootstrap over blocks, sizes and repetitions.
        residual_relative_median: median over sizes of how far the fit is off.
    """

    library: str
    operation: str
    level: str
    ranks: tuple[Ranks, Ranks]
    bytes_range: tuple[Bytes, Bytes]
    exchange_bytes: tuple[PositiveBytes, PositiveBytes]
    queued: Share
    added_s: Seconds
    factor: Slowdown
    covariance: tuple[tuple[Covariance, Covariance], tuple[Covariance, Covariance]]
    residual_relative_median: Relative
    samples: PositiveCount
    points: tuple[BesidePoint, ...] = ()
    exchange_level: str = ""

    def __post_init__(self) -> None:
        check_rises(self, "ranks", "bytes_range", "exchange_bytes")
        check_covariance(self, "covariance")

    @property
    def spanned(self) -> str:
        """The level that the all-reduces span."""
        return self.exchange_level or self.level

    @property
    def queues(self) -> bool:
        """Whether a call waits for the all-reduce that is in flight, instead of going on beside it."""
        return self.queued > QUEUES

    def slowdown(self, apart_s: float) -> float:
        """How many times longer a call of ``apart_s`` > 0 takes while an all-reduce is in flight."""
        return self.factor + self.added_s / apart_s
