"""Whose times a profile is made of: layers of one device with collectives of another are of no machine at all."""

from __future__ import annotations

from collections.abc import Iterator

from calibrate.profile.profile import Profile
from paradl_bench.records.measurement import UNKNOWN_DEVICE, Environment

_COMPUTE = frozenset({"layers", "kernels"})
_COMMUNICATION = frozenset({"collectives"})


def unlike_parts(profile: Profile) -> tuple[str, ...]:
    """What was measured on unlike devices or hosts, in words; nothing where all parts are of like ones."""
    compute, communication = _places(profile, _COMPUTE), _places(profile, _COMMUNICATION)
    notes = []
    for what, places in (("layers", compute), ("collectives", communication)):
        if _differ(places, places):
            notes.append(f"{what} were measured on different machines: {_named(places)}")
    if _differ(compute, communication):
        notes.append(
            f"layers were measured on {_named(compute)}, collectives on {_named(communication)}: no machine is"
            " known to have both"
        )
    return tuple(notes)


def _places(profile: Profile, kinds: frozenset[str]) -> tuple[Environment, ...]:
    """Environments of the measurements of some kinds."""
    used = {source.environment for source in profile.sources if source.kind in kinds}
    return tuple(profile.environments[index] for index in sorted(used))


def _differ(ones: tuple[Environment, ...], others: tuple[Environment, ...]) -> bool:
    return any(_unlike(one, other) for one in ones for other in others)


def _unlike(one: Environment, other: Environment) -> bool:
    """Whether two name another device or host; what one does not say makes no difference."""
    devices = {one.device_name, other.device_name} - {UNKNOWN_DEVICE, ""}
    hosts = {one.hostname, other.hostname} - {""}
    return len(devices) > 1 or len(hosts) > 1 or one.device != other.device


def _named(places: tuple[Environment, ...]) -> str:
    return " and ".join(dict.fromkeys(_words(places)))


def _words(places: tuple[Environment, ...]) -> Iterator[str]:
    for place in places:
        name = f"an unknown device ({place.device})" if place.device_name == UNKNOWN_DEVICE else place.device_name
        yield f"{name} on {place.hostname}" if place.hostname else name
