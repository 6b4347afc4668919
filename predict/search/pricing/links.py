"""What messages of strategies go over, and ZeRO's seconds: found once for all strategies whose ranks stand alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import axes_apart, group_axes, sharing_axes
from paradl_bench.plan.schedules.placement import Placement
from paradl_bench.plan.strategy import Strategy
from predict.costs.sourced import Floats, Ints, UnmeasuredCollective
from predict.search.candidates.mesh import Mesh, Sharing, alike
from predict.search.candidates.space import Space
from predict.search.pricing.groups import Group, GroupCosts
from predict.search.pricing.shared_work import SharedWorks
from predict.search.pricing.waits import Waits
from predict.search.pricing.zero_messages import ZeroMessages

KINDS = False, True
"""Whether parameters are held apart."""


class Cut(NamedTuple):
    """Stages of a pipeline over so many ranks.

    Attributes:
        key: ranks, and how stages lie over them. bounds: index of each stage's first layer, and of the end.
        stage_ranks: per stage, the rank that holds it. own: stages of each rank, a row of one of each.
        hop: per cut, between which place and the next one its messages go, either way; -1 for none.
        sent_bytes: over each cut, a sample; behind the last stage none.
    """

    key: tuple[int, Placement]
    bounds: Ints
    stage_ranks: Ints
    own: Ints
    hop: Ints
    sent_bytes: Floats

    @classmethod
    def of(cls, ranks: int, placement: Placement, bounds: Sequence[int], sent_bytes: Sequence[float]) -> Cut:
        """Of so many ranks."""
        places = np.array(placement.ranks_of_stages(ranks))
        own = np.array([placement.stages_of(rank, ranks) for rank in range(ranks)]).T
        here, there = places[:-1], places[1:]
        hop = np.where(here == there, -1, np.where((here + 1) % ranks == there, here, there))
        return cls((ranks, placement), np.array(bounds), places, own, hop, np.array(sent_bytes))


def sums_of_ranks(of_stages: NDArray[Any], placed: tuple[int, Placement]) -> Floats:
    """What each rank of a pipeline has over all its stages, from what each stage has.

    Args:
        placed: ranks, and how stages lie over them.
    """
    ranks, placement = placed
    return np.asarray(np.bincount(placement.ranks_of_stages(ranks), of_stages, ranks), float)


class Links(NamedTuple):
    """Of every strategy of a space, 0 of those that were not asked about, or are impossible.

    Attributes:
        possible: whether all has a price. sharing: number of what its ranks share of layers.
        sent: number of the links that activations go over, in :attr:`LinkFinder.hops`.
        exchanged, exchanged_apart: links that gradients go over, and those of parameters that are held apart.
        waits: number of what compute waits for.
        parts: links of :meth:`ZeroMessages.links_of_parts`, of all other parameters and of those that are held apart.
        zero_s: of a micro-batch's gathers and reductions in stages 2 and 3, without a pipeline.
    """

    possible: NDArray[np.bool_]
    sharing: Ints
    sent: Ints
    exchanged: Ints
    exchanged_apart: Ints
    waits: Ints
    parts: Ints
    zero_s: Floats


class LinkFinder:
    """Links of a space's strategies, at the costs of groups."""

    def __init__(self, space: Space, groups: GroupCosts, shared: SharedWorks) -> None:
        self._space, self._groups, self._shared = space, groups, shared
        self.waits, self.zero_messages = Waits(groups), ZeroMessages(groups, shared)
        self.sharings: dict[Sharing, int] = {}
        # The first is of ranks without stages, which send nothing.
        self._hops: dict[tuple[int, ...], int] = {(): 0}

    @property
    def hops(self) -> list[Ints]:
        """Links of pipelines: from each place along one to the next, and from the last to the first."""
        return [np.array(links, np.int64) for links in self._hops]

    def links(self, strategies: Ints, prepare: Callable[[int], None]) -> Links:
        """Of these strategies; why some are impossible is added to what the space counts.

        Args:
            strategies: indices, ascending. prepare: called with the index of each of their meshes, and may raise a
                UserError.
        """
        space, every = self._space, np.ones(len(strategies), bool)
        mesh = space.mesh_of[strategies]
        stages, zero, exchanges = (getattr(space.columns, name)[mesh] for name in ("stages", "zero", "exchanges"))
        asked = _Asked(len(strategies))

        def number(index: int) -> int:
            prepare(index)
            sharing = space.meshes[index].sharing
            self._shared.of(sharing)
            return self.sharings.setdefault(sharing, len(self.sharings))

        sharing = asked.each(number, every, mesh)
        held_apart = [bool(self._shared.of(each).apart) for each in self.sharings]
        apart = np.array([*held_apart, False])[sharing]
        placed = Placements([space.strategies[index] for index in strategies.tolist()], mesh, space.meshes)
        waits = asked.each(self._waiting, every, sharing, *placed.along_shared())
        all_reduce = partial(self._link, "all_reduce")
        sent = asked.each(self._sent, stages > 1, *placed.along(lambda own: group_axes(own, Trait.STAGES)))
        reduced = exchanges.astype(bool) & (zero < 2)
        exchanged = asked.each(all_reduce, reduced, *placed.along(lambda own: group_axes(own, Trait.REPLICATES)))
        exchanged_apart = asked.each(all_reduce, reduced & apart, *placed.along(axes_apart))
        # What ZeRO sends of all other parameters, and of those that are held apart.
        along_copies, kinds = placed.along(_along_copies), tuple(zip(KINDS, (every, apart), strict=True))
        groups = [(*placed.along(partial(sharing_axes, of_apart=kind)), *along_copies) for kind in KINDS]
        in_stages, whole = (zero == 1) | (zero > 0) & (stages > 1), (zero > 1) & (stages == 1)
        parts = [
            asked.each(self._parts, in_stages & have, zero, *groups[kind], none=(0, 0, 0, 0)) for kind, have in kinds
        ]
        zero_s = [
            asked.each(partial(self._zero_seconds, kind), whole & have, sharing, zero, *groups[kind], none=0.0)
            for kind, have in kinds
        ]
        self._rule_out(strategies, asked.errors)
        of_zero = np.stack(parts, axis=1), np.sum(zero_s, axis=0)
        found = asked.possible, sharing, sent, exchanged, exchanged_apart, waits, *of_zero
        return Links(*(self._of_all(strategies[asked.possible], column[asked.possible]) for column in found))

    def _of_all(self, strategies: Ints, column: NDArray[Any]) -> NDArray[Any]:
        of_all = np.zeros((len(self._space.strategies), *column.shape[1:]), column.dtype)
        of_all[strategies] = column
        return of_all

    def _rule_out(self, strategies: Ints, errors: dict[int, UserError]) -> None:
        for place, error in sorted(errors.items()):
            self._space.impossible.add(str(error))
            if isinstance(error, UnmeasuredCollective):
                self._space.impossible.lacks(self._space.strategies[strategies[place]], error.operation)

    def _link(self, operation: str, *group: int) -> int:
        return self._groups.link(operation, Group(*group))

    def _sent(self, *group: int) -> int:
        links = self._groups.links_of_hops(Group(*group), self._space.strategies[0].ranks)
        return self._hops.setdefault(links, len(self._hops))

    def _waiting(self, number: int, *groups: int) -> int:
        each = [Group(*groups[start : start + 4]) for start in range(0, len(groups), 4)]
        return self.waits.number(self._shared.of(self._sharing(number)), each)

    def _parts(self, zero: int, *groups: int) -> tuple[int, int, int, int]:
        return self.zero_messages.links_of_parts(zero, Group(*groups[:4]), Group(*groups[4:]))

    def _zero_seconds(self, of_apart: bool, number: int, zero: int, *groups: int) -> float:
        both = Group(*groups[:4]), Group(*groups[4:])
        return self.zero_messages.seconds(self._sharing(number), zero, *both, of_apart=of_apart)

    def _sharing(self, number: int) -> Sharing:
        return list(self.sharings)[number]


class _Asked:
    """What strategies are asked about, each answer found once.

    Attributes:
        possible: those without an error. errors: of others, the first.
    """

    def __init__(self, strategies: int) -> None:
        self.possible, self.errors = np.ones(strategies, bool), dict[int, UserError]()

    def each(self, find: Callable[..., Any], of: NDArray[np.bool_], *keys: Ints, none: Any = 0) -> NDArray[Any]:
        """What is found of the keys of some of the strategies, which say all that it depends on.

        Args:
            none: of all others, and of those with an error.
        """
        answers = np.full((len(of), *np.shape(none)), none)
        some = np.flatnonzero(of & self.possible)
        if not len(some):
            return answers
        columns = [key[some] for key in keys]
        first, kind = alike(*columns)
        found, errors = [], dict[int, UserError]()
        for at, key in enumerate(np.array(columns)[:, first].T.tolist()):
            try:
                found.append(find(*key))
            except UserError as error:
                found.append(none)
                errors[at] = error
        answers[some] = np.array(found)[kind]
        for place in np.flatnonzero(np.isin(kind, list(errors))).tolist() if errors else ():
            self.errors[int(some[place])] = errors[int(kind[place])]
            self.possible[some[place]] = False
        return answers


class Placements:
    """How the ranks of strategies stand, each a placement of the axes of its mesh."""

    def __init__(self, strategies: Sequence[Strategy], mesh: Ints, meshes: Sequence[Mesh]) -> None:
        distinct, self._row = np.unique(mesh, return_inverse=True)
        self._meshes = [meshes[index] for index in distinct.tolist()]
        # In the order of the mesh.
        self._ordered = [Strategy(axes=own.axes) for own in self._meshes]
        self._most = most = max(len(own.axes) for own in self._ordered)
        beyond = (most,) * most
        # Of each place from the outermost in, which of the mesh's axes stands there; one of one rank behind them.
        self._axis = np.array(
            [
                (*map(self._ordered[row].axes.index, own.axes), *beyond[len(own.axes) :])
                for row, own in zip(self._row.tolist(), strategies, strict=True)
            ],
            np.int64,
        )
        self._degree = self._of_axes([[axis.degree for axis in own.axes] for own in self._ordered], 1)
        self._staged = self._mask(group_axes(own, Trait.STAGES) for own in self._ordered)

    def along(self, axes: Callable[[Strategy], Sequence[int]]) -> Ints:
        """Groups along some axes of each: rows are the attributes of :class:`Group`."""
        return self._along(self._mask(map(axes, self._ordered)))

    def along_shared(self) -> list[Ints]:
        """Groups along each axis that shares layers, one below the other; of one rank where there are fewer."""
        firsts = [len(own.axes) - len(mesh.shared) for own, mesh in zip(self._ordered, self._meshes, strict=True)]
        most = max(len(mesh.shared) for mesh in self._meshes)
        masks = [
            self._mask(
                (first + at,) if at < len(mesh.shared) else () for first, mesh in zip(firsts, self._meshes, strict=True)
            )
            for at in range(most)
        ]
        return [column for mask in masks for column in self._along(mask)]

    def _mask(self, chosen: Iterable[Sequence[int]]) -> NDArray[np.bool_]:
        mask = np.zeros((len(self._ordered), self._most + 1), bool)
        for row, axes in zip(mask, chosen, strict=True):
            row[list(axes)] = True
        return np.asarray(mask[self._row[:, None], self._axis])

    def _of_axes(self, values: Sequence[Sequence[int]], beyond: int) -> Ints:
        padded = np.array([(*own, *(beyond,) * (self._most + 1 - len(own))) for own in values], np.int64)
        return np.asarray(padded[self._row[:, None], self._axis])

    def _along(self, chosen: NDArray[np.bool_]) -> Ints:
        return groups_along(self._degree, self._staged, chosen)


def groups_along(degree: Ints, staged: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> Ints:
    """The ranks along the chosen axes of each strategy, one rank where there are none: (4, strategies).

    Args:
        degree: of each axis from the outermost in. staged: whether stages of a pipeline stand along it. All of shape
            (strategies, axes).
    """
    after_first = np.logical_or.accumulate(chosen, axis=1)
    behind_last = ~np.logical_or.accumulate(chosen[:, ::-1], axis=1)[:, ::-1]
    others = after_first & ~chosen & ~staged
    masks = chosen, after_first, behind_last & chosen.any(axis=1, keepdims=True), others
    return np.array([np.where(mask, degree, 1).prod(axis=1) for mask in masks])


def _along_copies(strategy: Strategy) -> tuple[int, ...]:
    """Axes along which ranks hold the same shards."""
    axes = sharing_axes(strategy)
    return tuple(index for index in group_axes(strategy, Trait.REPLICATES) if index not in axes)
