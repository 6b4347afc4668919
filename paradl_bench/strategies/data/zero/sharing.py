"""Who shares out which parameters under a stage of ZeRO: all ranks, or those that hold the same experts. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph, Tensor
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import gradient_order
from paradl_bench.plan.mesh import group_axes, ranks_along, sharing_axes
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.data.zero.units import Unit, optimizer_parts, shard_elements


class Shares(NamedTuple):
    """How many ranks share parameters out.

    Attributes:
        ranks: of all parameters but some.
        apart: names of these, as of :class:`~paradl_bench.plan.axis_planner.ShardedLayers`. ranks_apart: that hold the
            same parts of them, and share those out.
        extents: ranks along each axis that shares parameters out, and whether it shares out those parts too; may be
            missing where nothing is held apart.
    """

    ranks: int
    apart: frozenset[str] = frozenset()
    ranks_apart: int = 1
    extents: tuple[tuple[int, bool], ...] = ()

    def of(self, parameter: Tensor) -> int:
        """Ranks that share a parameter out."""
        return self.ranks_apart if parameter.name in self.apart else self.ranks

    def elements(self, parameter: Tensor) -> int:
        """Those of the largest shard of a parameter; see :func:`shard_elements`."""
        ranks, apart = self.of(parameter), parameter.name in self.apart
        return shard_elements(parameter, ranks, cut_dim(parameter.shape, ranks, apart=apart))


def cut_dim(shape: Sequence[int], ranks: int, *, apart: bool) -> int:
    """The dim whose rows ranks share out: the first, or the second of fewer experts than ranks, as torchtitan does.

    torch takes another than the first only where the ranks divide it.
    """
    return int(apart and shape[0] < ranks and len(shape) > 1 and shape[1] % ranks == 0)


class Part(NamedTuple):
    """Parameters of a unit that the same ranks share out: a parameter group of ``fully_shard``.

    Attributes:
        unit: its name. apart: whether they are shared out by the ranks that hold the same parts. ranks: how many.
    """

    unit: str
    apart: bool
    ranks: int
    parameters: tuple[Tensor, ...]

    @property
    def key(self) -> tuple[str, bool]:
        """What tells parts of a network from each other."""
        return self.unit, self.apart

    def bytes_of(self, parameters: Iterable[Tensor]) -> int:
        """Bytes of each rank's shards of some of its parameters."""
        return sum(shard_elements(p, self.ranks, self._dim(p)) * DTYPE_BYTES[p.dtype] for p in parameters)

    def cut_inside(self, parameters: Iterable[Tensor]) -> int:
        """Bytes of those of some of its parameters that are cut along another dim, which torch copies once more."""
        return sum(parameter.bytes for parameter in parameters if self.ranks > 1 and self._dim(parameter))

    def _dim(self, parameter: Tensor) -> int:
        return cut_dim(parameter.shape, self.ranks, apart=self.apart)

    @property
    def shard_bytes(self) -> int:
        """Of each rank's shard."""
        return self.bytes_of(self.parameters)

    @property
    def whole_bytes(self) -> int:
        """Of what is gathered, padding included."""
        return self.ranks * self.shard_bytes


def parts_of(unit: Unit, shares: Shares) -> tuple[Part, ...]:
    """The parts of a unit, in the order in which forward gathers them; backward reduces them in the other order.

    The first is that of the first parameter, in the order of torch, which has those of a module behind those of the
    modules inside of it.
    """
    names = [parameter.name for parameter in unit.parameters]
    if shares.apart.isdisjoint(names):
        return (Part(unit.name, False, shares.ranks, unit.parameters),) if names else ()
    first = _first_from_inside(names) in shares.apart
    parts = (
        (is_apart, tuple(parameter for parameter in unit.parameters if (parameter.name in shares.apart) == is_apart))
        for is_apart in (first, not first)
    )
    ranks = {True: shares.ranks_apart, False: shares.ranks}
    return tuple(Part(unit.name, apart, ranks[apart], parameters) for apart, parameters in parts if parameters)


def _first_from_inside(names: list[str], prefix: str = "") -> str:
    inside = next((name for name in names if "." in name.removeprefix(prefix)), None)
    if inside is None:
        return names[0]
    module = f"{prefix}{inside.removeprefix(prefix).partition('.')[0]}."
    return _first_from_inside([name for name in names if name.startswith(module)], module)


class Groups(NamedTuple):
    """Axes along which parameters are shared out, and along which their shards are held several times; with ranks."""

    axes: tuple[int, ...]
    ranks: int
    outer_axes: tuple[int, ...]
    replicas: int

    @classmethod
    def of(cls, strategy: Strategy, *, of_apart: bool) -> Groups:
        """Those of parameters that are held apart, or of all others."""
        shared = sharing_axes(strategy)
        axes = sharing_axes(strategy, of_apart=of_apart)
        outer = tuple(index for index in group_axes(strategy, Trait.REPLICATES) if index not in shared)
        return cls(axes, ranks_along(strategy, axes), outer, ranks_along(strategy, outer))


class StateParts(NamedTuple):
    """Whose state ranks keep in an optimizer under stage 1.

    Attributes:
        apart: whether it updates parameters that are held apart, and not all others.
        by_rank: parameters of each rank that shares them out. own: those with a gradient, of the rank that updates most
            by all of its optimizers.
    """

    apart: bool
    by_rank: tuple[tuple[Tensor, ...], ...]
    own: tuple[Tensor, ...]


def state_parts(network: ModelGraph, shares: Shares) -> list[StateParts]:
    """The parts of each optimizer's state: what is held apart has one of its own, which steps behind the other."""
    found = []
    for apart, ranks in ((False, shares.ranks), (True, shares.ranks_apart)):
        parameters = [parameter for parameter in network.parameters if (parameter.name in shares.apart) == apart]
        found += [StateParts(apart, optimizer_parts(parameters, ranks), ())] if parameters else []
    updated = set(gradient_order(network))

    def own(place: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        return [tuple(p for p in parts.by_rank[place[parts.apart]] if p.name in updated) for parts in found]

    largest = max(map(own, _places(shares)), key=lambda kept: sum(p.elements for part in kept for p in part))
    return [parts._replace(own=part) for parts, part in zip(found, largest, strict=True)]


def _places(shares: Shares) -> Iterator[tuple[int, int]]:
    """Per rank its number among those that share parameters out, and among those that share out the same parts."""
    extents = shares.extents or ((shares.ranks, False),)
    for position in itertools.product(*(range(degree) for degree, _ in extents)):
        everyone = alike = 0
        for coordinate, (degree, shares_apart) in zip(position, extents, strict=True):
            everyone = everyone * degree + coordinate
            alike = alike * degree + coordinate if shares_apart else alike
        yield everyone, alike


class Sharing:
    """Who shares out which parameters.

    Attributes:
        groups: of parameters that are held apart, and of all others. shares: the ranks of both.
    """

    def __init__(self, strategy: Strategy, apart: frozenset[str] = frozenset()) -> None:
        self.groups = {of_apart: Groups.of(strategy, of_apart=of_apart) for of_apart in (False, True)}
        of_apart = self.groups[True].axes
        extents = tuple((strategy.axes[i].degree, i in of_apart) for i in self.groups[False].axes)
        self.shares = Shares(self.groups[False].ranks, apart, self.groups[True].ranks, extents)
