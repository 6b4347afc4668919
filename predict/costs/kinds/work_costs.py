"""Seconds of the works of a plan, each by what its kind declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.profile.profile import Profile
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.tasks import Compute, FrameworkOverhead, Plan, WeightUpdate, Work
from predict.costs.communication.calls import calls_of
from predict.costs.communication.communication_costs import ALONE_ON_ITS_STREAM, CommunicationCosts
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.model_costs import ModelCosts
from predict.costs.kinds.catalog import costs_of
from predict.costs.kinds.kind_costs import KnownCosts, PlanContext, PricingContext, WorkContext
from predict.costs.sourced import Floats
from predict.costs.spread.assembly import Priced


@dataclass(slots=True, kw_only=True)
class WorkCosts:
    """Prices works of one model's plans.

    Args:
        proportional: a shard takes its share of the whole layer's time, whatever was measured of it.
    """

    known: KnownCosts
    proportional: bool

    def of_plan(self, plan: Plan, place: PricingContext, *, as_swept: bool = False) -> list[Priced]:
        """Parts in the order of ``plan.works``; the time between operations is shared out over a phase's tasks.

        Args:
            as_swept: no communication stands behind compute, or beside an all-reduce.
        """
        context, counts = self._context(plan, place)
        calls = [ALONE_ON_ITS_STREAM] * len(plan.works) if as_swept else calls_of(plan)
        return [
            costs_of(work).price(work, self.known, WorkContext(context, count, call))
            for work, count, call in zip(plan.works, counts, calls, strict=True)
        ]

    def of_computing(self, plan: Plan, place: PricingContext) -> dict[int, Priced]:
        """Parts of what computes of a plan's works (layers, time between them, weight update), by its index."""
        context, counts = self._context(plan, place)
        return {
            index: costs_of(work).price(work, self.known, WorkContext(context, counts[index], ALONE_ON_ITS_STREAM))
            for index, work in enumerate(plan.works)
            if work.way
        }

    def alone_on_host(self, work: Work, place: PricingContext) -> tuple[float, float]:
        """As :attr:`KindCosts.alone_on_host`; 1 and 0 for what does not compute."""
        return costs_of(work).alone_on_host(work, self.known, place)

    def relative_spreads(self, works: Sequence[Work], total_s: Floats, place: PricingContext) -> Floats:
        """Per work, the standard deviation of one event over its median; where not measured, the mean of what was.

        Args:
            total_s: per work, seconds of all its occurrences; the mean weighs by them.
        """
        found = np.array([costs_of(work).spread_of_event(work, self.known, place) for work in works], float)
        weights = total_s * (found > 0)
        usual = float(weights @ found / weights.sum()) if weights.sum() else 1.0
        return np.where(found > 0, found, usual)

    def _context(self, plan: Plan, place: PricingContext) -> tuple[PlanContext, list[int]]:
        """What a plan's works share, and how often each occurs."""
        # Where roles differ, a work counts as often as in the role that has it most.
        of_roles = [np.bincount(role.work, minlength=len(plan.works)) for role in plan.roles]
        counts = np.max(of_roles, axis=0).tolist()
        # A stage of a pipeline has a part of the model's operations, micro-batches go through them one by one, and
        # what is computed again goes through some of them twice.
        in_parts = degree_of(plan.strategy, Trait.STAGES) > 1 or plan.micro_batches > 1 or plan.recomputes
        context = PlanContext(
            place=place,
            strategy=plan.strategy,
            between=self.known.operations if in_parts else _counts_between(plan, counts),
            shard="" if self.proportional else _shard_of(plan),
            updated_elements=_updated_elements(plan),
        )
        return context, counts


def known_costs(
    profile: Profile,
    model_name: str,
    serial: Plan,
    layers: LayerCosts,
    model: ModelCosts,
    communication: CommunicationCosts,
) -> KnownCosts:
    """What is known of a model's single costs, of which ``serial`` is the plan on one rank."""
    times: list[int] = np.bincount(serial.roles[0].work, minlength=len(serial.works)).tolist()
    return KnownCosts(
        profile=profile,
        model_name=model_name,
        layers=layers,
        model=model,
        communication=communication,
        operations=_counts_between(serial, times),
        updated_elements=sum(work.elements for work in serial.of_kind(WeightUpdate).values()),
    )


def _updated_elements(plan: Plan) -> float:
    elements = np.zeros(len(plan.works), np.int64)
    for index, work in plan.of_kind(WeightUpdate).items():
        elements[index] = work.elements
    of_roles = [role.multiplicity * int(elements[role.work].sum()) for role in plan.roles]
    return sum(of_roles) * degree_of(plan.strategy, Trait.STAGES) / plan.strategy.ranks


def _shard_of(plan: Plan) -> str:
    found = {work.shard for work in plan.of_kind(Compute).values() if work.shard}
    return found.pop() if len(found) == 1 else ""


def _counts_between(plan: Plan, counts: Sequence[int]) -> Mapping[str, int]:
    """How many operations each phase has time between."""
    return {work.phase: counts[index] for index, work in plan.of_kind(FrameworkOverhead).items()}
