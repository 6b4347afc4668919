"""What a device's memory holds beyond the tensors of a plan, and the paper's reuse factor: fitted to measured peaks.

Both are read where predictions are made: the walk over tensors (:mod:`paradl_bench.strategies.memory.peak`) times a
factor, plus bytes that are there whatever is trained; the paper's sum times rho, in (0, 1] (ParaDL, section 4).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from paradl_bench.core.bounds import (
    Covariance,
    EstimatedBytes,
    Index,
    PositiveBytes,
    PositiveCount,
    PositiveShare,
    Ratio,
    Relative,
)
from paradl_bench.core.checks import check_covariance, check_rises

MemoryMeasure = Literal["tensors", "allocator", "device"]
"""Whose peak: tensors that torch's tracker saw; the CUDA allocator's; all that was taken of the device."""


class MemoryRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training run of which nothing but its memory's peak was used.

    Attributes:
        sha256: over its manifest and ``run.json``. configuration: hash of what a repetition shares with it.
        environment: index into the profile's ``environments``.
        tensor_bytes: peak of the rank that needs most, as its plan holds it. paradl_bytes: by the paper's sum with rho
            of 1; None where the paper has no row for the strategy.
        measured_bytes: the largest over ranks, by what was measured.
    """

    path: str
    command_line: tuple[str, ...]
    created_utc: str
    sha256: str
    configuration: str
    environment: Index
    device: str
    model: str
    strategy: str
    batch: PositiveCount
    dtype: str
    optimizer: str
    tensor_bytes: PositiveBytes
    paradl_bytes: PositiveBytes | None
    measured_bytes: dict[MemoryMeasure, PositiveBytes]

    def __post_init__(self) -> None:
        if not self.measured_bytes:
            raise ValueError("measured_bytes is empty: a memory factor needs measured peaks")


class MemoryEstimate(NamedTuple):
    """Bytes, and half of their 90% interval."""

    peak_bytes: float
    half_width_bytes: float


class MemoryFactor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak of a device = fixed_bytes + factor times what the plan's tensors take.

    Attributes:
        fixed_bytes: context, communication library, workspaces; 0 where sizes are too few to tell it from the factor.
        covariance: of (fixed_bytes, factor), by bootstrap over models.
        relative_sd: of a run from the line. deviations_90: how many standard deviations a 90% interval takes on each
            side (Student's t: with few models a deviation is not well known).
        runs: configurations, repetitions counted once. tensor_bytes_range: what was fitted on.
    """

    device: str
    measured: MemoryMeasure
    fixed_bytes: EstimatedBytes
    factor: Relative
    covariance: tuple[tuple[Covariance, Covariance], tuple[Covariance, Covariance]]
    relative_sd: Relative
    deviations_90: Ratio
    runs: PositiveCount
    models: tuple[str, ...]
    tensor_bytes_range: tuple[PositiveBytes, PositiveBytes]

    def __post_init__(self) -> None:
        check_rises(self, "tensor_bytes_range")
        check_covariance(self, "covariance")

    def estimate(self, tensor_bytes: float) -> MemoryEstimate:
        """The peak of a rank whose plan's tensors take so many bytes."""
        peak = self.fixed_bytes + self.factor * tensor_bytes
        (fixed, both), (_, factor) = self.covariance
        variance = fixed + 2 * both * tensor_bytes + factor * tensor_bytes**2 + (self.relative_sd * peak) ** 2
        return MemoryEstimate(peak, self.deviations_90 * math.sqrt(max(variance, 0.0)))


class MemoryReuse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paper's reuse factor of one model, or over all.

    Attributes:
        model: empty for the one that a model without runs takes, fitted with each model counting once.
        relative_sd: of a run's peak from rho times the sum; over all, of that of a model that was not seen.
        deviations_90: as for :class:`MemoryFactor`.
        runs: configurations, repetitions counted once.
    """

    device: str
    measured: MemoryMeasure
    model: str
    rho: PositiveShare
    relative_sd: Relative
    deviations_90: Ratio
    runs: PositiveCount

    def estimate(self, paradl_bytes: float) -> MemoryEstimate:
        """The peak of a rank for which the paper's sum, with rho of 1, is so many bytes."""
        peak = self.rho * paradl_bytes
        return MemoryEstimate(peak, self.deviations_90 * self.relative_sd * peak)
