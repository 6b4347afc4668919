"""A module as one rank of a strategy trains it: layers shared along one axis, gradients exchanged along others.

Axes nest: the innermost ones share layers, and whoever holds the same parameters then exchanges gradients. No
combination of kinds is written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.registry import discover
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.data.module import exchange_gradients
from paradl_bench.strategies.group_functions import Spans
from paradl_bench.strategies.mesh import REPLICATING, group_axes
from paradl_bench.strategies.process_mesh import ProcessMesh
from paradl_bench.strategies.sharded_module import AxisRunner, ShardedModule


@dataclass(frozen=True, slots=True)
class ParallelModule:
    """One rank's part of a model.

    Attributes:
        module: what is called in the place of the model.
        network: of the model, with the shapes that its parameters have on this rank.
        spans: layer-wise communication; it is stamped once its ``stamp`` is set.
    """

    module: torch.nn.Module
    network: Network
    spans: Spans


def axis_runners() -> dict[str, AxisRunner]:
    """What the ranks of each kind of axis that shares layers do, by kind."""
    return discover("paradl_bench.strategies", "RUNNER", AxisRunner, submodule="module")  # type: ignore[type-abstract]


def build_parallel(
    module: torch.nn.Module, network: Network, strategy: Strategy, settings: PlanSettings, device: torch.device
) -> ParallelModule:
    """The module as this rank trains it; a collective over all ranks where there are several.

    Args:
        module: the whole model on ``device``, with the same values on every rank; its parameters may be replaced.
        network: its traced network.

    Raises:
        UserError: a limit is exceeded, or bucket limits that torch cannot be given.
    """
    if not strategy.axes:
        return ParallelModule(module, network, Spans())
    mesh = ProcessMesh(strategy)
    runners = axis_runners()
    for index, axis in enumerate(strategy.axes):
        if axis.kind in runners and axis.degree > 1:
            sharding = runners[axis.kind].shard(module, network, axis, mesh.group((index,)), settings)
            module, network = ShardedModule(module, sharding), sharding.network
    replicating = group_axes(strategy, *REPLICATING)
    if replicating:
        group = mesh.group(replicating)
        module = exchange_gradients(module, network, settings, device, group.process_group)
    return ParallelModule(module, network, mesh.spans)
