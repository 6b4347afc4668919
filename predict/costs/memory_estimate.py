"""Plans, each made once, and their peak memory: of tensors, and by a profile's factors of what lies beyond them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from calibrate.profile.memory_factors import MemoryEstimate, MemoryMeasure, MemoryReuse
from calibrate.profile.profile import Profile
from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Plan
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.memory.peak import MemoryUse
from paradl_bench.strategies.nesting.catalog import planner_for

BATCHES_AHEAD = "batches_ahead"
"""The part of mini-batches that were copied to the device before the iteration that computes them."""
BEYOND_TENSORS = "beyond_tensors"
"""The part that the factor adds to a plan's tensors; below 0 where a tracked peak is smaller than the planned one."""


_KEPT = 256
"""Plans that are remembered: those of a few searches."""
_KEPT_TASKS = 2_000_000
"""Tasks of all of these, some 170 bytes each: of plans with as many by themselves the last one."""
_MOST_FOUND = 16
"""Other things that are remembered: those of as many searches."""


@dataclass(slots=True)
class Plans:
    """Plans of one network and the memory of their tensors, which no other hardware changes: each is found once."""

    network: ModelGraph
    dtype: str
    device_kind: str
    _made: dict[tuple[Strategy, PlanSettings], Plan] = field(init=False, default_factory=dict)
    _memory: dict[tuple[Strategy, PlanSettings, float], MemoryUse] = field(init=False, default_factory=dict)
    found: Answers = field(init=False, default_factory=lambda: Answers(_MOST_FOUND))
    """What else no hardware changes."""

    def plan(self, strategy: Strategy, settings: PlanSettings) -> Plan:
        """What ranks do in an iteration; of many plans those that were asked for last are kept.

        Raises:
            UserError: the strategy, the network or the batch does not allow it.
        """
        key = strategy, settings
        known = self._made.pop(key, None)
        # Plans of millions of tasks make room for the next one before it is made.
        while known is None and self._made and self._tasks > _KEPT_TASKS:
            del self._made[next(iter(self._made))]
        made = planner_for(strategy).plan(self.network, strategy, settings) if known is None else known
        self._made[key] = made
        while known is None and len(self._made) > 1 and (len(self._made) > _KEPT or self._tasks > _KEPT_TASKS):
            self._made.pop(next(iter(self._made)), None)
        return made

    @property
    def _tasks(self) -> int:
        return sum(role.arrays.laid_out for plan in self._made.values() for role in plan.roles)

    def memory(self, strategy: Strategy, settings: PlanSettings, within: float = math.inf) -> MemoryUse:
        """Of the rank that needs most, at its peak, or of one that needs more than ``within``.

        Raises as :meth:`plan`.
        """
        # A search asks whether a candidate fits, and predicts it later, with several sizes of buckets, which are of as
        # many bytes together, and with its axes in other orders: the walk takes as long as the rest of that.
        in_any_order = Strategy(axes=tuple(sorted(strategy.axes, key=lambda axis: axis.kind)))
        key = in_any_order, settings.changed(ExchangeOptions, first_bucket_bytes=0, bucket_cap_bytes=0)
        for limit in (math.inf, within):
            if (*key, limit) in self._memory:
                return self._memory[*key, limit]
        use = memory_of_plan(self.network, strategy, settings, dtype=self.dtype, device=self.device_kind, within=within)
        # A walk that has gone beyond its limit has not seen all.
        self._memory[*key, within if use.peak_bytes > within else math.inf] = use
        return use


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


def tensors_within(profile: Profile, limit_bytes: float) -> float:
    """As many bytes of tensors as a device with that memory holds, by the profile's factor; 0 where none fit."""
    low, high = 0.0, 2.0 * limit_bytes + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        fits = with_factor(profile, MemoryUse(round(middle), {})).peak_bytes <= limit_bytes
        low, high = (middle, high) if fits else (low, middle)
    return high


def with_reuse(profile: Profile, model: str, use: MemoryUse) -> EstimatedMemory:
    """The paper's sum (with rho of 1) times the model's rho, else that over all models."""
    device = _device(profile)
    of_model: dict[str, MemoryReuse] = {
        measured.model: measured for measured in profile.memory_reuse if measured.device == device
    }
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
