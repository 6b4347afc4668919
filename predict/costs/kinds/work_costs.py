"""Seconds of the works of a plan, each by what its kind declares."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from paradl_bench.core.cache_keys import Same, numbered
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import backward_layers, layers_with_gradient
from paradl_bench.plan.mesh import degree_of, label_of_gathers
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.tasks import Communication, Compute, FrameworkOverhead, Plan, WeightUpdate, Work
from paradl_bench.strategies.passes.weight_update import weight_update
from predict.costs.communication.calls import calls_of
from predict.costs.communication.communication_costs import ALONE_ON_ITS_STREAM, Call
from predict.costs.compute.model_costs import ModelCosts
from predict.costs.kinds.catalog import costs_of
from predict.costs.kinds.kind_costs import KnownCosts, PlanContext, PricingContext, WorkContext
from predict.costs.sourced import Floats
from predict.costs.spread.assembly import Priced

_Alike = tuple[list[int], list[int]]


def parts_of(known: KnownCosts, plan: Plan, place: PricingContext, *, as_swept: bool = False) -> list[Priced]:
    """Parts in the order of ``plan.works``; the time between operations is shared out over a phase's tasks.

    Args:
        as_swept: no communication stands behind compute, or beside an all-reduce.
    """
    context, counts = _context(known, plan, place)
    calls, (first, alike) = plan.found.once(("calls alike", as_swept), lambda: _calls_alike(plan, counts, as_swept))
    priced = [
        costs_of(work).price(work, known, WorkContext(context, counts[index], calls[index]))
        for index, work in ((index, plan.works[index]) for index in first)
    ]
    return [priced[number] for number in alike]


def _calls_alike(plan: Plan, counts: Sequence[int], as_swept: bool) -> tuple[Sequence[Call], _Alike]:
    """How each work is called, and which are priced alike."""
    alone = as_swept or not plan.of_kind(Communication)
    calls = [ALONE_ON_ITS_STREAM] * len(plan.works) if alone else calls_of(plan)
    return calls, numbered(zip(map(_decisive, plan.works), counts, calls, strict=True))


def _decisive(work: Work) -> Hashable:
    return type(work), costs_of(work).decisive(work)


def computing_parts_of(known: KnownCosts, plan: Plan, place: PricingContext) -> dict[int, Priced]:
    """Parts of what computes of a plan's works (layers, time between them, weight update), by its index."""
    context, counts = _context(known, plan, place)
    return {
        index: costs_of(work).price(work, known, WorkContext(context, counts[index], ALONE_ON_ITS_STREAM))
        for index, work in enumerate(plan.works)
        if work.way
    }


def relative_spreads(known: KnownCosts, plan: Plan, total_s: Floats, place: PricingContext) -> Floats:
    """Per work, the deviation of one event over its median; where not measured, the mean by ``total_s``."""
    # No link and no rate of a device changes these.
    key = "spreads of events", Same(known.layers), Same(known.model), place
    spreads = plan.found.once(key, lambda: _spreads_of_events(known, plan, place))
    weights = total_s * (spreads > 0)
    usual = float(weights @ spreads / weights.sum()) if weights.sum() else 1.0
    return np.where(spreads > 0, spreads, usual)


def _spreads_of_events(known: KnownCosts, plan: Plan, place: PricingContext) -> Floats:
    first, alike = plan.found.once("works alike", lambda: numbered(map(_decisive, plan.works)))
    found = [costs_of(work).spread_of_event(work, known, place) for work in (plan.works[index] for index in first)]
    return np.array([found[number] for number in alike], float)


def _context(known: KnownCosts, plan: Plan, place: PricingContext) -> tuple[PlanContext, list[int]]:
    """What a plan's works share, and how often each occurs."""
    # Where roles differ, a work counts as often as in the role that has it most.
    of_roles = [role.counts(len(plan.works)) for role in plan.roles]
    counts = np.max(of_roles, axis=0).tolist()
    context = PlanContext(
        place=place,
        strategy=plan.strategy,
        between=known.operations if in_parts(plan) else counts_between(plan, counts),
        shard="" if known.proportional else shard_of(plan, known.model, place),
        updated_elements=_updated_elements(plan),
        stage_ranks=plan.stage_ranks,
    )
    return context, counts


def _updated_elements(plan: Plan) -> float:
    elements = np.zeros(len(plan.works), np.int64)
    for index, work in plan.of_kind(WeightUpdate).items():
        elements[index] = work.elements
    of_roles = [role.multiplicity * int(elements @ role.counts(len(plan.works))) for role in plan.roles]
    return sum(of_roles) * degree_of(plan.strategy, Trait.STAGES) / plan.strategy.ranks


def in_parts(plan: Plan) -> bool:
    """Whether a rank's iteration has another number of operations than the model.

    A stage of a pipeline has a part of the model's operations, micro-batches go through them one by one, and what is
    computed again goes through some of them twice.
    """
    return degree_of(plan.strategy, Trait.STAGES) > 1 or plan.micro_batches > 1 or plan.recomputes


def shard_of(plan: Plan, model: ModelCosts, place: tuple[int, int]) -> str:
    """What measurements call what a plan's ranks run of the model; empty where that is the whole model as it is.

    Layers that no axis splits are measured behind gathers of their parameters, where the profile has that.
    """
    labels = {work.shard for work in plan.of_kind(Compute).values() if work.shard}
    gathered = label_of_gathers(plan.strategy)
    if not labels and gathered and model.nearest_shard(*place, gathered):
        return gathered
    return labels.pop() if len(labels) == 1 else ""


def counts_between(plan: Plan, counts: Sequence[int]) -> Mapping[str, int]:
    """How many operations each phase has time between."""
    return {work.phase: counts[index] for index, work in plan.of_kind(FrameworkOverhead).items()}


def operations_between(network: ModelGraph) -> Mapping[str, int]:
    """The same of a rank that runs the whole network once, without a plan of it."""
    backward = backward_layers(network, layers_with_gradient(network))
    counts = {"FW": len(network.layers), "BW": len(backward)}
    return {phase: count for phase, count in counts.items() if count}


def updated_elements(network: ModelGraph) -> int:
    """Elements of the parameters that the weight update of the whole network changes."""
    return weight_update(network, PlanSettings(batch=1)).elements


def shares_of_layers(network: ModelGraph, plan: Plan) -> dict[str, tuple[str, float]]:
    """Per operation of a shard, the whole layer's and the shard's part of it: of its FLOPs, or else of its output."""
    whole = {layer.name: layer for layer in network.layers}
    shares = {}
    for layer, _ in plan.sharded:
        of = whole[layer.name]
        share = layer.fw_flops / of.fw_flops if of.fw_flops else layer.output_elements / max(of.output_elements, 1)
        # Experts' rows are as many as in data parallelism: what works on rows alone is the same operation.
        if layer.operation != of.operation:
            shares[layer.operation] = (of.operation, share)
    return shares
