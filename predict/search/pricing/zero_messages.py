"""What ZeRO's stages send, in seconds of a candidate's estimate: parts of a pipeline's stages, or of units."""

from __future__ import annotations

import numpy as np

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import gradient_order
from paradl_bench.plan.mesh import group_axes, sharing_axes
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.data.zero.units import shard_bytes, units_of
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.mesh import Mesh, Sharing
from predict.search.pricing.groups import Group, GroupCosts, group_along
from predict.search.pricing.shared_work import SharedWorks


class ZeroMessages:
    """Of all meshes of a space."""

    def __init__(self, groups: GroupCosts, shared: SharedWorks) -> None:
        self._groups, self._shared = groups, shared
        self._of_ranks: dict[tuple[int, tuple[int, ...]], Ints] = {}
        self._units: dict[tuple[Sharing, int], tuple[Floats, Floats]] = {}

    def links_of_parts(self, mesh: Mesh, strategy: Strategy) -> tuple[int, int, int, int]:
        """Links of stage 1's broadcasts, and in a pipeline of gathers, reductions and copies' sums of the other stages.

        A pipeline sends a rank's parts once an iteration.
        """
        if not mesh.zero or (mesh.zero > 1 and mesh.stages == 1):
            return 0, 0, 0, 0
        axes = sharing_axes(strategy)
        group = group_along(strategy, *axes)
        if mesh.zero == 1:
            return self._groups.link("broadcast", group), 0, 0, 0
        summed = self._groups.link("all_reduce", self._copies(strategy)) if mesh.copies > 1 else 0
        return 0, self._groups.link("all_gather", group), self._groups.link("reduce_scatter", group), summed

    def units_of_ranks(self, ranks: int, bounds: Ints) -> Ints:
        """Units that each rank of a pipeline has layers of; stages have as many of their own, or more."""
        key = ranks, tuple(bounds.tolist())
        if key not in self._of_ranks:
            counts = np.zeros(ranks, np.int64)
            for unit in units_of(self._shared.of_all.network)[:-1]:
                stages = np.searchsorted(bounds, list(unit.layers), side="right") - 1
                counts[np.unique(stages % ranks)] += 1
            self._of_ranks[key] = np.maximum(counts, 1)
        return self._of_ranks[key]

    def _copies(self, strategy: Strategy) -> Group:
        """Ranks that hold the same shards."""
        axes = sharing_axes(strategy)
        return group_along(strategy, *(i for i in group_axes(strategy, Trait.REPLICATES) if i not in axes))

    def seconds(self, mesh: Mesh, strategy: Strategy) -> float:
        """Seconds of a micro-batch's gathers and reductions in stages 2 and 3, without a pipeline."""
        if mesh.zero < 2 or mesh.stages > 1:
            return 0.0
        group, ranks = group_along(strategy, *sharing_axes(strategy)), mesh.parted
        gathered, reduced = self._unit_bytes(mesh.sharing, ranks)
        seconds = np.where(gathered > 0, self._groups.seconds("all_gather", group, gathered), 0.0)
        # Stage 3 gathers again for backward, but for what the whole model has of its own.
        seconds = seconds.sum() + (seconds[:-1].sum() if mesh.zero > 2 else 0.0)
        seconds += self._groups.seconds("reduce_scatter", group, reduced)[reduced > 0].sum()
        if mesh.copies > 1:
            seconds += self._groups.seconds("all_reduce", self._copies(strategy), reduced)[reduced > 0].sum()
        return float(seconds)

    def _unit_bytes(self, sharing: Sharing, ranks: int) -> tuple[Floats, Floats]:
        """Of a rank's part of each unit of ZeRO: what it gathers, and what it reduces; the whole model is the last."""
        key = sharing, ranks
        if key not in self._units:
            network = self._shared.of(sharing).network
            updated, units = set(gradient_order(network)), units_of(network)
            parts = [
                (own, tuple(parameter for parameter in own if parameter.name in updated))
                for own in (unit.parameters for unit in units)
            ]
            sizes = np.array([[shard_bytes(own, ranks) for own in part] for part in parts], float).T
            self._units[key] = sizes[0], sizes[1]
        return self._units[key]
