"""One rank's stages of a pipeline, run by torch.distributed.pipelining in the order of a schedule.

A stage runs the model's own forward, whatever its control flow: operations of other stages are passed over
(:class:`StageModule`). So parameters keep their names and places, and a stage is the same range
of layers as in the plan. A rank holds the parameters of its own stages; the others' take no memory.

Where an axis shards layers, a stage runs its range of them under that axis' rules for the whole network.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils._pytree import tree_flatten, tree_unflatten

from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import has_masters, is_autocast
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import ShardedLayers, samples_at_once
from paradl_bench.plan.compute import gradient_order
from paradl_bench.plan.mesh import group_axes, zero_stage
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.exchange.replicated_module import exchange_gradients
from paradl_bench.strategies.exchange.stage_exchanges import exchange_axes, exchanges_of
from paradl_bench.strategies.pipeline.axis import PipelineOptions, micro_batches
from paradl_bench.strategies.pipeline.crossings import Crossing
from paradl_bench.strategies.pipeline.recording import INPUT, Calls, record_calls
from paradl_bench.strategies.pipeline.running.held_parameters import Registered, all_registered, hold_only
from paradl_bench.strategies.pipeline.running.shared_gradients import SharedGradients
from paradl_bench.strategies.pipeline.running.stage_walk import StageWalk, varies
from paradl_bench.strategies.pipeline.running.timed_stage import TimedStage, own_result
from paradl_bench.strategies.pipeline.stage_shards import (
    CrossingShape,
    StageShard,
    exchanged_by_stages,
    network_of_rank,
    shard_stage,
)
from paradl_bench.strategies.pipeline.stages import cut_into_stages, places_of_shared
from paradl_bench.strategies.running.autocast import TORCH_DTYPES, Entered, as_given, autocast_to, hold_weights
from paradl_bench.strategies.running.group_functions import Group, Reduce
from paradl_bench.strategies.running.sharded_module import Loss, Sharding, sharded_loss
from paradl_bench.strategies.running.spans import Spans


class RankPipeline:
    """The stages of one rank and the schedule that runs them: a
    :class:`~paradl_bench.strategies.running.axis_runners.StagedModule`.

    Parameters and buffers of other ranks' stages lose their memory.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        network: ModelGraph,
        strategy: Strategy,
        settings: PlanSettings,
        device: torch.device,
        loss: Loss,
        *,
        sharded: ShardedLayers,
        shard: Callable[[], Sharding],
        shard_parameters: Callable[[ModelGraph, frozenset[str]], Reduce | None],
        group_along: Callable[..., Group],
    ) -> None:
        # The stages know each other's operations by their whole shapes: recorded before layers are sharded.
        calls = record_calls(module, network, samples_at_once(strategy, settings), widened=has_masters(settings.dtype))
        hold_weights(module, settings.dtype, in_shards=zero_stage(strategy) > 1)
        self.sharding = sharding = shard()
        axes = group_axes(strategy, Trait.STAGES)
        # Stages tell each other their shapes in the first step, which has to be heard.
        group, self._after_first = group_along(axes, heard=True), group_along(axes).process_group
        schedule = schedule_of(settings.of(PipelineOptions).schedule)
        everywhere = cut_into_stages(network, group.size, settings)
        self.stages = tuple(stage for stage in everywhere if stage.rank == group.rank)
        self._count, self._last = micro_batches(settings, group.size), self.stages[-1] is everywhere[-1]
        missing = hold_only(module, self.stages)
        self._shared = SharedGradients(module, places_of_shared(network, everywhere), group_along(axes))
        self._reduce = shard_parameters(network_of_rank(network, self.stages, sharded), sharded.apart)
        shards = [shard_stage(network, stage, sharded, settings) for stage in self.stages]
        self._entered = entered = autocast_to(settings.dtype, device)
        made = functools.partial(
            StageModule, module, detachable=schedule.splits_backward, entered=entered, missing=missing
        )
        parts = [made(stage_shard, sharding, calls, last=stage_shard.stage is everywhere[-1]) for stage_shard in shards]
        self.module = torch.nn.ModuleList(parts)
        # Every rank makes every group, whether its stages have such parameters or not.
        groups = {along: group_along(along) for along in exchange_axes(strategy) if self._reduce is None}
        exchanged = _exchanging(parts, strategy, settings, device, groups, sharded.apart)
        self._running = running = [
            TimedStage(
                stage,
                part.stage.index,
                len(everywhere),
                device,
                input_args=part.inputs() if part.stage.receives else (as_given(calls.inputs, settings.dtype),),
                output_args=part.outputs(),
                group=group.process_group,
                spans=group.spans,
                arrival=gradient_order(part.shard.network),
            )
            for stage, part in zip(exchanged, parts, strict=True)
        ]
        kind = get_schedule_class(schedule.torch_name)
        self._schedule = kind(
            running[0] if issubclass(kind, PipelineScheduleSingle) else running,
            self._count,
            loss_fn=self._loss_of(loss, parts[-1], group.spans),
            # The loss is scaled instead: gradients come out right without another pass over them.
            scale_grads=False,
        )

    @property
    def holders(self) -> dict[str, int]:
        """How many ranks hold each parameter that several do."""
        return self._shared.holders

    @property
    def handed(self) -> list[torch.Tensor]:
        """Activations, and gradients that came back for them."""
        own = {stage.stage_index: stage for stage in self._running}
        taken: list[Mapping[int, tuple[Any, ...]]] = []
        for index, stage in own.items():
            taken += [stage.args_recv_info] if index - 1 in own else []
            taken += [stage.grad_recv_info] if index + 1 in own else []
        buffers = (info.buffer for turns in taken for infos in turns.values() for info in infos)
        return [buffer for buffer in buffers if buffer is not None]

    def _loss_of(self, loss: Loss, last: StageModule, spans: Spans) -> Loss:
        count, whole = self._count, sharded_loss(loss, self.sharding)

        def of_micro_batch(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
            with spans.span("FW"), self._entered():
                return whole(last.as_model_gives_it(outputs), targets) / count

        return of_micro_batch

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Forward and backward of all micro-batches; the mini-batch's loss where the last stage is, else None."""
        losses: list[torch.Tensor] = []
        arguments = () if self.stages[0].receives else (inputs,)
        self._schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        if self._reduce is not None:
            self._reduce()
        self._shared.add_up()
        for stage in self._running:
            stage.group = self._after_first
        return torch.stack([loss.detach() for loss in losses]).sum() if self._last else None


def _exchanging(
    parts: Sequence[StageModule],
    strategy: Strategy,
    settings: PlanSettings,
    device: torch.device,
    groups: Mapping[tuple[int, ...], Group],
    apart: frozenset[str],
) -> list[torch.nn.Module]:
    """A rank's stages with the exchanges along groups of their gradients, whatever else the rank holds."""
    networks, exchanged = exchanged_by_stages(part.shard for part in parts), []
    for part in parts:
        network, module = networks[part.stage.index], cast(torch.nn.Module, part)
        for axes, of_apart in exchanges_of(network, strategy, apart) if groups else ():
            group = groups[axes].process_group
            module = exchange_gradients(
                module, network, settings, device, group, model=part.module, apart=apart, of_apart=of_apart
            )
        exchanged.append(module)
    return exchanged


class PipelineRunner:
    """Builds the stages of a rank: see :class:`~paradl_bench.strategies.running.axis_runners.StagingRunner`."""

    build_stages = RankPipeline


RUNNER = PipelineRunner()


class StageModule(torch.nn.Module):
    """A range of the model's operations, from the values that the stage receives to those that it sends.

    Args:
        module: the model; the stages of a rank have it in common.
        shard: what this rank runs of the stage. sharding: how, by index in the whole network.
        calls: the whole model's operations for one micro-batch.
        last: whether the stage ends with the model's output.
        detachable: whether torch detaches in place what forward returns, as it does between the parts of backward: a
            view cannot be, and what is kept for the second part must not.
        entered: what forward runs in, autocast where it is trained in.
        missing: what of the model's parameters other ranks hold.
        walk: what runs the operations; None for :class:`StageWalk`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        shard: StageShard,
        sharding: Sharding,
        calls: Calls,
        *,
        last: bool,
        detachable: bool = False,
        entered: Entered = contextlib.nullcontext,
        missing: Sequence[Registered] = (),
        walk: type[StageWalk] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.shard = shard
        self.stage = shard.stage
        stage_rules = {index: rule for index, rule in sharding.rules.items() if index in self.stage.layers}
        self._sharding = sharding._replace(rules=stage_rules)
        self._calls, self._walk, self._entered = calls, walk, entered
        self._ends, self._detachable, self._missing = last, detachable, missing

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What forward takes, as tensors without memory."""
        if not self.stage.receives:
            return (self._calls.inputs,)
        return tuple(self._value(value, shape) for value, shape in self.shard.receives.items())

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """What forward returns, as tensors without memory."""
        if not self._ends:
            return tuple(self._value(value, shape) for value, shape in self.shard.sends.items())
        leaves, of_parts = tree_flatten(self._calls.outputs)[0], self._sharding.loss
        needed = [leaf for number, leaf in enumerate(leaves) if number in self._calls.needed]
        return tuple(map(of_parts.part, needed) if of_parts else needed)

    def _value(self, value: Crossing, crossing: CrossingShape) -> torch.Tensor:
        tensor = self._calls.operations[value.layer].tensors[value.output]
        # A layer's shape is per sample: the tensor's has the batch before it, in its first dim, or not at all.
        shape = list(tensor.shape)
        for dim in range(-len(crossing.whole), 0):
            shape[dim] = shape[dim] * crossing.held[dim] // crossing.whole[dim]
        # What was recorded knows no autocast.
        dtype = TORCH_DTYPES[crossing.dtype] if is_autocast(crossing.dtype) else tensor.dtype
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=tensor.is_floating_point())

    def forward(self, *received: torch.Tensor) -> Any:
        """What the stage sends; of the last one, the leaves of the model's output that the loss reads.

        Raises:
            WorkError: forward called other operations than when it was recorded.
        """
        # Views, since hooks on leaves of the graph call operations of their own, which would count as the model's.
        views = [value.view_as(value) for value in received] if self.stage.receives else []
        values = dict(zip(self.stage.receives, views, strict=True))
        receive = self._sharding.receive
        if receive:
            whole = {at for at, shape in self.shard.receives.items() if shape.is_whole}
            values = {at: value if at in whole else receive(*at, value) for at, value in values.items()}
        walk = (self._walk or StageWalk)(self._sharding, self._calls, self.shard, values, received[0].device)
        walk.missing = self._missing
        inputs = walk.first.get(INPUT, self._calls.inputs)
        if not self.stage.receives:
            versioned = _with_own_version(received[0])
            inputs = self._sharding.enter(versioned) if self._sharding.enter else versioned
        with all_registered(self._missing), walk, self._entered():
            outputs = self.module(inputs)
        if self._sharding.forget:
            self._sharding.forget()
        if walk.index != len(self._calls.operations):
            raise varies(self.stage.network.name, walk.index)
        if not self._ends:
            return self._outputs([self._sent(walk.kept[value], shape) for value, shape in self.shard.sends.items()])
        leaves = tree_flatten(outputs)[0]
        needed = [leaf for number, leaf in enumerate(leaves) if number in self._calls.needed]
        return self._outputs(self._sharding.leave(needed) if self._sharding.leave else needed)

    def _sent(self, value: torch.Tensor, shape: CrossingShape) -> torch.Tensor:
        # Code goes on holding a block where an operation was given all of it, and has changed that.
        whole = self._sharding.whole
        return (whole(value) if whole and shape.is_whole else value).contiguous()

    def _outputs(self, values: list[Any]) -> Any:
        """What forward returns; where torch detaches that in place, nothing that autograd has kept for itself."""
        apart = [own_result(value) for value in values] if self._detachable else values
        return apart[0] if len(apart) == 1 else tuple(apart)

    def as_model_gives_it(self, outputs: Any) -> Any:
        """The model's output from what forward returned; what the loss does not read may be from another stage."""
        needed = iter(outputs if isinstance(outputs, (tuple, list)) else [outputs])
        leaves, structure = tree_flatten(self._calls.outputs)
        taken = [next(needed) if number in self._calls.needed else leaf for number, leaf in enumerate(leaves)]
        return tree_unflatten(taken, structure)


def _with_own_version(micro_batch: torch.Tensor) -> torch.Tensor:
    """The same memory, whose changes count for this micro-batch alone.

    Micro-batches are views of one mini-batch. A model that changes its input in place would count as having changed
    what backward of the micro-batches before it still reads.
    """
    return micro_batch if micro_batch.requires_grad else micro_batch.data
