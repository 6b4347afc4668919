"""Peak memory as a profile's factors have it: what plans say of tensors, with what a device holds beyond them."""

from __future__ import annotations

from typing import NamedTuple

from calibrate.profile.memory_factors import MemoryEstimate, MemoryMeasure, MemoryReuse
from calibrate.profile.profile import Profile
from paradl_bench.strategies.memory.peak import MemoryUse

BATCHES_AHEAD = "batches_ahead"
"""The part of mini-batches that were copied to the device before the iteration that computes them."""
BEYOND_TENSORS = "beyond_tensors"
"""The part that the factor adds to a plan's tensors; below 0 where a tracked peak is smaller than the planned one."""


class EstimatedMemory(NamedTuple):
    """Bytes of the rank that needs most, at its peak.

    Attributes:
        interval_bytes: 90%; None where the profile has no factor for the device.
        measured: whose peak this is: the tensors' own, unless a factor was fitted to more.
    """

    peak_bytes: int
    parts_bytes: dict[str, int]
    interval_bytes: tuple[int, int] | None = None
    measured: MemoryMeasure = "tensors"

    def beside_batches(self, ahead_bytes: int) -> EstimatedMemory:
        """With so many bytes of mini-batches that wait for their turn, which lie beside whatever an iteration holds."""
        if not ahead_bytes:
            return self
        bounds = self.interval_bytes
        return self._replace(
            peak_bytes=self.peak_bytes + ahead_bytes,
            parts_bytes={**self.parts_bytes, BATCHES_AHEAD: ahead_bytes},
            interval_bytes=None if bounds is None else (bounds[0] + ahead_bytes, bounds[1] + ahead_bytes),
        )


def with_factor(profile: Profile, use: MemoryUse) -> EstimatedMemory:
    """A plan's tensors, and what the profile's device was measured to hold beyond them."""
    device = _device(profile)
    factor = next((factor for factor in profile.memory_factors if factor.device == device), None)
    if factor is None:
        return EstimatedMemory(use.peak_bytes, use.parts_bytes)
    estimate = factor.estimate(use.peak_bytes)
    peak = round(estimate.peak_bytes)
    parts = {**use.parts_bytes, BEYOND_TENSORS: peak - use.peak_bytes}
    return EstimatedMemory(peak, parts, _interval(estimate), factor.measured)


def with_reuse(profile: Profile, model: str, use: MemoryUse) -> EstimatedMemory:
    """The paper's sum (with rho of 1) times the model's rho, else that over all models."""
    device = _device(profile)
    of_model: dict[str, MemoryReuse] = {each.model: each for each in profile.memory_reuse if each.device == device}
    reuse = of_model.get(model) or of_model.get("")
    if reuse is None:
        return EstimatedMemory(use.peak_bytes, use.parts_bytes)
    parts = {name: round(reuse.rho * size) for name, size in use.parts_bytes.items()}
    return EstimatedMemory(sum(parts.values()), parts, _interval(reuse.estimate(use.peak_bytes)), reuse.measured)


def _device(profile: Profile) -> str | None:
    return profile.devices[0].name if profile.devices else None


def _interval(estimate: MemoryEstimate) -> tuple[int, int]:
    low = max(estimate.peak_bytes - estimate.half_width_bytes, 0.0)
    return round(low), round(estimate.peak_bytes + estimate.half_width_bytes)
