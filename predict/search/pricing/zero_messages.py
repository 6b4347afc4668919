"""What ZeRO's stages send, in seconds of a candidate's estimate: parts of a pipeline's stages, or of units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import Same
from paradl_bench.plan.compute import gradient_order
from paradl_bench.strategies.data.zero.units import shard_bytes, units_of
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.mesh import Sharing
from predict.search.pricing.groups import Group, GroupCosts
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
        self._of_ranks: dict[tuple[frozenset[str], bool, tuple[int, ...], tuple[int, ...]], Ints] = {}

    def links_of_parts(self, zero: int, group: Group, copies: Group) -> tuple[int, int, int, int]:
        """Links of stage 1's broadcasts, and in a pipeline of gathers, reductions and copies' sums of the other stages.

        A pipeline sends a rank's parts once an iteration.

        Args:
            group: ranks that share parameters out. copies: those that hold the same shards.
        """
        if zero == 1:
            return self._groups.link("broadcast", group), 0, 0, 0
        summed = self._groups.link("all_reduce", copies)
        return 0, self._groups.link("all_gather", group), self._groups.link("reduce_scatter", group), summed

    def in_parts(
        self,
        sharings: Sequence[Sharing],
        sharing: Ints,
        bounds: Ints,
        stage_ranks: Ints,
        links: Ints,
        parted: Ints,
        held: Floats,
        *,
        of_apart: bool,
    ) -> Floats:
        """Seconds of an iteration's messages of parameters that ranks hold so many bytes of; of the shape of ``held``.

        Args:
            sharings: that are there; sharing: each row's index in them.
            bounds: of a pipeline's stages; stage_ranks: of each, its place along the pipeline.
            links: of :meth:`links_of_parts`, with a row for each. parted: over how many ranks.
            held: bytes, of shape (rows, ranks of a pipeline).
        """
        sent_s = np.zeros_like(held)
        some = np.flatnonzero(links.any(axis=1))
        if not len(some):
            return sent_s
        distinct, which = np.unique(sharing[some], return_inverse=True)
        units = np.array(
            [
                self.units_of_ranks(sharings[number], stage_ranks, bounds, of_apart=of_apart)
                for number in distinct.tolist()
            ]
        )[which]
        for column, times in enumerate((parted[some, None], units, units, units)):
            size = np.floor(held[some] / (units if column else 1))
            seconds = self._groups.seconds_over(links[some, column, None], size)
            sent_s[some] += times * np.where(size > 0, seconds, 0.0)
        return sent_s

    def units_of_ranks(self, sharing: Sharing, stage_ranks: Ints, bounds: Ints, *, of_apart: bool) -> Ints:
        """Units that each rank of a pipeline has parameters of; stages have as many of their own, or more.

        Args:
            stage_ranks, bounds: as of :meth:`in_parts`.
            of_apart: of parameters that are held apart, or else of all others.
        """
        network, apart = self._shared.network, self._shared.apart_of(sharing)
        key = apart, of_apart, tuple(stage_ranks.tolist()), tuple(bounds.tolist())
        if key not in self._of_ranks:
            counts = np.zeros(stage_ranks.max() + 1, np.int64)
            for unit in units_of(network)[:-1]:
                wanted = {parameter.name for parameter in unit.parameters if (parameter.name in apart) == of_apart}
                layers = [index for index in unit.layers if not wanted.isdisjoint(network.layers[index].parameters)]
                stages = np.searchsorted(bounds, layers, side="right") - 1
                counts[np.unique(stage_ranks[stages])] += 1
            self._of_ranks[key] = np.maximum(counts, 1)
        return self._of_ranks[key]

    def seconds(self, sharing: Sharing, zero: int, group: Group, copies: Group, *, of_apart: bool) -> float:
        """Seconds of a micro-batch's gathers and reductions in stages 2 and 3, without a pipeline.

        Args:
            group: ranks that share parameters out. copies: those that hold the same shards.
            of_apart: of parameters that are held apart, or else of all others.
        """
        links = (
            *(self._groups.link(name, group) for name in ("all_gather", "reduce_scatter")),
            self._groups.link("all_reduce", copies),
        )
        gathered, reduced = unit_bytes(self._shared, sharing, group.ranks, of_apart=of_apart)

        def find() -> float:
            total = 0.0
            if group.ranks > 1:
                seconds = np.where(gathered > 0, self._groups.seconds("all_gather", group, gathered), 0.0)
                # Stage 3 gathers again for backward, but for what the whole model has of its own.
                total += seconds.sum() + (seconds[:-1].sum() if zero > 2 else 0.0)
                total += self._groups.seconds("reduce_scatter", group, reduced)[reduced > 0].sum()
            if copies.ranks > 1:
                total += self._groups.seconds("all_reduce", copies, reduced)[reduced > 0].sum()
            return float(total)

        return self._groups.found.once((Same(gathered), Same(reduced), zero > 2, links), find)


def unit_bytes(shared: SharedWorks, sharing: Sharing, ranks: int, *, of_apart: bool = False) -> tuple[Floats, Floats]:
    """Of a rank's part of each unit of ZeRO, padding included, over so many: what it gathers, and what it reduces.

    The whole model is the last unit.

    Args:
        of_apart: of parameters that are held apart, or else of all others.
    """

    work = shared.of(sharing)
    # Many ways to share layers leave a rank parameters of the same shapes.
    shapes = shared.found.once(("shapes", sharing), lambda: tuple(parameter.shape for parameter in work.parameters))

    def find() -> tuple[Floats, Floats]:
        held = shared.found.once(("units", shapes, work.apart), lambda: _held(shared, sharing))
        sizes = np.where(held.apart == of_apart, held.shard_bytes(ranks), 0)
        updated = np.where(held.updated, sizes, 0.0)
        gathered, reduced = (np.bincount(held.unit, each, held.units) for each in (sizes, updated))
        return gathered.astype(float), reduced.astype(float)

    return shared.found.once(("units", shapes, work.apart, ranks, of_apart), find)


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
