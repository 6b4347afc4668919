"""The profile of emulated runs, made of the profile whose seconds their layers sleep (docs/emulation.md).

A sleep takes what it was asked to: it spreads neither from iteration to iteration nor from rank to rank, unless it was
drawn as the profile spreads. What a collective and sleeps side by side cost each other is what was measured of ghosts.
What copies gradients does so for real, on the host that emulates, and stays as in the profile.
"""

from __future__ import annotations

import msgspec

from calibrate.profile.profile import Device, ModelTime, Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import LARGEST_FACTOR
from paradl_bench.records.measurement import UNKNOWN_DEVICE

_LEVEL = (1.0, 1.0)
"""Quantiles of iterations none of which is longer than another."""


def emulated(profile: Profile, dilate: float, *, drawn: bool = False) -> Profile:
    """The profile that runs are predicted from whose layers sleep for the seconds of this one.

    Args:
        dilate: how many times as long they sleep.
        drawn: whether each sleep was drawn as the profile's samples spread.

    Raises:
        UserError: a dilation that is not positive and finite.
    """
    if not 0 < dilate <= LARGEST_FACTOR:
        raise UserError(
            f"--dilate {dilate:g} has to be a positive number up to {LARGEST_FACTOR:g}: 20 sleeps twenty times as long"
        )
    unknown = Device(name=UNKNOWN_DEVICE, kind="cpu", memory_bytes=0, devices_per_host=1)
    changes: dict[str, object] = {
        # What real runs showed is nothing that emulated ones do.
        "compared_runs": msgspec.UNSET,
        # Ghosts sleep on the host.
        "devices": tuple(
            msgspec.structs.replace(device, kind="cpu", time_factor=dilate) for device in profile.devices or (unknown,)
        ),
        "contexts": tuple(
            msgspec.structs.replace(entry, neighbours=()) if entry.context == "with-compute" else entry
            for entry in profile.contexts
            if entry.context != "with-compute" or not entry.of_compute
        ),
    }
    if not drawn:
        for name in ("model_times", "shard_times"):
            times: tuple[ModelTime, ...] = getattr(profile, name)
            changes[name] = tuple(msgspec.structs.replace(time, iteration_relative_quantiles=_LEVEL) for time in times)
    return msgspec.structs.replace(profile, **changes)
