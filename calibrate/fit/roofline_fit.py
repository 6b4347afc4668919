"""Which rates a device's roofline stands on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from calibrate.fit.layer_fit import Reached
from calibrate.profile.profile import Device
from calibrate.profile.roofline_rates import RatesFrom, rate_of


def rated(device: Device, reached: Reached | None) -> Device:
    """The device with peak and bandwidth measured by doctor, else as layers reached them; which of them is said.

    Args:
        reached: by measured layers; None where they may have run on another device.
    """
    reached = reached or Reached(None, None)
    peak, bandwidth = (rate_of(device.rates, resource, "fp32", 1) for resource in ("compute", "memory"))
    measured = peak is not None and bandwidth is not None
    source: RatesFrom = "measured by doctor" if measured else "reached by layers" if any(reached) else ""
    return msgspec.structs.replace(
        device,
        peak_flops=peak if measured else reached.peak_flops,
        memory_bandwidth_bytes_per_s=bandwidth if measured else reached.memory_bandwidth_bytes_per_s,
        rates_from=source,
        layers_reached=tuple(reached),
    )


def merged_devices(parts: Sequence[Sequence[Device]]) -> tuple[Device, ...]:
    """Devices of several profiles, each once: the first that doctor measured, else the first."""
    found: dict[str, Device] = {}
    for device in (device for part in parts for device in part):
        known = found.setdefault(device.name, device)
        if device.rates and not known.rates:
            found[device.name] = device
    return tuple(found.values())
