"""A profile of published measurements merged with one's own: own numbers take the place of published ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from calibrate.profile.entries import identity
from calibrate.profile.profile import Device, Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import counted
from paradl_bench.records.measurement import UNKNOWN_DEVICE

_REPLACED = {"kernel_models": "published regressor", "communication": "published fit"}


def own_before_published(
    profiles: Sequence[Profile], names: Sequence[str]
) -> tuple[list[Profile], list[str], list[str]]:
    """Profiles and their names, own ones first, the published one without what own ones hold; and notes of that.

    Raises:
        UserError: two are of published measurements, or one's own is of another device.
    """
    pairs = list(zip(profiles, names, strict=True))
    published = [pair for pair in pairs if pair[0].published]
    measured = [pair for pair in pairs if not pair[0].published]
    if not published:
        return list(profiles), list(names), []
    if len(published) > 1:
        both = " and ".join(name for _, name in published)
        raise UserError(f"{both} both hold published measurements; merge only one of them with your own measurements")
    (shipped, name) = published[0]
    for profile, of in measured:
        _check_device(shipped, name, profile, of)
    kept, notes = _without_replaced(shipped, name, [profile for profile, _ in measured])
    return [*(profile for profile, _ in measured), kept], [*(of for _, of in measured), name], notes


def with_sheet(measured: Device, sheet: Device) -> Device:
    """A measured device with the rates of its data sheet, if it lacks the peak or the bandwidth of a roofline.

    Tables of products alone reach a peak and no bandwidth; logs of other tools never say a memory.
    """
    memory = measured.memory_bytes or sheet.memory_bytes
    if measured.rates or (measured.peak_flops and measured.memory_bandwidth_bytes_per_s):
        return msgspec.structs.replace(measured, memory_bytes=memory)
    return msgspec.structs.replace(
        measured,
        memory_bytes=memory,
        peak_flops=sheet.peak_flops,
        memory_bandwidth_bytes_per_s=sheet.memory_bandwidth_bytes_per_s,
        rates=sheet.rates,
        rates_from=sheet.rates_from,
    )


def _check_device(shipped: Profile, name: str, measured: Profile, of: str) -> None:
    wanted = {device.name for device in shipped.devices}
    others = {device.name for device in measured.devices} - wanted - {UNKNOWN_DEVICE}
    if others:
        raise UserError(
            f"{name} is of {' and '.join(sorted(wanted))}, and {of} was measured on"
            f" {' and '.join(sorted(others))}: a profile of published measurements can be merged only with"
            " measurements of the same device"
        )


def _without_replaced(shipped: Profile, name: str, measured: Sequence[Profile]) -> tuple[Profile, list[str]]:
    notes, changes = [], {}
    for field, what in _REPLACED.items():
        held = {identity(field, entry) for profile in measured for entry in getattr(profile, field)}
        entries = getattr(shipped, field)
        kept = tuple(entry for entry in entries if identity(field, entry) not in held)
        changes[field] = kept
        if len(kept) < len(entries):
            notes.append(f"{name}: {counted(len(entries) - len(kept), what)} replaced by your own measurements")
    return msgspec.structs.replace(shipped, **changes), notes
