"""What the cost model gives: the tasks of a plan with their costs, and sums over a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Compute, Phase, Plan, Role, Stream, TaskArrays, Work
from paradl_bench.records.measurement import PhaseName
from predict.costs.compute.model_costs import Spread
from predict.costs.kinds.kind_costs import PricingContext
from predict.costs.sourced import Costs, Floats, Remark, Remarks
from predict.costs.spread.assembly import Priced, add_up, assemble
from predict.costs.spread.stragglers import RankSpread


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with the costs of its works, in the order of ``plan.works``.

    Attributes:
        parts: what the costs were made of, one a work; what changed them later is not in them.
        rank_spread: how a rank's iterations spread. own_relative_sd: per work, how an event of it spreads by itself.
        straggler: of a pipeline, how much longer all of its ranks would compute to take as long as expected; else 1.
        slower: per role, how many times longer one of its ranks computes than measured; empty where none does.
            slow_copies: whether it copies gradients as much longer; of ghosts, whose host copies them, it does not.
        blocking: works that go on beside an all-reduce in flight (:mod:`predict.costs.communication.calls`).
        batches_ahead_bytes: of mini-batches that a rank holds before the iteration that computes them.
    """

    plan: Plan
    place: PricingContext
    costs: Costs
    parts: Sequence[Priced]
    rank_spread: RankSpread
    own_relative_sd: Floats
    straggler: float = 1.0
    slower: tuple[float, ...] = ()
    slow_copies: bool = True
    batches_ahead_bytes: int = 0
    blocking: frozenset[int] = frozenset()
    spread: Spread
    remarks: Remarks

    def blocking_tasks(self, role: Role) -> NDArray[np.bool_]:
        """:func:`blocking_tasks` of a role of the plan."""
        return blocking_tasks(self.plan.strategy, role.arrays.whole, self.blocking)


def blocking_tasks(strategy: Strategy, tasks: TaskArrays, blocking: frozenset[int]) -> NDArray[np.bool_]:
    """Per task of a role, whether it goes on beside an all-reduce in flight; ``blocking``: works that do.

    In a pipeline only behind the first task of the exchange: before, nothing but what the stage sends is in flight.
    """
    chosen = np.isin(tasks.work, sorted(blocking))
    if blocking and degree_of(strategy, Trait.STAGES) > 1:
        exchanging = (tasks.phase == Phase.GE) & (tasks.stream == Stream.COMMUNICATION)
        chosen &= np.logical_or.accumulate(exchanging)
    return chosen


@dataclass(frozen=True, kw_only=True)
class PricedSums:
    """Costs of a model's sums on one rank, in the order of :data:`SUMS`; ``groups`` are the works of each."""

    groups: Sequence[Sequence[tuple[Work, Priced]]]
    spread: Spread
    remarks: tuple[Remark, ...]

    @cached_property
    def costs(self) -> Costs:
        """Each sum as one part, with the errors that it shares with others."""
        groups = ([part for _, part in group] for group in self.groups)
        return add_up([assemble(parts, self.spread.common_relative_sd) for parts in groups])

    @cached_property
    def seconds(self) -> Floats:
        """Of each sum; of shape (sums,)."""
        parts = ([part for _, part in group] for group in self.groups)
        times = (
            np.array([(part.cost.seconds, part.occurrences) for part in group], float).reshape(-1, 2) for group in parts
        )
        return np.array([(seconds * counts).sum() for seconds, counts in (of_group.T for of_group in times)])

    def seconds_of_operations(self) -> dict[tuple[str, PhaseName], float]:
        """Of every operation and phase that the model computes, each once."""
        return {
            (work.operation, work.phase): part.cost.seconds
            for group in self.groups
            for work, part in group
            if isinstance(work, Compute)
        }
