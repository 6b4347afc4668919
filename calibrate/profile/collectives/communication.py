"""What a profile holds of collectives: alpha and beta by regression, what was considered."""

from __future__ import annotations

import msgspec

from paradl_bench.core.bounds import (
    Bytes,
    Count,
    Covariance,
    Index,
    PositiveCount,
    PositiveEstimatedBytes,
    Ranks,
    Ratio,
    Relative,
    Seconds,
    SecondsPerByte,
)
from paradl_bench.core.checks import check_covariance, check_rises


class CommunicationPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured size and rank count beside its fit.

    Attributes:
        measured_s: median over repetitions and blocks of a call's time (slowest rank; the receiver for send_recv).
        fitted_s: under the fit of all points. held_out_s: under a fit that did not see this size.
        held_out_ranks_s: under one that did not see this rank count; None for the smallest, and where one was measured.
    """

    ranks: Ranks
    message_bytes: Bytes
    measured_s: Seconds
    fitted_s: Seconds
    held_out_s: Seconds
    held_out_ranks_s: Seconds | None = None


class Outliers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Repetitions of one point far from the rest: left out of alpha and beta, not out of the spread.

    Attributes:
        repetitions: how many are far, of so many in ``total``.
        ratio: their median over that of the rest.
        blocks: in which they lie, numbered as they were measured one after the other.
    """

    ranks: Ranks
    message_bytes: Bytes
    repetitions: PositiveCount
    total: PositiveCount
    ratio: Ratio
    blocks: tuple[Index, ...]

    def __post_init__(self) -> None:
        if not 0 < self.repetitions < self.total:
            raise ValueError(f"repetitions has to lie between 0 and total, not {self.repetitions} of {self.total}")


class InnerLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a hierarchical algorithm takes inside a node.

    Attributes:
        ranks: that shared a node where this was measured.
        covariance: of (alpha_s, beta_s_per_byte).
    """

    ranks: Ranks
    alpha_s: Seconds
    beta_s_per_byte: SecondsPerByte
    covariance: tuple[tuple[Covariance, Covariance], tuple[Covariance, Covariance]]

    def __post_init__(self) -> None:
        check_covariance(self, "covariance")


class ComparableScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the scaling over rank counts was off where others of the profile's collectives had one left out.

    Attributes:
        relative_sd: root of the median, over the rank counts left out, of mean squares a doubling of ranks, relative to
            the prediction and beyond what a size has by itself.
        counts: how many rank counts were left out, over all of them.
    """

    relative_sd: Relative
    counts: PositiveCount


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One form that was tried for a (library, operation, level).

    Attributes:
        form: the algorithm of the pieces (``ring``; ``each piece its own``), how many pieces over sizes, and whether
            the first grows with the logarithm of bytes or the reduction stands apart.
        held_out_relative_error: mean over sizes left out in turn; None where too few sizes were left.
        held_out_ranks_relative_error: likewise over rank counts; None where one was measured.
    """

    form: str
    held_out_relative_error: Relative | None
    held_out_ranks_relative_error: Relative | None


class CommunicationChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was considered for a (library, operation, level): the best few, what was chosen first."""

    library: str
    operation: str
    level: str
    considered: Count
    candidates: tuple[Candidate, ...]


class CommunicationFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """alpha and beta of one operation through one library at one level, by regression on an algorithm's cost terms.

    Several fits of one (library, operation, level) are regimes, pieces over ranges of sizes that do not overlap;
    :func:`calibrate.profile.collectives.communication_time.communication_seconds` reads them.

    Attributes:
        regime: ``all``, or in words the range of bytes that this fit is for (``<=262144``).
        gamma_s_per_byte: 0 where it can't be told from beta, which then holds it.
        doubling_s: above 0 where this regime grows with the logarithm of bytes (OSF eq. 18): seconds a step for each
            doubling beyond ``bytes_range[0]``; beta is 0 then.
        inner: of a hierarchical algorithm, alpha and beta inside a node; ``alpha_s`` and ``beta_s_per_byte`` are then
            those between nodes.
        covariance: of (alpha_s, beta_s_per_byte or doubling_s): what the samples leave open, and what the line misses.
        bytes_range, ranks_range: what was fitted on; beyond is extrapolation.
        step_bytes_range: where regimes are ranges of the bytes that one step of the algorithm sends: of them, this one;
            None where they are ranges of the whole message, ``bytes_range``.
        residual_relative_median: median |fit - measured| / measured over the fitted points.
        held_out_relative_error: the same over points whose size the fit had not seen, each size left out in turn.
        held_out_ranks_relative_error: the same, each rank count left out in turn; None where one count was measured.
        block_relative_sd: standard deviation between blocks of what all sizes share, relative to their medians;
            blocks: how many, 0 where it is not known.
        points: number of (size, ranks) points. measured: each of them.
        by_ranks: this rank count was fitted by itself, since no algorithm's scaling does as well; the
            algorithm says how time goes on beyond them, which is a guess.
        comparable_scaling: how far scaling over rank counts was off in the profile's other sweeps.
        outliers: repetitions far from the rest.
        published: whose sweep it is, of a profile that comes with the tool; unset for one's own.
    """

    library: str
    operation: str
    algorithm: str
    level: str
    regime: str
    alpha_s: Seconds
    beta_s_per_byte: SecondsPerByte
    gamma_s_per_byte: SecondsPerByte
    covariance: tuple[tuple[Covariance, Covariance], tuple[Covariance, Covariance]]
    bytes_range: tuple[Bytes, Bytes]
    ranks_range: tuple[Ranks, Ranks]
    residual_relative_median: Relative
    held_out_relative_error: Relative
    block_relative_sd: Relative
    points: Count
    held_out_ranks_relative_error: Relative | None = None
    doubling_s: Seconds = 0.0
    inner: InnerLevel | None = None
    by_ranks: bool = False
    comparable_scaling: ComparableScaling | None = None
    outliers: tuple[Outliers, ...] = ()
    measured: tuple[CommunicationPoint, ...] = ()
    blocks: Count = 0
    step_bytes_range: tuple[PositiveEstimatedBytes, PositiveEstimatedBytes] | None = None
    published: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is of: (library, operation, level)."""
        return self.library, self.operation, self.level

    @property
    def regime_range(self) -> tuple[float, float]:
        """Bytes of the smallest and the largest message of this regime: of a step's, or of the whole."""
        low, high = self.step_bytes_range or self.bytes_range
        return float(low), float(high)

    def __post_init__(self) -> None:
        check_rises(self, "bytes_range", "ranks_range", "step_bytes_range")
        check_covariance(self, "covariance")
        if not any((self.alpha_s, self.beta_s_per_byte, self.gamma_s_per_byte, self.doubling_s, self.inner)):
            raise ValueError("alpha_s and beta_s_per_byte are both 0: a collective takes time")
