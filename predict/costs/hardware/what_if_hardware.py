"""Hardware that nobody has measured: what ``predict what-if`` changes of the links and the device that were.

Factors are on what was measured: bandwidth 2 halves beta, latency 2 doubles alpha.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from calibrate.profile.collectives.communication import CommunicationFit
from paradl_bench.core.errors import unknown_choice
from paradl_bench.records.cluster import Cluster, Level

Covariance = tuple[tuple[float, float], tuple[float, float]]


class LinkFactors(NamedTuple):
    """By what alpha and beta of a level are multiplied."""

    alpha: float = 1.0
    beta: float = 1.0


class NamedDevice(NamedTuple):
    """Another device by the catalogue; what it is faster by stands in the factors of :class:`Hardware`.

    Attributes:
        name: of the catalogue. instead_of: the catalogue's name of the one that was measured.
        measured_peak_flops: FLOP/s of the latter by its sheet, in the dtype that is trained in.
        memory_bytes: of one rank.
    """

    name: str
    instead_of: str
    measured_peak_flops: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Factors on the hardware that was measured; 1 leaves it as it is. A ValueError of one that is not finite and
    positive.

    Attributes:
        bandwidth, latency: of the links of every level; bandwidth_at, latency_at: of single levels, on top of the
            former.
        device: that the last two factors are of, where they are of a named one.
    """

    bandwidth: float = 1.0
    latency: float = 1.0
    bandwidth_at: Mapping[str, float] = field(default_factory=dict)
    latency_at: Mapping[str, float] = field(default_factory=dict)
    peak_flops: float = 1.0
    memory_bandwidth: float = 1.0
    device: NamedDevice | None = None

    def __post_init__(self) -> None:
        factors = [self.bandwidth, self.latency, self.peak_flops, self.memory_bandwidth]
        for factor in (*factors, *self.bandwidth_at.values(), *self.latency_at.values()):
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"factors have to be finite and positive, not {factor}")

    def times(self, other: Hardware) -> Hardware:
        """Both changes at once; a device of ``other`` comes first."""
        return Hardware(
            bandwidth=self.bandwidth * other.bandwidth,
            latency=self.latency * other.latency,
            bandwidth_at=_products(self.bandwidth_at, other.bandwidth_at),
            latency_at=_products(self.latency_at, other.latency_at),
            peak_flops=self.peak_flops * other.peak_flops,
            memory_bandwidth=self.memory_bandwidth * other.memory_bandwidth,
            device=other.device or self.device,
        )

    @property
    def device_factors(self) -> tuple[float, float, NamedDevice | None]:
        """What is changed of the device, by which compute takes other seconds."""
        return self.peak_flops, self.memory_bandwidth, self.device

    @property
    def link_factors(self) -> tuple[float, float, Mapping[str, float], Mapping[str, float]]:
        """What is changed of the links, by which messages take other seconds."""
        return self.bandwidth, self.latency, self.bandwidth_at, self.latency_at

    def links(self, level: str) -> LinkFactors:
        """Of the links of a level."""
        bandwidth = self.bandwidth * self.bandwidth_at.get(level, 1.0)
        return LinkFactors(self.latency * self.latency_at.get(level, 1.0), 1 / bandwidth)

    def of_cluster(self, cluster: Cluster, *, given: bool) -> Cluster:
        """A cluster of the named device: with its memory, unless the cluster is given and states its own."""
        if self.device is None or (given and cluster.memory_bytes_per_rank is not None):
            return cluster
        return msgspec.structs.replace(cluster, memory_bytes_per_rank=self.device.memory_bytes)

    def check_levels(self, cluster: Cluster) -> None:
        """Refuse names of levels that a cluster lacks: a UserError, which names those that it has."""
        levels = [level.name for level in cluster.levels]
        for name in (*self.bandwidth_at, *self.latency_at):
            if name not in levels:
                raise unknown_choice("level", name, levels)


def _products(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 1.0) * other.get(name, 1.0) for name in dict.fromkeys((*one, *other))}


AS_MEASURED = Hardware()
"""Nothing changed."""


def changed_level(level: Level, factors: LinkFactors) -> Level:
    """A level with what it states of its links multiplied."""
    return msgspec.structs.replace(
        level,
        alpha_s=None if level.alpha_s is None else level.alpha_s * factors.alpha,
        beta_s_per_byte=None if level.beta_s_per_byte is None else level.beta_s_per_byte * factors.beta,
    )


def changed_fit(fit: CommunicationFit, factors: LinkFactors, inside: LinkFactors) -> CommunicationFit:
    """A fit of faster or slower links, with the spread of its parameters; relative errors stay what they were.

    What grows with the logarithm of bytes counts as transfer. gamma_r stays: the device adds, not the link.

    Args:
        factors: of the links that the fit is of. inside: of those inside a node, for a hierarchical algorithm.
    """
    inner = fit.inner
    if inner is not None:
        inner = msgspec.structs.replace(
            inner,
            alpha_s=inner.alpha_s * inside.alpha,
            beta_s_per_byte=inner.beta_s_per_byte * inside.beta,
            covariance=_scaled(inner.covariance, inside),
        )
    return msgspec.structs.replace(
        fit,
        alpha_s=fit.alpha_s * factors.alpha,
        beta_s_per_byte=fit.beta_s_per_byte * factors.beta,
        doubling_s=fit.doubling_s * factors.beta,
        covariance=_scaled(fit.covariance, factors),
        inner=inner,
    )


def _scaled(covariance: Covariance, factors: LinkFactors) -> Covariance:
    (alpha, both), (again, beta) = covariance
    mixed = factors.alpha * factors.beta
    return (alpha * factors.alpha**2, both * mixed), (again * mixed, beta * factors.beta**2)
