"""What a device's memory holds beyond the tensors of a plan, and the paper's reuse factor: fitted to measured peaks.

Both are read where predictions are made: the walk over tensors (:mod:`paradl_bench.memory.peak`) times a factor, plus
bytes that are there whatever is trained; the paper's sum times rho (MODELS.md, "ParaDL": (0, 1]).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from paradl_bench.spec.checks import check_finite, check_not_negative

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
    environment: int
    device: str
    model: str
    strategy: str
    batch: int
    dtype: str
    optimizer: str
    tensor_bytes: int
    paradl_bytes: int | None
    measured_bytes: dict[MemoryMeasure, int]

    def __post_init__(self) -> None:
        sizes = (self.tensor_bytes, self.paradl_bytes or 1, *self.measured_bytes.values())
        if not self.measured_bytes or min(sizes) <= 0:
            raise ValueError("tensor_bytes, paradl_bytes and measured_bytes have to be above 0")


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
    fixed_bytes: float
    factor: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    relative_sd: float
    deviations_90: float
    runs: int
    models: tuple[str, ...]
    tensor_bytes_range: tuple[int, int]

    def __post_init__(self) -> None:
        check_not_negative(self, "fixed_bytes", "factor", "relative_sd", "deviations_90")
        check_finite(self, "covariance")

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
    rho: float
    relative_sd: float
    deviations_90: float
    runs: int

    def __post_init__(self) -> None:
        check_not_negative(self, "relative_sd", "deviations_90")
        if not 0 < self.rho <= 1:
            raise ValueError(f"rho has to be in (0, 1], not {self.rho}")

    def estimate(self, paradl_bytes: float) -> MemoryEstimate:
        """The peak of a rank for which the paper's sum, with rho of 1, is so many bytes."""
        peak = self.rho * paradl_bytes
        return MemoryEstimate(peak, self.deviations_90 * self.relative_sd * peak)
