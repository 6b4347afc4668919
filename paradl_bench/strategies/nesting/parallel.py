"""A module as one rank of a strategy trains it: layers sharded along some axes, gradients exchanged along others.

Axes nest: one shards layers, or several in turn, the stages of a pipeline take their ranges of them, and whoever holds
the same parameters then exchanges gradients. No combination of kinds is written by hand.

All of torch that this takes is loaded with it: some of its functions have the group of all ranks, as it is when they
are loaded, for a default, and would keep it after the ranks left.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import as_held
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import staging_axis
from paradl_bench.plan.mesh import axes_apart, axes_that_shard, group_axes, ranks_along, sharing_axes, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.exchange.fused_module import FusedModule, exchange_messages
from paradl_bench.strategies.exchange.node_groups import node_groups
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.exchange.replicated_module import exchange_gradients
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.process_mesh import ProcessMesh
from paradl_bench.strategies.passes.clipping import axes_of_norm, ranks_alike
from paradl_bench.strategies.passes.norm_statistics import statistics_axes
from paradl_bench.strategies.passes.recomputed_module import recompute_segments
from paradl_bench.strategies.passes.synchronised_norm import with_synchronised_norms
from paradl_bench.strategies.running.autocast import hold_weights
from paradl_bench.strategies.running.axis_runners import (
    ParameterRunner,
    Sharers,
    StagedModule,
    StagingRunner,
    axis_runner,
    sharding_runner,
)
from paradl_bench.strategies.running.clipped_gradients import GradientClipper, dtype_of_squares
from paradl_bench.strategies.running.group_functions import Reduce
from paradl_bench.strategies.running.nested_sharding import nest
from paradl_bench.strategies.running.parameters import StateGroups
from paradl_bench.strategies.running.sharded_module import (
    Loss,
    LossOfParts,
    OwnPart,
    RunLayer,
    ShardedModule,
    Sharding,
    sharded_loss,
)
from paradl_bench.strategies.running.spans import Spans
from paradl_bench.strategies.splitting.channel_shards import with_parameter_shapes

_NONE_TIED: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ParallelModule:
    """One rank's part of a model.

    Attributes:
        module: what is called in the place of the model.
        network: of the model, with the shapes that its parameters have on this rank.
        spans: layer-wise communication; it is stamped once its ``stamp`` is set.
        groups: process groups that it communicates over, the one of all ranks included.
        pipeline: what is stepped in the place of forward and backward where there is a pipeline; else None.
        state_groups: whose ranks part the optimizer's state (ZeRO stage 1); else None.
        sharding: of the layers; None where all of them run as they are.
        clipper: what limits gradients before the weight update; None where nothing does.
    """

    module: torch.nn.Module
    network: ModelGraph
    spans: Spans
    groups: tuple[dist.ProcessGroup, ...] = ()
    pipeline: StagedModule | None = None
    state_groups: StateGroups | None = None
    sharding: Sharding | None = None
    clipper: GradientClipper | None = None

    @property
    def own_part(self) -> OwnPart | None:
        """As of :class:`~paradl_bench.strategies.running.sharded_module.Sharding`; None where every tensor is whole."""
        return self.sharding.own_part if self.sharding else None

    @property
    def loss(self) -> LossOfParts | None:
        """As of :class:`~paradl_bench.strategies.running.sharded_module.Sharding`; None where outputs are whole."""
        return self.sharding.loss if self.sharding else None

    def sharded_loss(self, loss: Loss) -> Loss:
        """The loss as this rank computes it: of outputs that ranks hold parts of, that of the whole."""
        return sharded_loss(loss, self.sharding) if self.sharding else loss

    @contextlib.contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Inside, gradients are added up on this rank alone, where their exchange can wait for a later backward."""
        module = self.module
        with contextlib.ExitStack() as held:
            while isinstance(module, DistributedDataParallel | FusedModule):
                held.enter_context(module.no_sync())
                module = module.module
            yield


def build_parallel(
    module: torch.nn.Module,
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    device: torch.device,
    loss: Loss | None = None,
    run_layer: RunLayer | None = None,
) -> ParallelModule:
    """The module as this rank trains it; a collective over all ranks where there are several.

    Args:
        module: the whole model on ``device``, with the same values on every rank; its parameters may be replaced.
        network: its traced network.
        loss: a mean over samples; what a pipeline's last stage needs, and nothing else does.
        run_layer: what runs the model's layers, whatever the strategy; None for torch's own functions.

    Raises:
        UserError: a limit is exceeded, bucket limits that torch cannot be given, or a run of children of what is no
            sequence.
    """
    recompute_segments(module, network, settings)
    network, model, dtype = as_held(network, settings.dtype), module, dtype_of_squares(module)
    if staging_axis(strategy) is None:
        # Stages are recorded first, as the model is.
        hold_weights(module, settings.dtype, in_shards=bool(strategy.axes) and zero_stage(strategy) > 1)
    if not strategy.axes:
        alone = None
        if run_layer is not None:
            alone = Sharding({}, network, run_layer=run_layer)
            module = ShardedModule(module, alone)
        clipper = _clipper(model, network, None, settings, dtype)
        return ParallelModule(module, network, Spans(), sharding=alone, clipper=clipper)
    mesh = ProcessMesh(strategy)
    if staging_axis(strategy) is not None:
        assert loss is not None
        return _build_pipeline(module, network, mesh, settings, device, loss, run_layer)
    sharding = _sharding(module, network, strategy, settings, mesh)._replace(run_layer=run_layer)
    _shard_parameters(module, mesh, settings, device, sharding.network, sharding.apart)
    if sharding.rules or run_layer is not None:
        module = ShardedModule(module, sharding)
    if group_axes(strategy, Trait.REPLICATES):
        module = _exchanging(module, model, sharding, mesh, strategy, settings, device)
    clipper = _clipper(model, network, mesh, settings, dtype)
    return ParallelModule(
        module,
        sharding.network,
        mesh.spans,
        mesh.groups,
        state_groups=_state_groups(mesh, model, sharding.apart),
        sharding=sharding,
        clipper=clipper,
    )


def _clipper(
    model: torch.nn.Module,
    network: ModelGraph,
    mesh: ProcessMesh | None,
    settings: PlanSettings,
    dtype: torch.dtype,
    holders: Mapping[str, int] = _NONE_TIED,
) -> GradientClipper | None:
    """What limits the model's gradients, if the settings do; a collective. ``holders`` as of :func:`ranks_alike`."""
    if settings.clip_norm is None:
        return None
    if mesh is None or not axes_of_norm(mesh.strategy):
        return GradientClipper(model, settings.clip_norm, {}, None, dtype)
    alike = ranks_alike(network, mesh.strategy, dist.get_rank(), settings, holders)
    group = mesh.group(axes_of_norm(mesh.strategy)).process_group
    return GradientClipper(model, settings.clip_norm, alike, group, dtype)


def _shard_parameters(
    module: torch.nn.Module,
    mesh: ProcessMesh,
    settings: PlanSettings,
    device: torch.device,
    network: ModelGraph,
    apart: frozenset[str],
    *,
    in_stages: bool = False,
) -> Reduce | None:
    """Let axes that do so shard the model's own modules, whatever runs its layers then.

    Args:
        network: with the parameters that the rank holds. apart: of the whole model.
    """
    reduce, strategy = None, mesh.strategy
    if zero_stage(strategy) < 2:
        return None
    replicating, sharing = group_axes(strategy, Trait.REPLICATES), sharing_axes(strategy)
    outer = tuple(i for i in replicating if i not in sharing)
    everyone, replicas = mesh.group(sharing), mesh.group(outer) if ranks_along(strategy, outer) > 1 else None
    # Every rank makes every group, whether its stages have such parameters or not.
    alike = mesh.group(sharing_axes(strategy, of_apart=True)) if apart else everyone
    apart = apart.intersection(parameter.name for parameter in network.parameters)
    for index in replicating:
        axis = strategy.axes[index]
        runner = axis_runner(axis.declared)
        if isinstance(runner, ParameterRunner):
            sharers = Sharers(everyone, replicas, apart, alike)
            reduce_shards = runner.shard_parameters(module, network, axis, device, sharers, settings, in_stages)
            reduce = reduce_shards or reduce
    return reduce


def _exchanging(
    module: torch.nn.Module,
    model: torch.nn.Module,
    sharding: Sharding,
    mesh: ProcessMesh,
    strategy: Strategy,
    settings: PlanSettings,
    device: torch.device,
) -> torch.nn.Module:
    """The module with an exchange of its gradients among replicas, where nothing else exchanges them."""
    network, apart = sharding.network, sharding.apart
    everyone = mesh.group(group_axes(strategy, Trait.REPLICATES)).process_group
    if settings.of(ExchangeOptions).fused_bytes:
        return exchange_messages(module, model, network, settings, everyone)
    if zero_stage(strategy) > 1:
        return module
    nodes = node_groups(strategy, settings)
    over_nodes = None if nodes is None else mesh.node_exchange(nodes, device)
    whole = model if apart else None
    module = exchange_gradients(module, network, settings, device, everyone, over_nodes, model=whole, apart=apart)
    if apart and axes_apart(strategy):
        some = mesh.group(axes_apart(strategy)).process_group
        module = exchange_gradients(module, network, settings, device, some, model=model, apart=apart, of_apart=True)
    return module


def _sharding(
    module: torch.nn.Module, network: ModelGraph, strategy: Strategy, settings: PlanSettings, mesh: ProcessMesh
) -> Sharding:
    """The rules of the axes that shard layers, in turn, and those of batch norms that several ranks run."""
    sharding = Sharding({}, network)
    for number, index in enumerate(axes_that_shard(strategy)):
        axis = strategy.axes[index]
        of_axis = sharding_runner(axis.declared).shard(module, network, axis, mesh.group((index,)), settings)
        if number:
            held = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
            parts = axis.degree if axis.has(Trait.CUTS_TOKENS) else 1
            of_axis = nest(sharding, of_axis, with_parameter_shapes(network, held), parts)
        sharding = of_axis
    if settings.batch_norm == "sync":
        axes_of = statistics_axes(network, strategy, settings)
        groups = {index: mesh.group(axes) for index, axes in axes_of.items()}
        sharding = sharding._replace(rules=with_synchronised_norms(sharding.rules, groups, sharding.whole))
    return sharding


def _build_pipeline(
    module: torch.nn.Module,
    network: ModelGraph,
    mesh: ProcessMesh,
    settings: PlanSettings,
    device: torch.device,
    loss: Loss,
    run_layer: RunLayer | None,
) -> ParallelModule:
    # Of the whole model: each rank then holds its stages' parameters alone.
    strategy, dtype = mesh.strategy, dtype_of_squares(module)
    index = staging_axis(strategy)
    runner = None if index is None else axis_runner(strategy.axes[index].declared)
    assert isinstance(runner, StagingRunner)
    pipeline = runner.build_stages(
        module,
        network,
        strategy,
        settings,
        device,
        loss,
        sharded=planner_for(strategy).shards_of(dist.get_rank(), network, strategy, settings),
        shard=lambda: _sharding(module, network, strategy, settings, mesh)._replace(run_layer=run_layer),
        shard_parameters=functools.partial(_shard_parameters, module, mesh, settings, device, in_stages=True),
        group_along=mesh.group,
    )
    sharding = pipeline.sharding
    clipper = _clipper(module, network, mesh, settings, dtype, pipeline.holders)
    return ParallelModule(
        pipeline.module,
        sharding.network,
        mesh.spans,
        mesh.groups,
        pipeline,
        _state_groups(mesh, module, sharding.apart),
        sharding=sharding,
        clipper=clipper,
    )


def _state_groups(mesh: ProcessMesh, model: torch.nn.Module, apart: frozenset[str]) -> StateGroups | None:
    """Whose ranks part the optimizer's state of what they hold alike; None where none do."""
    strategy = mesh.strategy
    if zero_stage(strategy) != 1:
        return None
    everyone, alike = mesh.group(sharing_axes(strategy)), None
    if apart and ranks_along(strategy, axes := sharing_axes(strategy, of_apart=True)) > 1:
        alike = mesh.group(axes).process_group
    held_apart = tuple(parameter for name, parameter in model.named_parameters() if name in apart)
    return StateGroups(everyone.process_group, held_apart, alike)
