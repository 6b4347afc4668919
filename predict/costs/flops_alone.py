"""A profile in which compute takes its FLOPs over the device's peak, and communication its bytes over the bandwidth.

The analytical model that DistSim's paper holds against measured iterations (section 2.3, figure 3): floating-point
operations over the computing capacity of the device, and the size of what is transmitted over the bandwidth. So there
is no memory, no framework, no latency, no contention, no interference, and no rank that is later than another.

The bandwidth is that of the largest messages of the fit of each collective, what reducing takes a byte included, or
what a cluster file states of a level. FLOPs are those of operations: a gradient of the network's input counts as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.profile import Device, Profile
from paradl_bench.core.statistics import grouped
from paradl_bench.records.cluster import Cluster, ClusterFile, Level
from paradl_bench.records.measurement import UNKNOWN_DEVICE

_CERTAIN = ((0.0, 0.0), (0.0, 0.0))
_UNKNOWN = Device(name=UNKNOWN_DEVICE, kind="cpu", memory_bytes=0, devices_per_host=1)


def flops_alone(profile: Profile, stated_peak: float | None, factor: float) -> Profile:
    """The profile without any time that was measured of compute.

    Args:
        stated_peak: FLOP/s of one rank that a cluster file states; None takes what doctor measured.
        factor: by which either is multiplied.
    """
    return msgspec.structs.replace(
        profile,
        devices=tuple(_flops_device(device, stated_peak, factor) for device in profile.devices or (_UNKNOWN,)),
        layer_times=(),
        model_times=(),
        shard_times=(),
        copies=(),
        kernel_models=(),
        input_side=(),
        contexts=(),
        communication=tuple(_bandwidths(profile.communication)),
        cluster=without_latency(profile.cluster),
    )


def without_latency(cluster: Cluster) -> Cluster:
    """The cluster with what its levels state of bandwidth alone; it names no device."""
    levels = tuple(map(_level_without_latency, cluster.levels))
    if isinstance(cluster, ClusterFile):
        # Whose device it is makes no difference to FLOPs, and its peak is in the profile's place already.
        return msgspec.structs.replace(
            cluster, levels=levels, device_name=None, peak_flops=None, memory_bandwidth_bytes_per_s=None
        )
    return msgspec.structs.replace(cluster, levels=levels)


def _level_without_latency(level: Level) -> Level:
    alpha_s = None if level.alpha_s is None and level.beta_s_per_byte is None else 0.0
    return msgspec.structs.replace(level, alpha_s=alpha_s, contention=None)


def _flops_device(device: Device, stated_peak: float | None, factor: float) -> Device:
    """Which moves any bytes in no time, and each time takes as long as it says."""
    rates = tuple(
        msgspec.structs.replace(rate, per_s=rate.per_s * factor)
        for rate in device.rates
        if rate.resource == "compute" and stated_peak is None
    )
    return msgspec.structs.replace(
        device,
        rates=rates,
        peak_flops=None if stated_peak is None else stated_peak * factor,
        memory_bandwidth_bytes_per_s=math.inf,
        time_factor=1.0 if device.time_factor is msgspec.UNSET else device.time_factor,
    )


def _bandwidths(fits: Sequence[CommunicationFit]) -> Iterator[CommunicationFit]:
    """One fit of each collective; none of what takes no time a byte, of which no bandwidth is known."""
    regimes = grouped(fits, lambda fit: (*fit.key, fit.ranks_range if fit.by_ranks else None))
    for of_collective in regimes.values():
        largest = max(of_collective, key=lambda fit: fit.regime_range)
        if largest.beta_s_per_byte or largest.gamma_s_per_byte or largest.inner:
            yield _bandwidth_alone(largest, smallest_bytes=min(fit.bytes_range[0] for fit in of_collective))


def _bandwidth_alone(largest: CommunicationFit, smallest_bytes: int) -> CommunicationFit:
    """The regime of the largest messages, for all sizes and without its latency."""
    inner = largest.inner
    if inner is not None:
        inner = msgspec.structs.replace(inner, alpha_s=0.0, covariance=_CERTAIN)
    return msgspec.structs.replace(
        largest,
        regime="all",
        alpha_s=0.0,
        doubling_s=0.0,
        inner=inner,
        covariance=_CERTAIN,
        bytes_range=(smallest_bytes, largest.bytes_range[1]),
        step_bytes_range=None,
        block_relative_sd=0.0,
        measured=(),
    )
