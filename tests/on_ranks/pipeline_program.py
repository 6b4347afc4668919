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
from equality_program import TOLERANCE

from paradl_bench.measure.proof import proving
from paradl_bench.measure.proof.reference import JoinedRanks
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.calls.recorder import CollectiveRecorder, When, differences, planned_collectives
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.ranks.groups.process_group import end_groups
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.parallel import ParallelModule, build_parallel

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
        return next((axis.degree for axis in self.strategy.axes if axis.has(Trait.DIVIDES_BATCH)), 1)

    @property
    def settings(self) -> PlanSettings:
        return plan_settings(
            batch=SAMPLES * self.count * self.replicas,
            first_bucket_bytes=1000,
            bucket_cap_bytes=1000,
            micro_batches=self.count,
            schedule=self.schedule,
            stages=self.stages,
            filter_backward="reduce-scatter" if self.scatter else "all-reduce",
        )

    def load(self) -> tuple[LoadedModel, ModelGraph]:
        # Another test of this process keeps other networks under the same names, in a file of its own.
        return load(self.name), traced(self.name, os.environ.get(drawn_networks.KEPT, ""))

    def build(self, model: LoadedModel, network: ModelGraph, context: RankContext) -> ParallelModule:
        return build_parallel(model.module, network, self.strategy, self.settings, context.device, model.loss)


def load(name: str) -> LoadedModel:
    place, _, factory = name.rpartition(".")
    return load_model(f"{place or 'pipeline_networks'}:{factory}")


@functools.cache
def traced(name: str, kept_in: str) -> ModelGraph:
    """Once for all cases of a network, of ``kept_in`` where it was drawn: to load and trace it took as long as all
    iterations."""
    return trace_network(load(name))


def case_of(text: str) -> Case:
    name, strategy, schedule, count, *stages = text.split(":")
    cuts = tuple(word for word in stages if word != "scatter")
    return Case(name, parse_strategy(strategy), schedule, int(count), cuts, "scatter" in stages)


def compare_with_serial(case: Case, context: RankContext) -> tuple[dist.ProcessGroup, ...]:
    """Three iterations; losses, gradients, then what the optimizer makes of them. Returns groups to let go of."""
    model, network = case.load()
    serial, _ = case.load()
    model.module.double()
    serial.module.double()

    def build(model: LoadedModel) -> ParallelModule:
        built = case.build(model, network, context)
        assert built.pipeline is not None
        held = {p.name for stage in built.pipeline.stages for p in stage.network.parameters}
        assert held == {name for name, _ in model.module.named_parameters()}
        return built

    # Batch norms see each replica's micro-batches.
    about = proving.Case(network, case.strategy, case.settings, TOLERANCE)
    proof = proving.StrategyProof(about, model, serial, JoinedRanks(context), build)
    inputs, targets = model.make_batch(case.settings.batch, seed=7)
    for _ in range(3):
        found = proof.iterate(inputs.double() if inputs.is_floating_point() else inputs, targets)
        assert not found.differences, found.differences
        assert not (updated := proof.update()).differences, updated.differences
    return proof.groups


def compare_with_plan(case: Case, context: RankContext) -> tuple[dist.ProcessGroup, ...]:
    """Every collective and message of construction and of the first three iterations, in fp32; returns likewise."""
    model, network = case.load()
    # Ranks issue what they do in the order in which this device hands on gradients.
    with GradientOrder(model.module) as order:
        inputs, targets = model.make_batch(SAMPLES, seed=1)
        model.loss(model.module(inputs), targets).backward()
    model.module.zero_grad(set_to_none=True)
    network = order.of(network)
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
