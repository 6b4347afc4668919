"""What compute before a collective adds to it: cold caches, threads that sleep."""

from __future__ import annotations

import msgspec

from paradl_bench.core.bounds import Bytes, Covariance, PositiveCount, Ranks, Relative, Seconds, Slowdown
from paradl_bench.core.checks import check_covariance, check_rises


class BehindPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size: medians back to back and behind compute, and the latter under the fit of all sizes."""

    ranks: Ranks
    message_bytes: Bytes
    back_to_back_s: Seconds
    behind_s: Seconds
    fitted_s: Seconds


class BehindCompute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time behind compute = added + factor x time back to back, of one (library, operation, level).

    Attributes:
        ranks: the range of ranks; bytes_range: of message sizes.
        compute_s: median of the compute before a call. lag_s: median time between the first and the last rank's
            arrival, which is no part of the rest; None where ranks share no clock.
        added_s: at least 0. factor: at least 1.
        covariance: of (added_s, factor), by bootstrap over blocks, sizes and repetitions.
        residual_relative_median: median over sizes of how far the fit is off.
    """

    library: str
    operation: str
    level: str
    ranks: tuple[Ranks, Ranks]
    bytes_range: tuple[Bytes, Bytes]
    compute_s: Seconds
    lag_s: Seconds | None
    added_s: Seconds
    factor: Slowdown
    covariance: tuple[tuple[Covariance, Covariance], tuple[Covariance, Covariance]]
    residual_relative_median: Relative
    samples: PositiveCount
    points: tuple[BehindPoint, ...] = ()

    def __post_init__(self) -> None:
        check_rises(self, "ranks", "bytes_range")
        check_covariance(self, "covariance")

    def extra_s(self, back_to_back_s: float) -> float:
        """Seconds that compute before a call adds to one that takes so long back to back."""
        return self.added_s + (self.factor - 1) * back_to_back_s
