"""What every rank of a pipeline's test runs: its training beside the serial one, then every message against the plan.

Usage: pipeline_program.py CASE...; a case is network:strategy:schedule:micro-batches[:first layer of a stage]...,
with :scatter for a reduce-scatter in filter's backward.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from typing import NamedTuple

import drawn_networks
import torch
import torch.distributed as dist
from equality_program import assert_close, norm_cuts, own_parts, take_statistics_apart
from torch import nn

from paradl_bench.collectives.process_group import end_groups
from paradl_bench.measure.process_groups import RankContext, join_ranks
from paradl_bench.measure.recorder import CollectiveRecorder, When, differences, planned_collectives
from paradl_bench.measure.tracing import trace_network
from paradl_bench.models.catalog import LoadedModel, load_model
from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import Strategy, parse_strategy
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.parallel import ParallelModule, build_parallel
from paradl_bench.strategies.spatial.region import region_of

SAMPLES = 2
"""Of a micro-batch."""


class Case(NamedTuple):
    """One case on one rank."""

    name: str
    strategy: Strategy
    schedule: str
    count: int
    stages: tuple[str, ...]
    scatter: bool = False

    @property
    def replicas(self) -> int:
        return next((axis.degree for axis in self.strategy.axes if axis.kind == "data"), 1)

    @property
    def settings(self) -> PlanSettings:
        return PlanSettings(
            batch=SAMPLES * self.count * self.replicas,
            first_bucket_bytes=1000,
            bucket_cap_bytes=1000,
            micro_batches=self.count,
            schedule=self.schedule,
            stages=self.stages,
            filter_backward="reduce-scatter" if self.scatter else "all-reduce",
        )

    def load(self) -> tuple[LoadedModel, Network]:
        # Another test of this process keeps other networks under the same names, in a file of its own.
        return load(self.name), traced(self.name, os.environ.get(drawn_networks.KEPT, ""))

    def build(self, model: LoadedModel, network: Network, context: RankContext) -> ParallelModule:
        return build_parallel(model.module, network, self.strategy, self.settings, context.device, model.loss)


def load(name: str) -> LoadedModel:
    place, _, factory = name.rpartition(".")
    return load_model(f"{place or 'pipeline_networks'}:{factory}")


@functools.cache
def traced(name: str, kept_in: str) -> Network:
    """Once for all cases of a network, of ``kept_in`` where it was drawn: to load and trace it took as long as all
    iterations."""
    return trace_network(load(name))


def case_of(text: str) -> Case:
    name, strategy, schedule, count, *stages = text.split(":")
    cuts = tuple(word for word in stages if word != "scatter")
    return Case(name, parse_strategy(strategy), schedule, int(count), cuts, "scatter" in stages)


def layers_on_blocks(case: Case, network: Network) -> set[str]:
    """Names of the layers that run on blocks of positions; those behind read whole activations."""
    axis = next(axis for axis in case.strategy.axes if axis.kind == "spatial")
    return {network.layers[index].name for index in region_of(network, axis, case.settings).layers}


def run_serially(serial: LoadedModel, inputs: torch.Tensor, targets: torch.Tensor, parts: int) -> torch.Tensor:
    """The mini-batch's loss and gradients, part by part: batch norms see each replica's micro-batches."""
    pairs = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
    loss = torch.stack([serial.loss(serial.module(x), y) / parts for x, y in pairs]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def compare_with_serial(case: Case, context: RankContext) -> tuple[dist.ProcessGroup, ...]:
    """Three iterations; losses, gradients, then what the optimizer makes of them. Returns groups to let go of."""
    model, network = case.load()
    serial, _ = case.load()
    model.module.double()
    serial.module.double()
    blocks = [(dim, parts) for dim, parts in norm_cuts(case.strategy, case.settings) if dim >= 2]
    if blocks:
        take_statistics_apart(serial.module, blocks, within=layers_on_blocks(case, network))
    inputs, targets = model.make_batch(case.settings.batch, seed=7)
    places = zip(case.strategy.axes, case.strategy.coordinates(context.rank), strict=True)
    replica = next((at for axis, at in places if axis.kind == "data"), 0)
    local = SAMPLES * case.count
    own = slice(replica * local, (replica + 1) * local)
    built = case.build(model, network, context)
    pipeline = built.pipeline
    assert pipeline is not None
    modules = (model.module, serial.module)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in modules]
    held = dict(model.module.named_parameters())
    assert set(held) == {p.name for stage in pipeline.stages for p in stage.network.parameters}
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = pipeline.step(inputs.double()[own], targets[own])
        exact = run_serially(serial, inputs.double(), targets, case.count * case.replicas)
        if loss is not None and case.replicas == 1:
            assert_close(loss, exact)
        compare_parameters(held, serial.module, own_parts(network, case.strategy, context.rank, ()))
        for optimizer in optimizers:
            optimizer.step()
    if case.replicas == 1 and not blocks:
        exact_buffers = dict(serial.module.named_buffers())
        for name, buffer in model.module.named_buffers():
            assert_close(buffer, exact_buffers[name])
    return built.groups[1:]


def compare_parameters(held: dict[str, nn.Parameter], serial: nn.Module, parts: dict[str, tuple[slice, ...]]) -> None:
    exact = dict(serial.named_parameters())
    for name, parameter in held.items():
        of = parts.get(name, ())
        gradient = exact[name].grad
        assert_close(parameter, exact[name][of])
        assert (parameter.grad is None) == (gradient is None), name
        if parameter.grad is None or gradient is None:
            continue
        assert_close(parameter.grad, gradient[of])


def compare_with_plan(case: Case, context: RankContext) -> tuple[dist.ProcessGroup, ...]:
    """Every collective and message of construction and of the first three iterations, in fp32; returns likewise."""
    model, network = case.load()
    plan = planner_for(case.strategy).plan(network, case.strategy, case.settings)
    with CollectiveRecorder() as recorder:
        built = case.build(model, network, context)
    pipeline = built.pipeline
    assert pipeline is not None
    issued = list(recorder.issued("setup"))
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.01)
    recorded: tuple[When, ...] = ("first", "rebuild", "iteration")
    for when in recorded:
        with CollectiveRecorder() as recorder:
            pipeline.step(*model.make_batch(SAMPLES * case.count, seed=1))
            optimizer.step()
            optimizer.zero_grad()
        issued += recorder.issued(when)
    found = differences(issued, planned_collectives(plan, context.rank))
    assert not found, "; ".join(found)
    assert any(item.when == "iteration" and item.operation == "send_recv" for item in issued)
    return built.groups[1:]


def main(cases: list[str]) -> None:
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        # What was imported stays: a collection after each case is to be of that case.
        gc.freeze()
        for text in cases:
            try:
                for compare in (compare_with_serial, compare_with_plan):
                    groups = compare(case_of(text), context)
                    context.barrier()
                    # Those of hundreds of cases would leave thousands of threads.
                    end_groups(groups)
            except BaseException as error:
                raise AssertionError(f"{text}{_drawn(text)}, rank {context.rank}: {error}") from error


def _drawn(text: str) -> str:
    """What a network looks like that was drawn."""
    place, _, name = text.partition(":")[0].rpartition(".")
    return f" {json.dumps(drawn_networks.kept(name))}" if place == "drawn_networks" else ""


if __name__ == "__main__":
    main(sys.argv[1:])
