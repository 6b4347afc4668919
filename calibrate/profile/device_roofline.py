"""The roofline of a profile's device: what doctor measured, else what layers reached or a cluster file states."""

from __future__ import annotations

from collections.abc import Sequence

from calibrate.profile.profile import Device
from calibrate.profile.roofline_rates import DATA_SHEET, rate_of


def memory_bandwidth(devices: Sequence[Device], ranks_on_host: int) -> float | None:
    """Bytes/s of a device's memory: measured by doctor, else what layers reached or a cluster file states."""
    for device in devices:
        bandwidth = rate_of(device.rates, "memory", "fp32", ranks_on_host) or device.memory_bandwidth_bytes_per_s
        if bandwidth:
            return bandwidth
    return None


def roofline_rates(devices: Sequence[Device], dtype: str, ranks_on_host: int) -> tuple[float, float] | None:
    """FLOP/s and bytes/s that a roofline stands on: measured by doctor in this dtype, else what layers reached.

    None where the profile has not both.
    """
    for device in devices:
        peak = rate_of(device.rates, "compute", dtype, ranks_on_host) or device.peak_flops
        bandwidth = rate_of(device.rates, "memory", "fp32", ranks_on_host) or device.memory_bandwidth_bytes_per_s
        if peak and bandwidth:
            return peak, bandwidth
    return None


def rates_of_sheet(devices: Sequence[Device]) -> bool:
    """Whether a roofline stands on what the device's maker says: the first device that has rates decides."""
    rated = (device for device in devices if device.rates or device.peak_flops)
    return next((device.rates_from == DATA_SHEET for device in rated), False)
