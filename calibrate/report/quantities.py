"""Every number of a profile that another profile may hold too, with how far a repetition of its measurement would lie.

A number is a median over blocks of time (or, of several measurements, over those). What its spread is between is one
block; the number itself is known better: by sqrt(pi / (2 n + pi - 2)), as the median of n normal values is.
Where a profile does not say how many blocks there were, as those of before don't, the spread of one block is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_time import communication_seconds, spread_s
from calibrate.profile.entries import describe
from calibrate.profile.profile import LayerTime, ModelTime, Profile
from calibrate.report.sections.contexts_show import context_words
from calibrate.statistics.blocks import bias_of_sd
from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import Summary, grouped
from paradl_bench.core.units import format_bytes
from paradl_bench.plan.collectives.catalog import operations

NOT_COMPARED: Mapping[str, str] = {
    "schema_version": "of the file",
    "created_utc": "of the file",
    "command_line": "of the file",
    "environments": "said at the head of a comparison",
    "sources": "said at the head of a comparison",
    "cluster": "how many ranks were measured, no measurement",
    "network": "no measurement; what both hold is compared by its layers",
    "communication_choices": "errors of forms that were considered; the chosen one is compared as communication",
    "memory_runs": "what memory factors were fitted to; those are compared",
    "kernel_models": "estimates for shapes without a measurement; measured shapes are compared",
    "notes": "words",
    "published": "words",
    "compared_runs": "runs beside their predictions, no measurement of the profile",
}
"""Fields of a profile that hold nothing to compare, and why."""


class Quantity(NamedTuple):
    """A number of a profile.

    Attributes:
        relative_sd: of one block or measurement, or of the number itself where ``blocks`` is 0; None: not known.
        blocks: how many the number is a median of.
    """

    value: float
    relative_sd: float | None
    unit: str = "s"
    blocks: int = 0

    @property
    def relative_error(self) -> float | None:
        """Standard deviation of the number, relative to it."""
        if self.relative_sd is None or self.blocks < 2:
            return self.relative_sd
        # Student's distribution is of the deviation as it was before it was freed of its bias.
        of_block = self.relative_sd * bias_of_sd(self.blocks)
        return of_block * math.sqrt(math.pi / (2 * self.blocks + math.pi - 2))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of that deviation."""
        return max(self.blocks - 1, 1) if self.blocks else math.inf


Named = Iterator[tuple[str, str, Quantity]]
"""(group, name, quantity)."""


def quantities(profile: Profile, other: Profile) -> Named:
    """Every number of a profile that can be compared, by name, also at points and for networks of the other profile."""
    for field in Profile.__struct_fields__:
        if field in _COMPARED:
            yield from ((field, *named) for named in _COMPARED[field](profile, other))
        elif field not in NOT_COMPARED:
            yield from ((field, *named) for named in _of_entries(field, getattr(profile, field)))


def _layer_times(profile: Profile, _: Profile) -> Iterator[tuple[str, Quantity]]:
    for time in profile.layer_times:
        on = f"batch {time.batch} {_computed_in(time)} on {time.ranks_on_host} {time.shard}".rstrip()
        name = f"{time.phase} {time.mode} {on}: {time.operation}"
        yield name, Quantity(time.time.typical_s, time.block_relative_sd, blocks=time.blocks)


def _computed_in(time: LayerTime | ModelTime) -> str:
    return f"{time.dtype} {time.kernel_settings}".rstrip()


def _whole_times(times: Sequence[ModelTime]) -> Iterator[tuple[str, Quantity]]:
    for whole in times:
        on = f"{whole.optimizer} on {whole.ranks_on_host} {whole.shard}".rstrip()
        where = f"{whole.model} batch {whole.batch} {_computed_in(whole)} {on}"
        parts = {"iteration": whole.iteration, "WU": whole.wu, "FW between": whole.fw_between}
        for label, summary in (parts | {"BW between": whole.bw_between}).items():
            yield f"{label} of {where}", Quantity(summary.typical_s, whole.common_relative_sd, blocks=whole.blocks)


def _copies(profile: Profile, other: Profile) -> Iterator[tuple[str, Quantity]]:
    shared = sorted(profile.network.keys() & other.network.keys())
    for copy in profile.copies:
        for network in (profile.network[name] for name in shared):
            seconds = copy.seconds(network.parameter_bytes, len(network.parameters))
            name = f"{copy.what} of {network.name} on {copy.ranks_on_host}"
            yield name, Quantity(seconds, copy.relative_sd)


def _communication(profile: Profile, other: Profile) -> Iterator[tuple[str, Quantity]]:
    """Times at the sizes and rank counts measured in either profile."""
    of_both = grouped((*profile.communication, *other.communication), lambda fit: fit.key)
    for key, of_key in grouped(profile.communication, lambda fit: fit.key).items():
        library, name, level = key
        operation = lookup(operations(), name, "collective")
        fits = [_with_drift_of_the_median(fit) for fit in of_key]
        points = {(point.ranks, point.message_bytes) for fit in of_both[key] for point in fit.measured}
        for ranks, size in sorted(points):
            seconds = float(communication_seconds(operation, fits, ranks, size))
            spread = spread_s(operation, fits, ranks, size) / seconds if seconds else 0.0
            where = f"{library} {name}, level {level}, {ranks} ranks, {format_bytes(size)}"
            yield where, Quantity(seconds, spread)


def _with_drift_of_the_median(fit: CommunicationFit) -> CommunicationFit:
    """The covariance is of the parameters as they were fitted; the drift is that of one block."""
    drift = Quantity(1.0, fit.block_relative_sd, blocks=fit.blocks).relative_error
    return msgspec.structs.replace(fit, block_relative_sd=drift)


def _contexts(profile: Profile, _: Profile) -> Iterator[tuple[str, Quantity]]:
    for entry in profile.contexts:
        where = context_words(entry)
        if entry.waits:
            continue
        if entry.added_s:
            yield f"added to {where}", Quantity(entry.added_s, entry.added_sd_s / entry.added_s)
        yield f"slow-down of {where}", Quantity(entry.factor, entry.factor_sd / entry.factor, "times")
        if entry.context == "with-compute":
            slower, sd = entry.neighbour_factor, entry.neighbour_sd
            yield f"slow-down of compute beside {where}", Quantity(slower, sd / slower, "times")


def _devices(profile: Profile, _: Profile) -> Iterator[tuple[str, Quantity]]:
    for device in profile.devices:
        for rate in device.rates:
            size = f" {format_bytes(rate.working_set_bytes)}" if rate.resource == "cache" else ""
            what = f"{device.name}: {rate.resource}{size} {rate.dtype} on {rate.ranks_on_host}"
            yield what, Quantity(rate.per_s, rate.relative_sd, "FLOP/s" if rate.resource == "compute" else "B/s")
        if not device.rates:
            for label, unit in (("peak_flops", "FLOP/s"), ("memory_bandwidth_bytes_per_s", "B/s")):
                if (value := getattr(device, label)) is not None:
                    yield f"{device.name}: {label} that layers reached", Quantity(value, None, unit)


def _memory_factors(profile: Profile, other: Profile) -> Iterator[tuple[str, Quantity]]:
    """Peaks at the sizes between which either profile's factor was fitted."""
    factors = (*profile.memory_factors, *other.memory_factors)
    for factor in profile.memory_factors:
        sizes = {size for like in factors if like.device == factor.device for size in like.tensor_bytes_range}
        for size in sorted(sizes):
            peak, reach = factor.estimate(size)
            relative_sd = reach / factor.deviations_90 / peak if peak > 0 else None
            name = f"memory of {factor.measured} on {factor.device} for {format_bytes(size)} of tensors"
            yield name, Quantity(peak, relative_sd, "bytes", blocks=len(factor.models))


_COMPARED: Mapping[str, Callable[[Profile, Profile], Iterator[tuple[str, Quantity]]]] = {
    "layer_times": _layer_times,
    "model_times": lambda profile, _: _whole_times(profile.model_times),
    "shard_times": lambda profile, _: _whole_times(profile.shard_times),
    "copies": _copies,
    "communication": _communication,
    "contexts": _contexts,
    "devices": _devices,
    "memory_factors": _memory_factors,
}

_SPREADS = ("relative_sd", "block_relative_sd", "common_relative_sd")
_NO_MEASUREMENT = ("_sd", "_iqr", "iqr_s", "_error", "deviations_90", "_interval", "_median", "_floor_relative")


def _of_entries(field: str, entries: object) -> Iterator[tuple[str, Quantity]]:
    """Numbers of a list that nothing more is known of: its entries' floats and times, by what identifies the entry."""
    for entry in entries if isinstance(entries, tuple) else (entries,):
        if isinstance(entry, msgspec.Struct):
            yield from _of_entry(describe(field, entry), entry)


def _of_entry(where: str, entry: msgspec.Struct) -> Iterator[tuple[str, Quantity]]:
    spread = next((getattr(entry, label) for label in _SPREADS if hasattr(entry, label)), None)
    blocks = int(getattr(entry, "blocks", 0))
    for label in entry.__struct_fields__:
        value = getattr(entry, label)
        if isinstance(value, Summary):
            value = value.typical_s
        if isinstance(value, float) and not label.endswith(_NO_MEASUREMENT):
            sd = getattr(entry, f"{label}_sd", None)
            relative = spread if sd is None or not value else sd / value
            yield f"{where}: {label}", Quantity(value, relative, _unit(label), blocks)
        elif isinstance(value, msgspec.Struct):
            yield from _of_entry(f"{where}: {label}", value)
        elif isinstance(value, tuple):
            for part in value:
                if isinstance(part, msgspec.Struct):
                    yield from _of_entry(f"{where}, {describe(f'its {label}', part)}", part)


def _unit(label: str) -> str:
    return next((unit for end, unit in (("_s", "s"), ("_bytes", "bytes")) if label.endswith(end)), "")
