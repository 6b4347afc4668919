"""Compute on a device that was not measured, by the roofline (Williams et al. 2009; KernelMLP's what-if).

With FLOPs F, bytes M, sustained rates P and W before and P', W' after, a work that took t takes

    t' = t  max(F/P', M/W') / max(F/P, M/W)

so that what is bound by memory gains nothing from more FLOP/s. The time between operations (framework, launches) and
the fixed part of a bucket copy stay as they were measured. What of t the roofline does not explain may be bound by
something else: with e = max(F/P, M/W) / t at most 1, the rest (1 - e) t lies somewhere between the smallest and the
largest of 1, P/P' and W/W' times itself, any value as likely as another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import msgspec

from calibrate.profile.device_roofline import roofline_rates
from calibrate.profile.profile import Profile
from calibrate.profile.roofline_rates import DATA_SHEET, rate_of
from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.autocast import computed_in
from paradl_bench.plan.works.work import Work
from paradl_bench.records.cluster import Cluster, ClusterFile
from paradl_bench.records.measurement import UNKNOWN_DEVICE
from predict.costs.compute.layer_roofline import Roofline
from predict.costs.hardware.what_if_hardware import AS_MEASURED, Hardware, NamedDevice
from predict.costs.sourced import UNIFORM_TO_SD, Adjustment, Cost, Remark, Source
from predict.costs.spread.assembly import Priced

_MEASURE = "measure them: paradl-bench doctor --measure -o DIR, then calibrate fit with that directory as well"


class Rates(NamedTuple):
    """FLOP/s and bytes/s that one rank sustains."""

    flops: float
    bytes: float


class Peak(NamedTuple):
    """FLOP/s of one rank, and where they come from; None, and why, where they are not known."""

    flops: float | None
    basis: str


class Demand(NamedTuple):
    """What a work asks of the device; of its seconds ``fixed_s`` is bound by neither rate."""

    flops: float
    bytes: float
    fixed_s: float = 0.0


class DemandContext(NamedTuple):
    """What, besides the work itself, decides its demand."""

    profile: Profile
    roofline: Roofline
    dtype: str
    local_batch: int
    ranks_on_host: int


class OtherDevice:
    """Prices of works on a device with other rates than the one that was measured.

    Args:
        hardware: factors on the rates: on those of the cluster's device, where that is another one than the profile's.

    A device that is the same leaves every price as it is, and needs no rates.

    Attributes:
        stated_peak: FLOP/s that a cluster file states of one rank.

    Raises:
        UserError: the cluster's device is not the profile's, and its rates are not stated.
    """

    def __init__(
        self,
        profile: Profile,
        network: ModelGraph,
        dtype: str,
        demand_of: Callable[[Work, DemandContext], Demand | None],
        hardware: Hardware = AS_MEASURED,
        cluster: Cluster | None = None,
    ) -> None:
        self._profile, self._network, self._dtype, self._demand_of = profile, network, computed_in(dtype), demand_of
        self._factors = Rates(hardware.peak_flops, hardware.memory_bandwidth)
        self._named = hardware.device
        self.stated_peak = cluster.peak_flops if isinstance(cluster, ClusterFile) else None
        self._stated = _other_rates(profile, cluster)
        self._time_factor = profile.time_factor
        # What one rank takes by itself, which no link changes.
        self.alone = Answers()

    @property
    def computes(self) -> bool:
        """Whether it does; else it takes the seconds of the profile as they stand, whatever runs beside it."""
        return self._time_factor is None

    @property
    def same(self) -> bool:
        """Whether nothing differs from what was measured."""
        return self._stated is None and self._factors == (1.0, 1.0)

    @cached_property
    def _roofline(self) -> Roofline:
        return Roofline(self._profile, self._network, self._dtype)

    def parts(
        self,
        works: Sequence[Work],
        priced: Sequence[Priced],
        sharded: Sequence[tuple[Layer, int]],
        local_batch: int,
        ranks_on_host: int,
    ) -> list[Priced]:
        """Parts of a plan, in the order of its works, as the other device takes them.

        Args:
            sharded: layers that the network lacks, with the bytes of their parameters.

        Raises:
            UserError: the profile holds no rates for a roofline, or none to hold against rates that are stated.
        """
        parts = list(priced)
        if not self.same:
            for layer, parameter_bytes in sharded:
                self._roofline.learn(layer, parameter_bytes)
            before = self._measured_rates(ranks_on_host)
            after = self._rates(before)
            context = DemandContext(self._profile, self._roofline, self._dtype, local_batch, ranks_on_host)
            remark, known = _by_roofline(before, after, self._named), Answers()
            for index, (work, part) in enumerate(zip(works, priced, strict=True)):
                # Blocks repeat their works, and one part stands for all of them.
                find = partial(self._on_other, work, part, context, before, after, remark)
                parts[index] = known.once(id(part), find)
        if self._time_factor is None:
            return parts
        return [_as_it_stands(work, part, self._time_factor) for work, part in zip(works, parts, strict=True)]

    def _on_other(
        self, work: Work, part: Priced, context: DemandContext, before: Rates, after: Rates, remark: Remark
    ) -> Priced:
        demand = self._demand_of(work, context)
        return part if demand is None else _on_other(part, demand, before, after, remark)

    def peak(self, ranks_on_host: int) -> Peak:
        """FLOP/s that a rank can reach: stated of the device, else as doctor measured with so many ranks on the host.

        What layers reached is no peak, though a roofline makes do with it.
        """
        if self._named is not None:
            peak = self._named.measured_peak_flops * self._factors.flops
            return Peak(peak, f"of {self._named.name} in {self._dtype}, by its data sheet")
        if self.stated_peak is not None:
            return Peak(self.stated_peak * self._factors.flops, "stated by the cluster file")
        for device in self._profile.devices:
            flops_per_s = rate_of(device.rates, "compute", self._dtype, ranks_on_host)
            if flops_per_s is not None:
                how = "by its data sheet" if device.rates_from == DATA_SHEET else "measured by doctor"
                return Peak(flops_per_s * self._factors.flops, f"{how} in {self._dtype}")
        text = f"the profile holds no peak in {self._dtype}: paradl-bench doctor --measure -o DIR, then calibrate fit"
        return Peak(None, text)

    def _rates(self, before: Rates) -> Rates:
        base = self._stated or before
        return Rates(base.flops * self._factors.flops, base.bytes * self._factors.bytes)

    def _measured_rates(self, ranks_on_host: int) -> Rates:
        known = roofline_rates(self._profile.devices, self._dtype, ranks_on_host)
        if known is None:
            raise UserError(
                f"a roofline needs the FLOP/s and bytes/s of the device, and the profile holds none; {_MEASURE}"
            )
        # Both of a factor's rates are off alike; beside a stated rate, one that is too low makes compute too short.
        if self._stated is not None and known not in self._sustained(ranks_on_host):
            raise UserError(
                f"the profile's {self._dtype} FLOP/s and bytes/s are what layers reached, too low to compare with"
                f" what the cluster file says that another device sustains; {_MEASURE}"
            )
        return Rates(*known)

    def _sustained(self, ranks_on_host: int) -> list[tuple[float | None, float | None]]:
        """What doctor measured of each device."""
        return [
            (
                rate_of(device.rates, "compute", self._dtype, ranks_on_host),
                rate_of(device.rates, "memory", "fp32", ranks_on_host),
            )
            for device in self._profile.devices
        ]


def _as_it_stands(work: Work, part: Priced, factor: float) -> Priced:
    """A part as a device takes it that computes nothing."""
    if not work.way:
        return part
    remark = Remark(f"every compute time of the profile is multiplied by {factor:g}", False)
    seconds = part.cost.seconds * factor
    # These very seconds: however far they are off the times of what computes, they are not off its own.
    cost = part.cost.adjusted("device", seconds)._replace(independent_sd_s=0.0, batch_sd_s=0.0, method_sd_s=0.0)
    return part._replace(cost=cost._replace(remarks=(*cost.remarks, remark)), modes=())


def with_stated_rates(profile: Profile, cluster: Cluster | None) -> Profile:
    """The profile with what a cluster file states of its device, where the profile itself holds no rate of it.

    A device that the profile does not name, as of imported layers, is the one that the cluster file names.
    """
    if not isinstance(cluster, ClusterFile) or cluster.device_name is None:
        return profile
    names = {cluster.device_name, UNKNOWN_DEVICE} if len(profile.devices) == 1 else {cluster.device_name}
    devices = tuple(
        msgspec.structs.replace(
            device,
            name=cluster.device_name,
            peak_flops=device.peak_flops or cluster.peak_flops,
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s or cluster.memory_bandwidth_bytes_per_s,
        )
        if device.name in names and not device.rates
        else device
        for device in profile.devices
    )
    return msgspec.structs.replace(profile, devices=devices)


def _other_rates(profile: Profile, cluster: Cluster | None) -> Rates | None:
    """Rates of the cluster's device where that is not the profile's."""
    if not isinstance(cluster, ClusterFile) or cluster.device_name is None:
        return None
    measured = [device.name for device in profile.devices]
    if cluster.device_name in measured:
        return None
    if cluster.peak_flops is None or cluster.memory_bandwidth_bytes_per_s is None:
        raise UserError(
            f"the profile is of {', '.join(measured) or 'a device that it does not name'}, and cluster"
            f" {cluster.name!r} has {cluster.device_name}: measure there, or state in the cluster file the"
            " peak_flops and memory_bandwidth_bytes_per_s that one rank sustains, by which compute is then scaled"
        )
    return Rates(cluster.peak_flops, cluster.memory_bandwidth_bytes_per_s)


def _by_roofline(before: Rates, after: Rates, named: NamedDevice | None) -> Remark:
    what = f"{named.name} instead of {named.instead_of}" if named else "another device"
    links = "; links and host stay as measured" if named else ""
    return Remark(
        f"compute on {what}, by roofline: {after.flops / before.flops:.3g} times the FLOP/s, "
        f"{after.bytes / before.bytes:.3g} times the memory bandwidth{links}",
        True,
    )


def _on_other(part: Priced, demand: Demand, before: Rates, after: Rates, remark: Remark) -> Priced:
    cost = part.cost
    bound_s = max(demand.flops / before.flops, demand.bytes / before.bytes)
    moving_s = max(cost.seconds - demand.fixed_s, 0.0)
    if not (bound_s and moving_s):
        return part
    factor = max(demand.flops / after.flops, demand.bytes / after.bytes) / bound_s
    seconds = cost.seconds - moving_s + moving_s * factor
    ratio = seconds / cost.seconds
    explained = min(1.0, bound_s / moving_s)
    choices = (1.0, before.flops / after.flops, before.bytes / after.bytes)
    width = (1 - explained) * moving_s * (max(choices) - min(choices))
    # Built at once: a search prices tens of thousands.
    added_s = seconds - cost.seconds
    scaled = Cost(
        seconds=seconds,
        source=max(cost.source, Source.SCALED_BY_ROOFLINE),
        independent_sd_s=cost.independent_sd_s * ratio,
        batch_sd_s=cost.batch_sd_s * ratio,
        method_sd_s=math.hypot(cost.method_sd_s * ratio, width * UNIFORM_TO_SD),
        remarks=(*cost.remarks, remark),
        adjustments=(*cost.adjustments, Adjustment("device", added_s)) if added_s else cost.adjustments,
        base_source=cost.origin,
        method=cost.method,
    )
    modes = tuple((name, shift * ratio) for name, shift in part.modes)
    return part._replace(cost=scaled, modes=modes) if modes else Priced(scaled, *part[1:])
