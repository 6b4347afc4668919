"""What ``paradl-bench doctor --measure`` shows at once: the rate of every kernel, alone and beside the others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.frames import print_rows
from paradl_bench.core.terminal.command_line import open_console, write_output
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_bytes
from paradl_bench.records.measurement import read_records
from paradl_bench.records.roofline_record import RATES_FILE, RateSamples, Resource


class KernelRate(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel at one size: work a second of one rank, median and interquartile range over all samples."""

    resource: Resource
    kernel: str
    sizes: dict[str, int]
    dtype: str
    ranks_on_host: int
    working_set_bytes: int
    per_s: float
    iqr_relative: float
    samples: int


def kernel_rates(directory: Path) -> list[KernelRate]:
    """Every kernel of a measurement directory, the fastest of a resource first."""
    groups: dict[tuple[object, ...], list[RateSamples]] = {}
    for record in read_records(directory, RATES_FILE, RateSamples):
        key = record.resource, record.dtype, record.ranks_on_host, record.kernel, tuple(record.sizes.items())
        groups.setdefault(key, []).append(record)
    rates = [_rate(records) for records in groups.values()]
    return sorted(rates, key=lambda rate: (rate.resource, rate.dtype, rate.ranks_on_host, -rate.per_s))


def _rate(records: list[RateSamples]) -> KernelRate:
    first = records[0]
    samples = np.concatenate([np.array(record.samples_s) for record in records])
    low, median, high = np.percentile(samples, [25, 50, 75])
    return KernelRate(
        resource=first.resource,
        kernel=first.kernel,
        sizes=first.sizes,
        dtype=first.dtype,
        ranks_on_host=first.ranks_on_host,
        working_set_bytes=first.working_set_bytes,
        per_s=float(first.work / median),
        iqr_relative=float((high - low) / median),
        samples=int(samples.size),
    )


def print_rates(directory: Path, *, as_json: bool) -> None:
    """Print a measurement's rates, as a table or as asked for."""
    rates = kernel_rates(directory)
    if print_rows(KernelRate, rates):
        return
    if as_json:
        write_output("-", encode_pretty(rates))
        return
    columns = ("of", "dtype", "ranks at once", "kernel", "operands", "each rank", "spread")
    open_console().print(table(columns, map(_cells, rates)))
    open_console().print(f"wrote {directory}; next: calibrate fit {directory} ... -o PROFILE")


def _cells(rate: KernelRate) -> tuple[str, ...]:
    unit = "GFLOP/s" if rate.resource == "compute" else "GB/s"
    sizes = ", ".join(f"{name} {size}" for name, size in rate.sizes.items())
    return (
        rate.resource,
        rate.dtype,
        str(rate.ranks_on_host),
        f"{rate.kernel}, {sizes}",
        format_bytes(rate.working_set_bytes),
        f"{rate.per_s / 1e9:.4g} {unit}",
        f"{rate.iqr_relative:.1%}",
    )
