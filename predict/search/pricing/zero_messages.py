"""What ZeRO's stages send, in seconds of a candidate's estimate: parts of a pipeline's stages, or of units."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import gradient_order
from paradl_bench.plan.mesh import group_axes, ranks_along, sharing_axes
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.data.zero.units import shard_bytes, units_of
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.mesh import Mesh, Sharing
from predict.search.pricing.groups import Group, GroupCosts, group_along
from predict.search.pricing.shared_work import SharedWorks


class _Held(NamedTuple):
    """Parameters: arrays with an entry each.

    Attributes:
        units: of ZeRO, the whole model included. unit: which of them each is in.
        rows: along the first dim. row_bytes: of one of these. updated: whether it gets a gradient.
        apart: whether only ranks that hold the same part of it share that out. second: rows along the second dim.
    """

    units: int
    unit: Ints
    rows: Ints
    row_bytes: Ints
    updated: NDArray[np.bool_]
    apart: NDArray[np.bool_]
    second: Ints

    def shard_bytes(self, ranks: int) -> Ints:
        """Of each rank's shards, where so many ranks share out all of them."""
        inside = self.apart & (self.rows < ranks) & (self.second % ranks == 0)
        return np.where(inside, self.rows * self.row_bytes // ranks, -(-self.rows // ranks) * self.row_bytes)


class ZeroMessages:
    """Of all meshes of a space."""

    def __init__(self, groups: GroupCosts, shared: SharedWorks) -> None:
        self._groups, self._shared = groups, shared
        self._of_ranks: dict[tuple[frozenset[str], bool, int, tuple[int, ...]], Ints] = {}

    def links_of_parts(self, mesh: Mesh, strategy: Strategy, *, of_apart: bool) -> tuple[int, int, int, int]:
        """Links of stage 1's broadcasts, and in a pipeline of gathers, reductions and copies' sums of the other stages.

        A pipeline sends a rank's parts once an iteration.

        Args:
            of_apart: of parameters that are held apart, or else of all others.
        """
        if not mesh.zero or (mesh.zero > 1 and mesh.stages == 1):
            return 0, 0, 0, 0
        if of_apart and not self._shared.of(mesh.sharing).apart:
            return 0, 0, 0, 0
        group = group_along(strategy, *sharing_axes(strategy, of_apart=of_apart))
        if mesh.zero == 1:
            return self._groups.link("broadcast", group), 0, 0, 0
        summed = self._groups.link("all_reduce", self._copies(strategy)) if mesh.copies > 1 else 0
        return 0, self._groups.link("all_gather", group), self._groups.link("reduce_scatter", group), summed

    def units_of_ranks(self, sharing: Sharing, ranks: int, bounds: Ints, *, of_apart: bool) -> Ints:
        """Units that each rank of a pipeline has parameters of; stages have as many of their own, or more.

        Args:
            of_apart: of parameters that are held apart, or else of all others.
        """
        network, apart = self._shared.network, self._shared.apart_of(sharing)
        key = apart, of_apart, ranks, tuple(bounds.tolist())
        if key not in self._of_ranks:
            counts = np.zeros(ranks, np.int64)
            for unit in units_of(network)[:-1]:
                wanted = {parameter.name for parameter in unit.parameters if (parameter.name in apart) == of_apart}
                layers = [index for index in unit.layers if not wanted.isdisjoint(network.layers[index].parameters)]
                stages = np.searchsorted(bounds, layers, side="right") - 1
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
        kinds = (False, True) if self._shared.of(mesh.sharing).apart else (False,)
        return sum(self._seconds_of(mesh, strategy, of_apart=kind) for kind in kinds)

    def _seconds_of(self, mesh: Mesh, strategy: Strategy, *, of_apart: bool) -> float:
        """Likewise of parameters that are held apart, or of all others."""
        axes = sharing_axes(strategy, of_apart=of_apart)
        ranks, group = ranks_along(strategy, axes), group_along(strategy, *axes)
        gathered, reduced = unit_bytes(self._shared, mesh.sharing, ranks, of_apart=of_apart)
        total = 0.0
        if ranks > 1:
            seconds = np.where(gathered > 0, self._groups.seconds("all_gather", group, gathered), 0.0)
            # Stage 3 gathers again for backward, but for what the whole model has of its own.
            total += seconds.sum() + (seconds[:-1].sum() if mesh.zero > 2 else 0.0)
            total += self._groups.seconds("reduce_scatter", group, reduced)[reduced > 0].sum()
        if mesh.copies > 1:
            total += self._groups.seconds("all_reduce", self._copies(strategy), reduced)[reduced > 0].sum()
        return float(total)


def unit_bytes(shared: SharedWorks, sharing: Sharing, ranks: int, *, of_apart: bool = False) -> tuple[Floats, Floats]:
    """Of a rank's part of each unit of ZeRO, padding included, over so many: what it gathers, and what it reduces.

    The whole model is the last unit.

    Args:
        of_apart: of parameters that are held apart, or else of all others.
    """

    def find() -> tuple[Floats, Floats]:
        held = shared.found.once(("units", sharing), lambda: _held(shared, sharing))
        sizes = np.where(held.apart == of_apart, held.shard_bytes(ranks), 0)
        updated = np.where(held.updated, sizes, 0.0)
        gathered, reduced = (np.bincount(held.unit, each, held.units) for each in (sizes, updated))
        return gathered.astype(float), reduced.astype(float)

    return shared.found.once(("units", sharing, ranks, of_apart), find)


def _held(shared: SharedWorks, sharing: Sharing) -> _Held:
    """Parameters of a rank's part, which every number of ranks parts anew."""
    network, apart = shared.network_of(sharing), shared.apart_of(sharing)
    updated, units = set(gradient_order(network)), units_of(network)
    own = [(index, parameter) for index, unit in enumerate(units) for parameter in unit.parameters]
    return _Held(
        len(units),
        np.array([index for index, _ in own], np.int64),
        np.array([parameter.shape[0] for _, parameter in own], np.int64),
        np.array([shard_bytes((parameter,), max(parameter.shape[0], 1)) for _, parameter in own], np.int64),
        np.array([parameter.name in updated for _, parameter in own], bool),
        np.array([parameter.name in apart for _, parameter in own], bool),
        np.array([(*parameter.shape, 1)[1] for _, parameter in own], np.int64),
    )
