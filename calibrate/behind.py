"""What compute before a collective adds to it: cold caches, threads that sleep."""

from __future__ import annotations

import msgspec

from paradl_bench.spec.checks import check_finite, check_not_negative, check_slowdowns


class BehindPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size: medians back to back and behind compute, and the latter under the fit of all sizes."""

    ranks: int
    message_bytes: int
    back_to_back_s: float
    behind_s: float
    fitted_s: float

    def __post_init__(self) -> None:
        check_not_negative(self, "back_to_back_s", "behind_s", "fitted_s")


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
    ranks: tuple[int, int]
    bytes_range: tuple[int, int]
    compute_s: float
    lag_s: float | None
    added_s: float
    factor: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    residual_relative_median: float
    samples: int
    points: tuple[BehindPoint, ...] = ()

    def __post_init__(self) -> None:
        check_not_negative(self, "compute_s", "lag_s", "added_s", "residual_relative_median")
        check_slowdowns(self, "factor")
        check_finite(self, "covariance")

    def extra_s(self, back_to_back_s: float) -> float:
        """Seconds that compute before a call adds to one that takes so long back to back."""
        return self.added_s + (self.factor - 1) * back_to_back_s
