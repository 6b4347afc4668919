"""Gradients limited by their norm over all parameters, before the weight update. Torch-free.

A rank takes the norm of the gradients that it holds. Where other ranks hold others, the squares are summed among them:
one all-reduce of one number, along all axes along which gradients differ. A gradient that several of these ranks hold
counts a share on each, so that it counts once. Then the rank scales its own gradients.

Along an axis gradients differ where its ranks hold parts of layers, stages of a pipeline, or shards of parameters (ZeRO
stages 2 and 3). They are alike where ranks hold the same parameters and have exchanged their gradients.

Source: torch/nn/utils/clip_grad.py (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import ShardingPlanner, axis_planner
from paradl_bench.plan.mesh import ranks_along, sharing_axes, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.plan.tasks import Before, Collective, GradientPass, Phase, RoleBuilder, Stream, WeightUpdate
from paradl_bench.strategies.frameworks.presets import scatters_gradients
from paradl_bench.strategies.passes.weight_update import weight_update


def axes_of_norm(strategy: Strategy) -> tuple[int, ...]:
    """Axes along which ranks hold other gradients than this one; none where every rank holds all of them."""
    shared = sharing_axes(strategy) if zero_stage(strategy) > 1 else ()
    axes = enumerate(strategy.axes)
    return tuple(i for i, axis in axes if axis.degree > 1 and (i in shared or _holds_others(axis)))


def _holds_others(axis: Axis) -> bool:
    """Whether ranks along an axis hold other parameters, or parts of them; those along a replicating one may do so."""
    cuts = axis.has(Trait.SHARDS_LAYERS) and not axis.has(Trait.REPLICATES)
    return cuts or axis.has(Trait.CUTS_EXPERTS) or axis.has(Trait.STAGES)


def ranks_alike(
    network: ModelGraph, strategy: Strategy, rank: int, settings: PlanSettings, holders: Mapping[str, int]
) -> dict[str, int]:
    """Per parameter, how many of the ranks that sum their squares hold the same gradient; 1 where it is missing.

    Args:
        network: the whole model's.
        holders: per parameter that several ranks along a pipeline hold, how many do.
    """
    counts: dict[str, int] = {}
    shared = sharing_axes(strategy) if zero_stage(strategy) > 1 else ()
    place = strategy.coordinates(rank)
    for index in axes_of_norm(strategy):
        axis, planner = strategy.axes[index], axis_planner(strategy.axes[index].declared)
        if index in shared:
            continue  # each holds rows of its own, of whatever it holds
        if isinstance(planner, ShardingPlanner):
            everywhere = [planner.parts_held(network, axis, at, settings) for at in range(axis.degree)]
            here = everywhere[place[index]]
            alike = {name: sum(parts.get(name) == here.get(name) for parts in everywhere) for name in _names(network)}
        else:
            alike = dict(holders)
        counts = {name: counts.get(name, 1) * alike.get(name, 1) for name in _names(network)}
    return counts


def _names(network: ModelGraph) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in network.parameters)


def add_clipping(
    builder: RoleBuilder,
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    after: tuple[int, ...] = (),
    held: WeightUpdate | None = None,
) -> tuple[int, ...]:
    """Limit the gradients of a role where the settings say so; returns what the weight update waits for.

    Args:
        network: with the parameters that the role holds. held: the update of all gradients that it holds, where they
            are shards of these.
    """
    if settings.clip_norm is None:
        return after
    update = held or weight_update(network, settings)
    parts = ranks_along(strategy, sharing_axes(strategy)) if scatters_gradients(strategy, settings) else 1
    elements = math.ceil(update.elements / parts)
    norm, scale = (GradientPass(part=part, elements=elements, tensors=update.tensors) for part in ("norm", "scale"))
    done = builder.add(norm, Phase.WU, Stream.COMPUTE, after)
    for _, work in sums_before(network, strategy, settings)[:1]:
        done = builder.add(work, Phase.WU, Stream.COMMUNICATION, (done,))
    return (builder.add(scale, Phase.WU, Stream.COMPUTE, (done,)),)


def sums_before(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> Before:
    """The sum of squares as the first two iterations issue it, like every later one; nothing where none is issued.

    Squares are added in fp32, whatever narrower dtype gradients have; in fp64 where a parameter has that.
    """
    axes = axes_of_norm(strategy)
    if settings.clip_norm is None or not axes:
        return ()
    ranks = ranks_along(strategy, axes)
    dtype = "fp64" if any(parameter.dtype == "fp64" for parameter in network.parameters) else "fp32"
    work = Collective(operation="all_reduce", message_bytes=DTYPE_BYTES[dtype], ranks=ranks, axes=axes)
    return tuple((when, work) for when in ("first", "rebuild"))
