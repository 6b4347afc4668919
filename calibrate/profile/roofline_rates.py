"""Rates of a device: what ``paradl-bench doctor --measure`` sustained, and what measured layers or kernels reached."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from calibrate.statistics.blocks import between_block_sd
from paradl_bench.core.bounds import PositiveBytes, Ranks, Rate, Relative
from paradl_bench.core.checks import check_rises
from paradl_bench.core.statistics import grouped
from paradl_bench.records.roofline_record import RateSamples, Resource

DATA_SHEET: Literal["data sheet"] = "data sheet"
"""Where rates come from that nobody measured: what the maker says, which nobody reaches."""
RatesFrom = Literal["", "measured by doctor", "reached by layers", "reached by kernels", "data sheet"]


class DeviceRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that one device, or one core of a CPU, sustained of a resource.

    Attributes:
        resource: ``compute`` (FLOP/s), ``memory`` or ``cache`` (bytes/s).
        dtype: of the operands and products; bytes/s do not depend on it.
        ranks_on_host: that worked at once, each at this rate (the median of them).
        per_s: FLOPs or bytes a second. relative_sd: between blocks of time.
        kernel: that sustained it, in words; :data:`DATA_SHEET` where nobody measured.
        working_set_bytes: of its operands.
        spread_over_kernels: lowest and highest of the kernels and sizes tried.
    """

    resource: Resource
    dtype: str
    ranks_on_host: Ranks
    per_s: Rate
    relative_sd: Relative
    kernel: str
    working_set_bytes: PositiveBytes
    spread_over_kernels: tuple[Rate, Rate]

    def __post_init__(self) -> None:
        check_rises(self, "spread_over_kernels")


class _Group(NamedTuple):
    """What one rate is of: caches of unlike size have rates of their own, all beyond them one."""

    resource: Resource
    dtype: str
    ranks_on_host: int
    cached_bytes: int


class _Rate(NamedTuple):
    per_s: float
    relative_sd: float
    kernel: str
    working_set_bytes: int


def fit_rates(records: Iterable[RateSamples]) -> tuple[DeviceRate, ...]:
    """The best median rate of each resource, dtype and number of ranks.

    A kernel's rate is its work over the median of its samples in all blocks and on all ranks. Memory's is that of the
    largest working set that was tried, of which least is left in a cache from one call to the next.
    """
    groups: dict[_Group, list[_Rate]] = {}
    for (group, name, working_set, work), of_kernel in grouped(records, _kernel_of).items():
        samples = [np.array(record.samples_s) for record in of_kernel]
        seconds = float(np.median(np.concatenate(samples)))
        groups.setdefault(group, []).append(_Rate(work / seconds, between_block_sd(samples), name, working_set))
    return tuple(_best(group, groups[group]) for group in sorted(groups))


def _kernel_of(record: RateSamples) -> tuple[_Group, str, int, float]:
    """Group, kernel in words, working set and work."""
    sizes = ", ".join(f"{name} {size}" for name, size in record.sizes.items())
    cached_bytes = 1 << (record.working_set_bytes - 1).bit_length() if record.resource == "cache" else 0
    group = _Group(record.resource, record.dtype, record.ranks_on_host, cached_bytes)
    return group, f"{record.kernel}, {sizes}", record.working_set_bytes, record.work


def _best(group: _Group, rates: Sequence[_Rate]) -> DeviceRate:
    largest = max(rate.working_set_bytes for rate in rates)
    least_bytes = 0.9 * largest if group.resource == "memory" else 0
    best = max((rate for rate in rates if rate.working_set_bytes > least_bytes), key=lambda rate: rate.per_s)
    return DeviceRate(
        resource=group.resource,
        dtype=group.dtype,
        ranks_on_host=group.ranks_on_host,
        **best._asdict(),
        spread_over_kernels=(min(rate.per_s for rate in rates), max(rate.per_s for rate in rates)),
    )


def rate_of(rates: Iterable[DeviceRate], resource: Resource, dtype: str, ranks_on_host: int) -> float | None:
    """The rate at the number of ranks measured that is nearest by ratio; None where the dtype was not measured."""
    by_ranks = {r.ranks_on_host: r.per_s for r in rates if r.resource == resource and r.dtype == dtype and r.per_s > 0}
    if not by_ranks:
        return None
    return by_ranks[min(sorted(by_ranks), key=lambda count: abs(math.log(count / ranks_on_host)))]
