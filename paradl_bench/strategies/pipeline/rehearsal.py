"""Every stage of a pipeline run once on the meta device, before ranks are started: what they would refuse is refused.

A stage may touch no tensor of another one, but what it has received. Code that hides tensors from the tracer (in
objects of its own, by a function of another library) is found here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import kept_dtype
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import ShardedLayers, samples_at_once
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.pipeline.module import StageModule
from paradl_bench.strategies.pipeline.recording import Calls, OnMeta, copy_on_meta, record_calls, tensors_of
from paradl_bench.strategies.pipeline.running.stage_walk import StageWalk
from paradl_bench.strategies.pipeline.stage_shards import StageShard, shard_stage
from paradl_bench.strategies.pipeline.stages import cut_into_stages
from paradl_bench.strategies.running.operations import shaped
from paradl_bench.strategies.running.sharded_module import Sharding


def rehearse(module: torch.nn.Module, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
    """Run the stages of a strategy's pipeline; does nothing without one.

    Raises:
        UserError: the model asks for values, or a stage reads what it does not get; the message names the operation.
        WorkError: forward calls other operations than when it was traced.
    """
    ranks = degree_of(strategy, Trait.STAGES)
    if ranks == 1:
        return
    calls = record_calls(module, network, samples_at_once(strategy, settings))
    stages, on_meta = cut_into_stages(network, ranks, settings), copy_on_meta(module)
    # Autocast leaves tensors without memory as they are.
    plain = msgspec.structs.replace(settings, dtype=kept_dtype(settings.dtype))
    for stage in stages:
        shard = shard_stage(network, stage, ShardedLayers({}, network), plain)
        _run(on_meta, network, shard, calls, last=stage is stages[-1])


def _run(module: torch.nn.Module, network: ModelGraph, shard: StageShard, calls: Calls, *, last: bool) -> None:
    stage = shard.stage
    foreign = {_memory(tensor): index for index, call in enumerate(calls.operations) for tensor in call.tensors}
    for index in stage.made_again:
        for tensor in calls.operations[index].tensors:
            foreign.pop(_memory(tensor), None)

    def check(tensors: tuple[torch.Tensor, ...], what: str) -> None:
        hidden = next((tensor for tensor in tensors if tensor.is_meta and _memory(tensor) in foreign), None)
        if hidden is not None:
            made = network.layers[foreign[_memory(hidden)]].name
            raise UserError(
                f"{network.name} cannot run in stages: {what} reads what {made} made on another stage, which tracing"
                " did not see; give --stages that keep both together"
            )

    on_meta = OnMeta()

    class Rehearsed(StageWalk):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            index = self.index
            args, kwargs = on_meta((args, kwargs or {}))
            result = super().__torch_function__(function, types, args, kwargs)
            if stage.layers.start <= index < stage.layers.stop and self.index > index:
                check(tensors_of((args, kwargs)), network.layers[index].name)
            return result

    sharding = Sharding({}, network, run_layer=lambda _, function: shaped(function))
    part = StageModule(module, shard, sharding, calls, last=last, walk=Rehearsed)
    # What is recorded of the model's input, views of it included, is of another tensor.
    given = part.inputs() if stage.receives else (torch.empty_like(calls.inputs),)
    sent = part(*given)
    check(tensors_of(sent), "the loss" if last else "the next stage")


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
