"""What an all-reduce in flight adds to calls that a rank waits for."""

from __future__ import annotations

import msgspec

from paradl_bench.spec.checks import check_finite, check_not_negative, check_slowdowns

QUEUES = 0.5
"""Share of calls from which on they count as waiting for the all-reduce."""


class BesidePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size: medians apart from the all-reduce and beside it, and the latter under the fit of all sizes."""

    ranks: int
    message_bytes: int
    apart_s: float
    beside_s: float
    fitted_s: float

    def __post_init__(self) -> None:
        check_not_negative(self, "apart_s", "beside_s", "fitted_s")


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
    ranks: tuple[int, int]
    bytes_range: tuple[int, int]
    exchange_bytes: tuple[int, int]
    queued: float
    added_s: float
    factor: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    residual_relative_median: float
    samples: int
    points: tuple[BesidePoint, ...] = ()
    exchange_level: str = ""

    def __post_init__(self) -> None:
        check_not_negative(self, "added_s", "residual_relative_median")
        if not 0 <= self.queued <= 1:
            raise ValueError(f"queued has to be a share from 0 to 1, not {self.queued}")
        check_slowdowns(self, "factor")
        check_finite(self, "covariance")

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
