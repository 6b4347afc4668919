"""A device's rates in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calibrate.profile.profile import Device
from calibrate.profile.roofline_rates import DATA_SHEET, DeviceRate
from paradl_bench.core.units import format_bytes


def device_lines(devices: Sequence[Device]) -> Iterator[str]:
    """One line a rate that doctor measured, and one on what layers, or kernels, reached."""
    for device in devices:
        for rate in device.rates:
            yield f"{device.name}: {rate_words(rate)}"
        reached = "" if device.rates_from == DATA_SHEET else _reached(device)
        if reached:
            least = "" if device.rates_from == "measured by doctor" else ": at least so much"
            what = "Kernels" if device.rates_from == "reached by kernels" else "Layers"
            yield f"{what} reached {reached} on {device.name}{least}"


def rate_words(rate: DeviceRate) -> str:
    """``12.3 GFLOP/s in fp32, each of 2 ranks at once, ±1.2% between blocks (matmul, n 2048)``."""
    number = f"{rate.per_s / 1e9:.4g}"
    what = f"{number} GFLOP/s in {rate.dtype}" if rate.resource == "compute" else f"{number} GB/s of {rate.resource}"
    if rate.resource == "cache":
        what += f" ({format_bytes(rate.working_set_bytes)})"
    if rate.kernel == DATA_SHEET:
        return f"{what} as its data sheet says, which no kernel reaches"
    ranks = f", each of {rate.ranks_on_host} ranks at once" if rate.ranks_on_host > 1 else ", one rank"
    return f"{what}{ranks}, ±{rate.relative_sd:.1%} between blocks ({rate.kernel})"


def _reached(device: Device) -> str:
    measured = device.rates_from == "measured by doctor"
    peak, bandwidth = device.layers_reached if measured else (device.peak_flops, device.memory_bandwidth_bytes_per_s)
    parts = []
    for rate, doctors, unit in (
        (peak, device.peak_flops, "GFLOP/s"),
        (bandwidth, device.memory_bandwidth_bytes_per_s, "GB/s of memory"),
    ):
        if rate:
            share = f" ({rate / doctors:.0%} of doctor's)" if measured and doctors else ""
            parts.append(f"{rate / 1e9:.3g} {unit}{share}")
    return " and ".join(parts)
