"""The plan of any nesting of axes: who shares layers, and who exchanges gradients with whom.

The rules of the axes are in the folders beside this file; here they are put together, so that no combination is written
by hand. At most one axis shares layers by filters, channels or positions; data (and spatial, whose ranks hold the same
parameters too) exchanges gradients as torch's DistributedDataParallel does, over all ranks that hold the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import Layer, Network
from paradl_bench.spec.plan import Limit, Phase, Plan, PlanSettings, Role, RoleBuilder, Stream, Work
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.axis_planner import AxisPlanner, SharedLayers, SharingPlanner
from paradl_bench.strategies.compute import NetworkCompute, weight_update
from paradl_bench.strategies.data.plan import (
    GradientBuckets,
    GradientExchange,
    add_buffer_broadcasts,
    issued_before_steady_state,
)
from paradl_bench.strategies.mesh import REPLICATING, degree_of, group_axes, positions


class NestedPlanner:
    """Plans the strategies of one name.

    Args:
        planners: of the strategy's axes, by kind.

    Raises:
        UserError: several axes share layers.
    """

    def __init__(self, strategy: Strategy, planners: Mapping[str, AxisPlanner]) -> None:
        self.name = strategy.name
        self._planners = [planners[axis.kind] for axis in strategy.axes]
        sharing = [planner.name for planner in self._planners if isinstance(planner, SharingPlanner)]
        if len(sharing) > 1:
            raise UserError(
                f"strategy {strategy}: {' and '.join(sharing)} both share layers out, and one of them can;"
                " nest one with data, as d2f2"
            )

    def plan(self, network: Network, strategy: Strategy, settings: PlanSettings) -> Plan:
        """The tasks of one iteration in the steady state; what is issued before it stands in ``Role.setup``.

        Raises:
            UserError: a limit is exceeded; the message names it.
        """
        self.check(network, strategy, settings)
        local_batch = settings.batch // degree_of(strategy, "data")
        exchange_axes = group_axes(strategy, *REPLICATING)
        works: dict[Work, int] = {}
        built: list[Role] = []
        notes: dict[str, None] = {}
        sharded: dict[str, tuple[Layer, int]] = {}
        for position in positions(strategy):
            shared = self._share(network, strategy, position, local_batch)
            exchanged = GradientBuckets(shared.network, settings).notes if exchange_axes else ()
            notes |= dict.fromkeys((*shared.notes, *exchanged))
            sharded |= _sharded_layers(shared)
            built.append(_build_role(shared, strategy, settings, works))
        roles, of_positions = _distinct(built, degree_of(strategy, "data"))
        return Plan(
            strategy=strategy,
            network=network.name,
            local_batch=local_batch,
            roles=roles,
            works=tuple(works),
            notes=tuple(notes),
            positions=of_positions,
            exchange_axes=exchange_axes,
            sharded=tuple(sharded.values()),
        )

    def check(self, network: Network, strategy: Strategy, settings: PlanSettings) -> None:
        """Refuse what cannot run; of an empty network, what no network could make right.

        Raises:
            UserError: says what would be right.
        """
        for index, planner in enumerate(self._planners):
            planner.check(network, strategy, index, settings)

    def _share(self, network: Network, strategy: Strategy, position: tuple[int, ...], local_batch: int) -> SharedLayers:
        for index, planner in enumerate(self._planners):
            if isinstance(planner, SharingPlanner) and strategy.axes[index].degree > 1:
                return planner.share(network, strategy, index, position[index], local_batch)
        return SharedLayers({}, network)

    def limits(self, network: Network, settings: PlanSettings) -> tuple[Limit, ...]:
        """The limit of each axis; of a strategy without axes, that it is one device."""
        if not self._planners:
            return (Limit(axis="serial", ranks=1, reason="serial runs on one device"),)
        return tuple(planner.limit(network, settings) for planner in self._planners)


def _build_role(shared: SharedLayers, strategy: Strategy, settings: PlanSettings, works: dict[Work, int]) -> Role:
    """What one rank does. The name and the multiplicity are given when equal roles are joined."""
    network, axes = shared.network, group_axes(strategy, *REPLICATING)
    builder = RoleBuilder(works)
    compute = NetworkCompute(builder, network, shared.shards)
    if not axes:
        compute.add_forward()
        last = tuple(task for _, task in compute.add_backward())[-1:]
        builder.add(weight_update(network, settings), Phase.WU, Stream.COMPUTE, last)
        return builder.build("device", 1)
    ranks = math.prod(strategy.axes[index].degree for index in axes)
    buckets = GradientBuckets(network, settings)
    compute.add_forward(add_buffer_broadcasts(builder, network, ranks, axes))
    exchange = GradientExchange(builder, network, buckets, compute.backward_layers, ranks, axes)
    last_task = -1
    for layer, last_task in compute.add_backward():
        exchange.add_ready(layer, last_task)
    done = exchange.add_finish(last_task)
    builder.add(weight_update(network, settings), Phase.WU, Stream.COMPUTE, done)
    return builder.build("replica", 1, issued_before_steady_state(network, buckets))


def _sharded_layers(shared: SharedLayers) -> dict[str, tuple[Layer, int]]:
    size = {parameter.name: parameter.bytes for parameter in shared.network.parameters}
    layers = [shard.layer for shard in shared.shards.values() if shard.shard]
    return {layer.operation: (layer, sum(size.get(name, 0) for name in layer.parameters)) for layer in layers}


_ARRAYS = ("phase", "stream", "work", "dependency_start", "dependencies")


def _distinct(built: list[Role], replicas: int) -> tuple[tuple[Role, ...], tuple[int, ...]]:
    """Roles that differ, each with as many ranks as do the same; and per position, which of them stands there."""
    index_of: dict[object, int] = {}
    of_positions = []
    for role in built:
        key = (role.setup, *(getattr(role, name).tobytes() for name in _ARRAYS))
        of_positions.append(index_of.setdefault(key, len(index_of)))
    counts = np.bincount(of_positions)
    roles = []
    for index, count in enumerate(counts.tolist()):
        first = built[of_positions.index(index)]
        name = first.name if len(counts) == 1 else f"{first.name} {index}"
        arrays = {array: getattr(first, array) for array in _ARRAYS}
        roles.append(Role(name=name, multiplicity=count * replicas, setup=first.setup, **arrays))
    return tuple(roles), tuple(of_positions)
