"""Exchanges of the gradients of stages: one among all ranks that hold a stage, one of what some hold other parts of.

A stage's buffers are broadcast before its first forward alone, since every forward runs under ``no_sync``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import axes_apart, group_axes, ranks_along
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Before, RoleBuilder, Setup
from paradl_bench.strategies.exchange.gradients import (
    GradientBuckets,
    GradientExchange,
    exchanged_along,
    issued_before_steady_state,
)
from paradl_bench.strategies.frameworks.presets import framework_of, scatters_gradients

Axes = tuple[int, ...]


def exchange_axes(strategy: Strategy) -> tuple[Axes, ...]:
    """Axes along which gradients of stages are exchanged: of all parameters but those apart, and of these."""
    axes = group_axes(strategy, Trait.REPLICATES), axes_apart(strategy)
    return tuple(dict.fromkeys(along for along in axes if along))


def exchanges_of(network: ModelGraph, strategy: Strategy, apart: frozenset[str]) -> Iterator[tuple[Axes, bool]]:
    """Of one stage, from the inside out: axes, and whether it is that of parameters apart.

    A stage may have parameters of one kind alone.

    Args:
        network: the stage's. apart: as of :class:`~paradl_bench.plan.axis_planner.ShardedLayers`.
    """
    kinds = {parameter.name in apart for parameter in network.parameters}
    for axes, of_apart in ((group_axes(strategy, Trait.REPLICATES), False), (axes_apart(strategy), True)):
        if axes and of_apart in kinds:
            yield axes, of_apart


class StageExchanges:
    """Those of one rank's stages, as planned.

    Args:
        networks: the stages', by their number. apart: as of :func:`exchanges_of`.

    Attributes:
        behind_sends: whether a stage sends what its last backward made before these begin.
    """

    def __init__(
        self, networks: Mapping[int, ModelGraph], strategy: Strategy, settings: PlanSettings, apart: frozenset[str]
    ) -> None:
        self._networks, self._strategy = networks, strategy
        self._scatters = scatters_gradients(strategy, settings)
        self.behind_sends = framework_of(settings).sends_first
        self._buckets = {
            stage: [
                (axes, GradientBuckets(network, settings, apart, of_apart=of_apart))
                for axes, of_apart in exchanges_of(network, strategy, apart)
            ]
            for stage, network in networks.items()
        }

    def __bool__(self) -> bool:
        return any(self._buckets.values())

    def begin(
        self, builder: RoleBuilder, stage: int, backward_layers: Sequence[int], *, behind: bool
    ) -> list[GradientExchange]:
        """Those of a stage's last backward, which comes to these layers."""
        of_stage = builder, self._networks[stage]
        return [
            GradientExchange(
                *of_stage,
                buckets,
                backward_layers,
                ranks_along(self._strategy, axes),
                axes,
                scatters=self._scatters,
                behind=behind,
            )
            for axes, buckets in self._buckets[stage]
        ]

    @property
    def setup(self) -> Setup:
        """What is issued before the steady state among all ranks that hold a stage."""
        counts: Counter[tuple[str, str, int]] = Counter()
        for _, issued in self._issued(of_all=True):
            for *key, times in issued:
                counts[tuple(key)] += times  # type: ignore[index]
        return tuple((*key, times) for key, times in counts.items())

    @property
    def setup_apart(self) -> Before:
        """What is issued before along fewer axes."""
        return tuple(
            work
            for axes, issued in self._issued(of_all=False)
            for work in exchanged_along(issued, ranks_along(self._strategy, axes), axes)
        )

    def _issued(self, *, of_all: bool) -> Iterator[tuple[Axes, Setup]]:
        everyone = group_axes(self._strategy, Trait.REPLICATES)
        for exchanges in self._buckets.values():
            for axes, buckets in exchanges:
                if (axes == everyone) == of_all:
                    yield axes, issued_before_steady_state(buckets, buffers_in_second=False)
