"""What moved between two profiles by more than their spreads explain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from calibrate.communication_time import communication_seconds, spread_s
from calibrate.profile import CommunicationFit, Profile
from calibrate.together_show import together_quantities
from paradl_bench.collectives.catalog import operations
from paradl_bench.spec.network import Network
from paradl_bench.spec.registry import lookup
from paradl_bench.spec.statistics import IQR_TO_SD, Z90
from paradl_bench.spec.units import format_bytes


class Movement(msgspec.Struct, frozen=True, kw_only=True):
    """One number of both profiles.

    Attributes:
        unit: ``s``, or ``times`` for slow-downs.
        relative: (second - first) / first.
        interval_relative: half-width of the 90% interval of the difference, relative: both profiles' spreads between
            blocks in quadrature (of times; of what ran beside, for slow-downs).
    """

    what: str
    first: float
    second: float
    unit: str
    relative: float
    interval_relative: float

    @property
    def moved(self) -> bool:
        """Whether the difference exceeds its interval."""
        return abs(self.relative) > self.interval_relative


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two profiles held against each other; ``moved`` has the worst first."""

    compared: int
    moved: tuple[Movement, ...]
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    environment: tuple[str, ...]


class Quantity(NamedTuple):
    """A number of a profile with its relative standard deviation."""

    value: float
    relative_sd: float
    unit: str = "s"


def compare(first: Profile, second: Profile) -> Difference:
    """Compare every time, fit and slow-down that both profiles hold.

    Collectives are compared at the sizes and rank counts measured in either, copies at the networks that both profiles
    hold.
    """
    one, other = _positive(first, second), _positive(second, first)
    both = [_movement(name, one[name], other[name]) for name in one if name in other]
    moved = sorted((m for m in both if m.moved), key=_intervals, reverse=True)
    return Difference(
        compared=len(both),
        moved=tuple(moved),
        only_in_first=tuple(name for name in one if name not in other),
        only_in_second=tuple(name for name in other if name not in one),
        environment=tuple(first.environments[0].differences(second.environments[0]))
        if first.environments and second.environments
        else (),
    )


def _positive(profile: Profile, other: Profile) -> dict[str, Quantity]:
    """Quantities by name; those of 0 have no relative change."""
    return {name: quantity for name, quantity in quantities(profile, other) if quantity.value > 0}


def _movement(name: str, one: Quantity, other: Quantity) -> Movement:
    return Movement(
        what=name,
        first=one.value,
        second=other.value,
        unit=one.unit,
        relative=other.value / one.value - 1,
        interval_relative=Z90 * math.hypot(one.relative_sd, other.relative_sd),
    )


def _intervals(movement: Movement) -> float:
    """How many intervals it moved by."""
    return abs(movement.relative) / movement.interval_relative if movement.interval_relative else math.inf


def quantities(profile: Profile, other: Profile) -> Iterator[tuple[str, Quantity]]:
    """Every number of a profile that can be compared, by a name that says what it is.

    Args:
        other: whose measured points and networks are used beside the profile's own.
    """
    for time in profile.layer_times:
        shard = f" {time.shard}" if time.shard else ""
        where = f"batch {time.batch} {time.dtype} on {time.ranks_on_host}{shard}"
        seconds = Quantity(time.time.typical_s, time.block_relative_sd)
        yield f"{time.phase} {time.mode} {where}: {time.operation}", seconds
    for whole in (*profile.model_times, *profile.shard_times):
        shard = f" {whole.shard}" if whole.shard else ""
        where = f"{whole.model} batch {whole.batch} {whole.dtype} {whole.optimizer} on {whole.ranks_on_host}{shard}"
        parts = {"iteration": whole.iteration, "WU": whole.wu, "FW between": whole.fw_between}
        for label, summary in (parts | {"BW between": whole.bw_between}).items():
            yield f"{label} of {where}", Quantity(summary.typical_s, whole.common_relative_sd)
    yield from _copies(profile, other)
    yield from _communication(profile, other)
    for entry in profile.interference:
        low, high = entry.message_bytes
        where = f"{entry.library} {entry.operation}, level {entry.level}, {entry.ranks} ranks, {low} to {high} bytes"
        for label, value, iqr in (
            ("compute", entry.compute_slowdown, entry.compute_slowdown_iqr),
            ("communication", entry.communication_slowdown, entry.communication_slowdown_iqr),
        ):
            yield f"slow-down of {label} beside {where}", Quantity(value, IQR_TO_SD * iqr / value, "times")
    for what, value, relative_sd, unit in together_quantities(profile):
        yield what, Quantity(value, relative_sd, unit)


def _copies(profile: Profile, other: Profile) -> Iterator[tuple[str, Quantity]]:
    shared: list[Network] = [profile.network[name] for name in sorted(profile.network.keys() & other.network.keys())]
    for copy in profile.copies:
        for network in shared:
            seconds = copy.alpha_s * len(network.parameters) + copy.beta_s_per_byte * network.parameter_bytes
            name = f"copies {copy.direction} buckets of {network.name} on {copy.ranks_on_host}"
            yield name, Quantity(seconds, copy.relative_sd)


def _communication(profile: Profile, other: Profile) -> Iterator[tuple[str, Quantity]]:
    points: dict[tuple[str, str, str], set[tuple[int, int]]] = {}
    fits: dict[tuple[str, str, str], list[CommunicationFit]] = {}
    for source in (profile, other):
        for fit in source.communication:
            key = fit.library, fit.operation, fit.level
            points.setdefault(key, set()).update((point.ranks, point.message_bytes) for point in fit.measured)
            if source is profile:
                fits.setdefault(key, []).append(fit)
    for key, own in fits.items():
        operation = lookup(operations(), key[1], "collective")
        for ranks, size in sorted(points[key]):
            seconds = float(communication_seconds(operation, own, ranks, size))
            spread = spread_s(operation, own, ranks, size) / seconds if seconds else 0.0
            library, name, level = key
            where = f"{library} {name}, level {level}, {ranks} ranks, {format_bytes(size)}"
            yield where, Quantity(seconds, spread)
