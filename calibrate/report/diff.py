"""What moved between two profiles by more than their spreads explain, and what differs between their environments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from calibrate.profile.profile import Profile
from calibrate.report.quantities import Quantity, quantities
from paradl_bench.core.statistics import grouped
from paradl_bench.records.emulation import kind_of_emulation
from paradl_bench.records.measurement import Environment

LEVEL = 0.9
FALSE_DISCOVERIES = 0.1
Order = Literal["sd", "relative"]


class Movement(msgspec.Struct, frozen=True, kw_only=True):
    """One number of both profiles.

    Attributes:
        group: the profile's field that it is of.
        unit: ``s``, ``times`` for slow-downs, ...; empty where there is none.
        relative: (second - first) / first.
        interval_relative: half-width of that difference's 90% interval by the spreads of both sides (Welch's); None
            where one side has no spread.
        deviations: difference in its own standard deviations.
        probability: of a difference at least as large by chance. stands_out: whether it does among all that were
            compared, so that of those which do a tenth is chance (Benjamini and Hochberg 1995).
    """

    group: str
    what: str
    first: float
    second: float
    unit: str
    relative: float
    interval_relative: float | None
    deviations: float | None
    probability: float | None
    stands_out: bool = False

    @property
    def moved(self) -> bool:
        """Whether the difference exceeds its interval."""
        return self.interval_relative is not None and abs(self.relative) > self.interval_relative


class GroupDifference(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of one field. expected_by_chance: how many would exceed a 90% interval if nothing had moved."""

    group: str
    compared: int
    moved: int
    stand_out: int
    expected_by_chance: float
    median_relative: float


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What differs of where, when and with what both were measured; several values where a profile holds several."""

    what: str
    first: tuple[str, ...]
    second: tuple[str, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two profiles held against each other; ``moved`` has the worst first.

    Attributes:
        expected_by_chance: how many of those compared would exceed their interval if nothing had moved.
        stand_out: how many do so among so many.
        without_spread: numbers that changed, of which a profile does not know how far repetitions lie.
        measurements: directories behind each profile.
    """

    changes: tuple[Change, ...]
    compared: int
    expected_by_chance: float
    stand_out: int
    groups: tuple[GroupDifference, ...]
    moved: tuple[Movement, ...]
    without_spread: tuple[Movement, ...]
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    measurements: tuple[int, int]


def compare(first: Profile, second: Profile, *, order: Order = "sd") -> Difference:
    """Compare every number that both profiles hold, worst first by standard deviations or by how far it moved."""
    one, other = _positive(first, second), _positive(second, first)
    both = [_movement(*name, one[name], other[name]) for name in one if name in other]
    judged = _mark([m for m in both if m.deviations is not None])
    moved = sorted((m for m in judged if m.moved), key=_KEYS[order], reverse=True)
    unknown = [m for m in both if m.deviations is None and m.relative]
    return Difference(
        changes=tuple(environment_changes(first, second)),
        compared=len(judged),
        expected_by_chance=(1 - LEVEL) * len(judged),
        stand_out=sum(m.stands_out for m in judged),
        groups=tuple(_groups(judged)),
        moved=tuple(moved),
        without_spread=tuple(sorted(unknown, key=lambda m: abs(m.relative), reverse=True)),
        only_in_first=tuple(what for group, what in one if (group, what) not in other),
        only_in_second=tuple(what for group, what in other if (group, what) not in one),
        measurements=(len(first.sources), len(second.sources)),
    )


_KEYS = {
    "sd": lambda movement: (movement.deviations, abs(movement.relative)),
    "relative": lambda movement: abs(movement.relative),
}


def _positive(profile: Profile, other: Profile) -> dict[tuple[str, str], Quantity]:
    """Quantities by group and name; those of 0 have no relative change."""
    return {(group, name): quantity for group, name, quantity in quantities(profile, other) if quantity.value > 0}


def _movement(group: str, what: str, one: Quantity, other: Quantity) -> Movement:
    from scipy.stats import t

    relative = other.value / one.value - 1
    errors = one.relative_error, other.relative_error
    interval = deviations = probability = None
    if errors[0] is not None and errors[1] is not None:
        # Both errors relative to the first value, as the difference is.
        parts = [errors[0], errors[1] * other.value / one.value]
        sd, freedom = math.hypot(*parts), _welch(parts, (one.freedom, other.freedom))
        interval = float(t.ppf((1 + LEVEL) / 2, freedom)) * sd
        deviations = abs(relative) / sd if sd else (math.inf if relative else 0.0)
        probability = 2 * float(t.sf(deviations, freedom))
    return Movement(
        group=group,
        what=what,
        first=one.value,
        second=other.value,
        unit=one.unit,
        relative=relative,
        interval_relative=interval,
        deviations=deviations,
        probability=probability,
    )


def _welch(errors: Sequence[float], freedoms: Sequence[float]) -> float:
    """Degrees of freedom of a difference (Welch and Satterthwaite)."""
    total = sum(error**2 for error in errors)
    parts = sum(error**4 / freedom for error, freedom in zip(errors, freedoms, strict=True))
    return total**2 / parts if parts else math.inf


def _mark(movements: Sequence[Movement]) -> list[Movement]:
    """Those that stand out among all, by their probabilities in order."""
    ordered = sorted(m.probability for m in movements if m.probability is not None)
    count = len(ordered)
    passing = [p for rank, p in enumerate(ordered, start=1) if p <= FALSE_DISCOVERIES * rank / count]
    limit = max(passing, default=-1.0)
    return [
        msgspec.structs.replace(m, stands_out=m.moved and m.probability is not None and m.probability <= limit)
        for m in movements
    ]


def _groups(movements: Sequence[Movement]) -> Iterable[GroupDifference]:
    for group, of_group in grouped(movements, lambda movement: movement.group).items():
        yield GroupDifference(
            group=group,
            compared=len(of_group),
            moved=sum(m.moved for m in of_group),
            stand_out=sum(m.stands_out for m in of_group),
            expected_by_chance=(1 - LEVEL) * len(of_group),
            median_relative=float(np.median([m.relative for m in of_group])),
        )


def environment_changes(first: Profile, second: Profile) -> Iterable[Change]:
    """What differs between where, when and with what two profiles were measured."""
    one, other = _facts(first), _facts(second)
    for what in dict.fromkeys((*one, *other)):
        before, after = one.get(what, ()), other.get(what, ())
        if before != after:
            yield Change(what=what, first=before, second=after)


def _facts(profile: Profile) -> dict[str, tuple[str, ...]]:
    """Values of every fact of the environments, sorted; several where environments were merged by force."""
    days = {source.created_utc[:10] for source in profile.sources} or {profile.created_utc[:10]}
    facts: dict[str, set[str]] = {"measured on": days}
    for environment in profile.environments:
        for what, value in _facts_of(environment).items():
            facts.setdefault(what, set()).add(value)
    return {what: tuple(sorted(values)) for what, values in facts.items()}


def _facts_of(environment: Environment) -> dict[str, str]:
    labels = ("device", "device_name", "device_count", "memory_bytes", "hostname", "kernel", "commit")
    values = {label: getattr(environment, label) for label in labels}
    facts = {label.replace("_", " "): str(value) for label, value in values.items() if value is not None}
    named = {"version of": environment.versions, "setting": environment.settings, "variable": environment.variables}
    for kind, given in named.items():
        facts |= {f"{kind} {name}": value for name, value in sorted(given.items())}
    if environment.emulated:
        facts["emulated"] = kind_of_emulation(environment.emulated)
    return facts
