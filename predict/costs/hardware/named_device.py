"""Compute on a device of the catalogue: faster than the measured one by what their makers say of both.

A kernel is assumed to reach as large a share of the other device's peak as it did of the measured one's. So a sheet is
held against a sheet, and never against what was measured; the device that was measured has to be in the catalogue too.
"""

from __future__ import annotations

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.records.cluster import ClusterFile
from paradl_bench.records.devices.sheet import DeviceSheet, device_sheet, sheet_of_measured
from predict.costs.hardware.what_if_hardware import Hardware, NamedDevice


def hardware_of_device(
    name: str, profile: Profile, dtype: str, kernel_settings: str, cluster: ClusterFile | None = None
) -> Hardware:
    """The change from the profile's device to a named one; factors of 1 where it is the same.

    Args:
        kernel_settings: label of those that are predicted with.

    Raises:
        UserError: the catalogue lacks the device, or the one that was measured; a sheet states no peak in the dtype; or
            the cluster file states a device as well.
    """
    sheet = device_sheet(name)
    if cluster is not None and cluster.device_name is not None:
        raise UserError(
            f"--device {name} and device_name {cluster.device_name!r} of cluster {cluster.name!r} both name the"
            " device: give only one of them"
        )
    measured, tf32 = _measured_sheet(name, profile), "tf32" in kernel_settings.split("+")
    measured_peak = measured.peak(dtype, tf32=tf32)
    return Hardware(
        peak_flops=sheet.peak(dtype, tf32=tf32) / measured_peak,
        memory_bandwidth=sheet.memory_bandwidth_bytes_per_s / measured.memory_bandwidth_bytes_per_s,
        device=NamedDevice(name, measured.name, measured_peak, sheet.memory_bytes),
    )


def _measured_sheet(asked: str, profile: Profile) -> DeviceSheet:
    names = [device.name for device in profile.devices]
    sheets = {name: sheet_of_measured(name) for name in names}
    missing = [name for name, sheet in sheets.items() if sheet is None]
    known = {sheet.name: sheet for sheet in sheets.values() if sheet is not None}
    if missing or len(known) != 1:
        of = ", ".join(missing) or ", ".join(known) or "a device that it does not name"
        raise UserError(
            f"--device {asked}: the profile was measured on {of}, and predictions scale only from one GPU of"
            " predict devices to another: measure on that device, or state in a cluster file the peak_flops and"
            " memory_bandwidth_bytes_per_s that one rank sustains"
        )
    return next(iter(known.values()))
