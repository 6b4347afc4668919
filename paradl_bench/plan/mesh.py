"""Ranks as a mesh whose axes are the strategy's, the outermost first, and the groups along them. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from paradl_bench.core.errors import uneven
from paradl_bench.core.units import counted
from paradl_bench.plan.axes.kind import IN_TURN, Trait
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.plan.tasks import Communication


def rank_at(strategy: Strategy, position: Sequence[int]) -> int:
    """The rank at these coordinates."""
    rank = 0
    for axis, coordinate in zip(strategy.axes, position, strict=True):
        rank = rank * axis.degree + coordinate
    return rank


def group_of(strategy: Strategy, axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """The ranks that share all of a rank's coordinates but those along ``axes``, itself included, ascending."""
    coordinates = strategy.coordinates(rank)
    members = [0]
    for index, axis in enumerate(strategy.axes):
        choices = range(axis.degree) if index in axes else (coordinates[index],)
        members = [member * axis.degree + choice for member in members for choice in choices]
    return tuple(members)


def members_of(strategy: Strategy, work: Communication, rank: int) -> tuple[int, ...]:
    """The ranks among which a rank of a strategy communicates, itself included, ascending."""
    axes, scope, per_node = work.group
    members = group_of(strategy, axes, rank)
    if scope == "group":
        return members
    local = members.index(rank) % per_node
    if scope == "between nodes":
        return members[local::per_node]
    first = members.index(rank) - local
    return members[first : first + per_node]


def all_groups(strategy: Strategy, axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Every group along ``axes``, in the order of their first ranks."""
    choices = [(0,) if i in axes else range(axis.degree) for i, axis in enumerate(strategy.axes)]
    first_ranks = (rank_at(strategy, position) for position in itertools.product(*choices))
    return tuple(sorted(group_of(strategy, axes, rank) for rank in first_ranks))


def group_axes(strategy: Strategy, *traits: Trait) -> tuple[int, ...]:
    """Indices of the axes that have one of these traits."""
    return tuple(i for i, axis in enumerate(strategy.axes) if any(map(axis.has, traits)))


def axes_that_shard(strategy: Strategy) -> tuple[int, ...]:
    """Indices of the axes of several ranks that shard layers, in the order in which each shards what comes of the last:
    an axis that cuts tokens does so of the heads and features that another one leaves on a rank."""
    several = (i for i in group_axes(strategy, Trait.SHARDS_LAYERS) if strategy.axes[i].degree > 1)
    return tuple(sorted(several, key=lambda i: [strategy.axes[i].has(trait) for trait in reversed(IN_TURN)]))


def place_of(strategy: Strategy, rank: int) -> int:
    """Index of a rank's place in its replica, in :func:`positions`."""
    place = 0
    for axis, coordinate in zip(strategy.axes, strategy.coordinates(rank), strict=True):
        if not axis.has(Trait.DIVIDES_BATCH):
            place = place * axis.degree + coordinate
    return place


def positions(strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """Coordinates of one replica's ranks: all those along the axes other than data, in order; 0 along data."""
    choices = [range(1 if axis.has(Trait.DIVIDES_BATCH) else axis.degree) for axis in strategy.axes]
    return tuple(itertools.product(*choices))


def degree_of(strategy: Strategy, *traits: Trait) -> int:
    """PEs along the axes that have one of these traits, together."""
    return math.prod(axis.degree for axis in strategy.axes if any(map(axis.has, traits)))


def check_batch(strategy: Strategy, batch: int) -> None:
    """Refuse a mini-batch of which some ranks would see more samples than others.

    Raises:
        UserError: it does not split evenly; the message names the nearest that do.
    """
    ranks = degree_of(strategy, Trait.DIVIDES_BATCH)
    if batch % ranks:
        along = [axis.kind for axis in strategy.axes if axis.has(Trait.DIVIDES_BATCH) and axis.degree > 1]
        named = f" of its {' and '.join(dict.fromkeys(along))} {'axis' if len(along) == 1 else 'axes'}"
        over = counted(ranks, "rank") + ("" if ranks == strategy.ranks else named)
        raise uneven(f"strategy {strategy}: batch {batch}", batch, ranks, over)


def divides_batch_alone(strategy: Strategy) -> bool:
    """Whether ranks each compute the whole model, on samples of their own; so of serial."""
    return all(axis.has(Trait.DIVIDES_BATCH) and not axis.has(Trait.SHARDS_LAYERS) for axis in strategy.axes)


def axes_apart(strategy: Strategy) -> tuple[int, ...]:
    """Axes along which ranks hold the same part of a parameter that others hold other parts of; none where one does."""
    axes = group_axes(strategy, Trait.REPLICATES)
    alike = tuple(index for index in axes if not strategy.axes[index].has(Trait.CUTS_EXPERTS))
    return alike if math.prod(strategy.axes[index].degree for index in alike) > 1 else ()


def zero_stage(strategy: Strategy) -> int:
    """The stage of ZeRO, which stands in front of an axis that divides the batch: 0 for none."""
    return max((axis.prefix for axis in strategy.axes if axis.has(Trait.DIVIDES_BATCH)), default=0)


def sharing_axes(strategy: Strategy, *, of_apart: bool = False) -> tuple[int, ...]:
    """Axes along which ranks share out what a stage of ZeRO parts: of all that exchange gradients, those but replicas
    without the stage, which then hold the same parts (hybrid sharding).

    Args:
        of_apart: of parameters that ranks hold other parts of along an axis that cuts experts, and not of those that
            all ranks along it hold.
    """
    axes, parted = group_axes(strategy, Trait.REPLICATES), zero_stage(strategy) > 0
    return tuple(i for i in axes if parted and _shares_out(strategy.axes[i], of_apart=of_apart))


def label_of_gathers(strategy: Strategy) -> str:
    """What measurements call a whole model whose parameters ranks gather layer by layer: ``z3d2``.

    Empty where nothing is gathered so (below stage 2 of ZeRO), layers are split, or stages of a pipeline keep theirs.
    """
    if zero_stage(strategy) < 2 or axes_that_shard(strategy) or degree_of(strategy, Trait.STAGES) > 1:
        return ""
    return "".join(str(strategy.axes[index]) for index in sharing_axes(strategy))


def _shares_out(axis: Axis, *, of_apart: bool) -> bool:
    if of_apart and axis.has(Trait.CUTS_EXPERTS):
        return False
    return bool(axis.prefix) or axis.has(Trait.SHARDS_LAYERS) or not axis.has(Trait.DIVIDES_BATCH)


def ranks_along(strategy: Strategy, axes: Sequence[int]) -> int:
    """PEs along these axes, together."""
    return math.prod(strategy.axes[index].degree for index in axes)
