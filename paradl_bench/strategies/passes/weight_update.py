"""The optimizer's step in a plan: what it updates, and where its state is fetched from."""

from __future__ import annotations

from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kinds.autocast import has_masters
from paradl_bench.network.optimizers import state_copies
from paradl_bench.plan.axis_planner import updating_planners
from paradl_bench.plan.compute import gradient_order
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Before, Phase, RoleBuilder, Stream, WeightUpdate
from paradl_bench.plan.works.moving import StateCopy


def weight_update(network: ModelGraph, settings: PlanSettings) -> WeightUpdate:
    """The optimizer step over every parameter that gets a gradient; optimizers pass over the others."""
    updated = set(gradient_order(network))
    parameters = [parameter for parameter in network.parameters if parameter.name in updated]
    elements = sum(parameter.elements for parameter in parameters)
    return WeightUpdate(optimizer=settings.optimizer, elements=elements, tensors=len(parameters))


def copies_of_state(settings: PlanSettings) -> int:
    """Tensors of a parameter's elements that an optimizer keeps, an fp32 copy of the parameter among them.

    Raises:
        UserError: an optimizer that is not known.
    """
    return state_copies(settings.optimizer) + has_masters(settings.dtype)


def add_weight_update(
    builder: RoleBuilder, work: WeightUpdate, settings: PlanSettings, after: tuple[int, ...] = ()
) -> int:
    """The weight update behind tasks, between copies of a state that lies in host memory; returns the last task."""
    if settings.offload == "none":
        return builder.add(work, Phase.WU, Stream.COMPUTE, after)
    copies = copies_of_state(settings)
    size, tensors = copies * work.elements * DTYPE_BYTES["fp32"], copies * work.tensors
    fetch, store = (StateCopy(direction=way, bytes=size, tensors=tensors) for way in ("fetch", "store"))
    fetched = builder.add(fetch, Phase.WU, Stream.COMPUTE, after)
    updated = builder.add(work, Phase.WU, Stream.COMPUTE, (fetched,))
    return builder.add(store, Phase.WU, Stream.COMPUTE, (updated,))


def add_update(
    builder: RoleBuilder,
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    after: tuple[int, ...],
    apart: frozenset[str],
) -> Before:
    """The weight update behind tasks, which replicas may share out; returns what that issues before the steady state.

    Args:
        network: with the parameters that a rank holds. apart: as of :class:`ShardedLayers`.
    """
    updates = (
        planner.add_update(builder, network, strategy, settings, after, apart)
        for planner in updating_planners(strategy)
    )
    before = next((issued for issued in updates if issued is not None), None)
    if before is None:
        add_weight_update(builder, weight_update(network, settings), settings, after)
    return before or ()
