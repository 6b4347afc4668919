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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Factors on the hardware that was measured; 1 leaves it as it is. A ValueError of one that is not finite and
    positive.

    Attributes:
        bandwidth, latency: of the links of every level; bandwidth_at, latency_at: of single levels, on top of the
            former.
    """

    bandwidth: float = 1.0
    latency: float = 1.0
    bandwidth_at: Mapping[str, float] = field(default_factory=dict)
    latency_at: Mapping[str, float] = field(default_factory=dict)
    peak_flops: float = 1.0
    memory_bandwidth: float = 1.0

    def __post_init__(self) -> None:
        factors = [self.bandwidth, self.latency, self.peak_flops, self.memory_bandwidth]
        for factor in (*factors, *self.bandwidth_at.values(), *self.latency_at.values()):
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"factors have to be finite and positive, not {factor}")

    def links(self, level: str) -> LinkFactors:
        """Of the links of a level."""
        bandwidth = self.bandwidth * self.bandwidth_at.get(level, 1.0)
        return LinkFactors(self.latency * self.latency_at.get(level, 1.0), 1 / bandwidth)

    def check_levels(self, cluster: Cluster) -> None:
        """Refuse names of levels that a cluster lacks: a UserError, which names those that it has."""
        levels = [level.name for level in cluster.levels]
        for name in (*self.bandwidth_at, *self.latency_at):
            if name not in levels:
                raise unknown_choice("level", name, levels)


AS_MEASURED = Hardware()
"""Nothing changed."""


def changed_level(level: Level, factors: LinkFactors) -> Level:
    """A level with what it states of its links multiplied."""
    return msgspec.structs.replace(
        level,
        alpha_s=None if level.alpha_s is None else level.alpha_s * factors.alpha,
        beta_s_per_byte=None if level.beta_s_per_byte is None else level.beta_s_per_byte * factors.beta,
    )


def changed_fit(fit: CommunicationFit, own: LinkFactors, inside: LinkFactors) -> CommunicationFit:
    """A fit of faster or slower links, with the spread of its parameters; relative errors stay what they were.

    What grows with the logarithm of bytes counts as transfer. gamma_r stays: the device adds, not the link.

    Args:
        inside: of the links inside a node, for a hierarchical algorithm.
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
        alpha_s=fit.alpha_s * own.alpha,
        beta_s_per_byte=fit.beta_s_per_byte * own.beta,
        doubling_s=fit.doubling_s * own.beta,
        covariance=_scaled(fit.covariance, own),
        inner=inner,
    )


def _scaled(covariance: Covariance, factors: LinkFactors) -> Covariance:
    (alpha, both), (again, beta) = covariance
    mixed = factors.alpha * factors.beta
    return (alpha * factors.alpha**2, both * mixed), (again * mixed, beta * factors.beta**2)
