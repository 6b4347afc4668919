"""A mesh: what decides the work of a rank, in whatever order its axes stand; and numbers of ranks as products."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.options import AxisOptions
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.mesh import ranks_along, sharing_axes
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from predict.costs.sourced import Ints

Sharing = tuple[tuple[Axis, ...], tuple[AxisOptions, ...]]
"""Axes that share layers, and options of them that are tried."""
Settings = NDArray[np.int32]
"""Micro-batches, schedule, bucket size and what is computed again: a row for each, of indices but for micro-batches."""


class Mesh(NamedTuple):
    """What a rank works on, wherever it stands.

    Attributes:
        shared: axes that share layers, in the order in which they do. stages: ranks along the pipeline. replicas:
            along data. zero: the stage of that. copies: replicas that hold the same shards (hybrid sharding); 1 where
            all hold others.
    """

    shared: tuple[Axis, ...]
    stages: int
    replicas: int
    zero: int = 0
    chosen: tuple[AxisOptions, ...] = ()
    copies: int = 1

    @property
    def sharing(self) -> Sharing:
        """What decides a rank's part of the layers."""
        return self.shared, self.chosen

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those of more than one rank, data first, which has a stage of ZeRO by one rank too."""
        axes = [axis_along(Trait.DIVIDES_BATCH, self.copies)] if self.copies > 1 else []
        parted = self.replicas // self.copies
        # One rank of data parallelism says which stage ranks with other experts are sharded by.
        axes += [axis_along(Trait.DIVIDES_BATCH, parted, self.zero)] if parted > 1 or self.zero else []
        axes += [axis_along(Trait.STAGES, self.stages)] if self.stages > 1 else []
        return (*axes, *self.shared)

    @property
    def orders(self) -> list[tuple[Axis, ...]]:
        """Its placements: every order of its axes, with copies outside of what they are copies of."""
        axes = self.axes
        placements = itertools.permutations(axes)
        orders = [order for order in placements if self.copies == 1 or order.index(axes[0]) < order.index(axes[1])]
        return [order for order in orders if not self.zero or self.replicas > 1 or order[0] is axes[0]]

    @property
    def order_count(self) -> int:
        """How many placements it has: of copies, half of the orders have these outside; one replica stands first."""
        first = 1 if self.zero and self.replicas == 1 else 0
        return math.factorial(len(self.axes) - first) // (2 if self.copies > 1 else 1)

    @property
    def parted(self) -> int:
        """Ranks that a stage of ZeRO parts things over: those of :func:`~paradl_bench.plan.mesh.sharing_axes`."""
        return ranks_along(strategy := Strategy(axes=self.axes), sharing_axes(strategy)) if self.zero else 1

    @property
    def parted_apart(self) -> int:
        """Likewise of parameters that other ranks along the shared axes hold other parts of."""
        if not self.zero:
            return 1
        return ranks_along(strategy := Strategy(axes=self.axes), sharing_axes(strategy, of_apart=True))

    @property
    def sharers(self) -> int:
        """Ranks that share the layers of a stage."""
        return math.prod(axis.degree for axis in self.shared)

    @property
    def samplers(self) -> int:
        """Parts of the mini-batch that ranks see one each of."""
        return self.replicas * math.prod(axis.degree for axis in self.shared if axis.has(Trait.DIVIDES_BATCH))

    @property
    def holds_alone(self) -> bool:
        """Whether no other rank holds what this one holds of parameters that the shared axes part."""
        return self.replicas == 1 and self.samplers > 1

    @property
    def exchanges(self) -> bool:
        """Whether ranks hold the same parameters and exchange their gradients."""
        return self.replicas > 1 or any(axis.has(Trait.REPLICATES) for axis in self.shared)


class MeshColumns(NamedTuple):
    """What many meshes are, as arrays with an entry each: see the attributes of :class:`Mesh`."""

    stages: Ints
    samplers: Ints
    sharers: Ints
    zero: Ints
    copies: Ints
    exchanges: Ints
    parted: Ints
    parted_apart: Ints

    @classmethod
    def of(cls, meshes: Sequence[Mesh]) -> MeshColumns:
        """Of these meshes."""
        return cls(*np.array([[getattr(mesh, name) for name in cls._fields] for mesh in meshes], np.int64).T)


def of_one_sample(settings: PlanSettings, axes: Sequence[Axis]) -> PlanSettings:
    """The settings with one sample a rank: what ranks share of layers depends on no more of them, and is kept by it."""
    samplers = math.prod(axis.degree for axis in axes if axis.has(Trait.DIVIDES_BATCH))
    return msgspec.structs.replace(settings, batch=samplers, accumulate=1)


# A search asks for the same ones of each of its meshes.
@functools.lru_cache(maxsize=4096)
def axis_along(trait: Trait, degree: int, prefix: int = 0) -> Axis:
    """The axis that does what the trait says, with so many ranks."""
    return Axis(kind=kinds_with(trait)[0].name, extents=(degree,), prefix=prefix)


def choices_of(kind: AxisKind, settings: PlanSettings) -> Iterator[tuple[AxisOptions, ...]]:
    """Every choice of those options of a kind of axis that a search tries; of a kind without any, nothing chosen."""
    tried = [(options, shown) for options in kind.options for shown in options.shown if shown.name in options.tried]
    for choices in itertools.product(*(shown.choices for _, shown in tried)):
        chosen = settings
        for (options, shown), choice in zip(tried, choices, strict=True):
            chosen = chosen.changed(options, **shown.fields(choice))
        yield tuple(chosen.of(options) for options in dict.fromkeys(options for options, _ in tried))


def alike(*columns: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """Which entries of columns of whole numbers from 0 on are equal in all of them.

    The first of each kind, ordered by the columns, and the kind of each entry.
    """
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        several = int(column.max(initial=0)) + 1
        if int(key.max(initial=0)) >= np.iinfo(np.int64).max // several - 1:
            key = np.unique(key, return_inverse=True)[1]
        key = key * several + column
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    return first, kind


class MeshPlans(NamedTuple):
    """Plans of one mesh, which decide what its ranks hold.

    Attributes:
        counts: micro-batches of each. kind: index in ``kinds``.
        kinds: number of a schedule, and of what is held.
    """

    counts: Ints
    kind: Ints
    kinds: list[tuple[int, int]]

    @classmethod
    def of(cls, counts: Ints, schedule: Ints, again: Ints) -> MeshPlans:
        """Of these columns."""
        first, kind = alike(schedule, again)
        return cls(counts, kind, list(zip(schedule[first].tolist(), again[first].tolist(), strict=True)))


def plans_of(rows: Settings) -> tuple[MeshPlans, Ints]:
    """The plans of candidates, of which each row has the settings, and the plan of each."""
    counts, schedule, _, again = rows.T.astype(np.int64)
    first, plan = alike(counts, schedule, again)
    return MeshPlans.of(counts[first], schedule[first], again[first]), plan


def placements(stages: int, replicas: int, shared: int) -> int:
    """Orders of the axes of more than one rank."""
    return math.factorial((stages > 1) + (replicas > 1) + shared)


@functools.lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, the least first."""
    small = [part for part in range(1, math.isqrt(number) + 1) if not number % part]
    return tuple(sorted({*small, *(number // part for part in small)}))


def factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered products of so many factors."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorings(number // first, parts - 1) if parts > 1 else ():
            yield (first, *rest)
