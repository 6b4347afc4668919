"""What every rank of a pipeline's test runs: its training beside the serial one, then every message against the plan.

Usage: pipeline_program.py CASE...; a case is network:strategy:schedule:micro-batches[:first layer of a stage]...,
with :scatter for a reduce-scatter in filter's backward, :sequence for parts of the sequence, :unsummed where their
gradients of norms are not summed, which both comparisons have to find, :all-to-all and :ring for these exchanges of
context parallelism, :again=MODULE[+MODULE]... for what is computed again (body.1-4 for the run body.1:4), :clip for
gradients that are scaled to half of their norm, and :bf16 to train by autocast, with or without a pipeline;
:bf16-weights with parameters in bf16 too, of which the optimizer keeps fp32 copies, and :reduced with gradients of
shards reduced in fp32.

bf16 keeps 8 bits, so that serial training in it is off by some share of what fp64 gives. A strategy rounds at other
places: partial sums before they are added up, micro-batches by themselves. It may be off by ``MOST_TIMES`` as much, and
not by more; a rule that is wrong is off by the gradient itself. Where whole layers run on the same micro-batches, what
is left is the order in which fp32 gradients are added up, ``LEAST_TIMES`` as much at most; bf16 ones are rounded then.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import drawn_networks
import msgspec
import torch
import torch.distributed as dist
from equality_program import TOLERANCE
from shared_traces import trace_together, traced
from torch.distributed.tensor import DTensor

from paradl_bench.measure.execution.micro_steps import MicroSteps
from paradl_bench.measure.execution.optimizers import LEARNING_RATE, build_optimizer, optimizer_of
from paradl_bench.measure.proof import proving
from paradl_bench.measure.proof.parts import own_parts, place_of, whole
from paradl_bench.measure.proof.reference import JoinedRanks
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.training.calls.recorder import CollectiveRecorder, When, differences, planned_collectives
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import has_masters
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.ranks.groups.process_group import end_groups
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.parallel import ParallelModule, build_parallel
from paradl_bench.strategies.passes.lower_precision import settings_of_update
from paradl_bench.strategies.running import summed_gradients
from paradl_bench.strategies.running.autocast import as_given, autocast_to, hold_weights

SAMPLES = 2
"""Of a micro-batch."""
MOST_TIMES, LEAST_TIMES = 2.0, 1e-3
LOWERED = ("bf16", "bf16-weights")
EXCHANGES = ("all-to-all", "ring")
WORDS = (*EXCHANGES, "scatter", "clip", "sequence", "unsummed", "reduced", *LOWERED)
STEPPED = LEARNING_RATE * sum((1, 1.9, 2.71))
"""How far three steps of SGD with momentum go along one gradient."""
Gradients = dict[str, torch.Tensor]
WHEN: tuple[When, ...] = ("first", "rebuild", "iteration")


class Case(NamedTuple):
    """One case on one rank."""

    name: str
    strategy: Strategy
    schedule: str
    count: int
    stages: tuple[str, ...]
    scatter: bool = False
    lowered: str = ""
    again: tuple[str, ...] = ()
    clipped: bool = False
    sequence: bool = False
    unsummed: bool = False
    reduced: bool = False
    exchange: str = "gather"

    @property
    def replicas(self) -> int:
        return degree_of(self.strategy, Trait.DIVIDES_BATCH)

    @property
    def settings(self) -> PlanSettings:
        return plan_settings(
            batch=SAMPLES * self.count * self.replicas,
            first_bucket_bytes=1000,
            bucket_cap_bytes=1000,
            micro_batches=self.count,
            schedule=self.schedule,
            stages=self.stages,
            recompute=self.again,
            clip_norm=1e6 if self.clipped else None,
            filter_backward="reduce-scatter" if self.scatter else "all-reduce",
            context_exchange=self.exchange,
            sequence_parallel="on" if self.sequence else "off",
            reduce_dtype="fp32" if self.reduced else "own",
        )

    def load(self) -> tuple[LoadedModel, ModelGraph]:
        return load(self.name), network_of(self.name)

    def build(self, model: LoadedModel, network: ModelGraph, context: RankContext) -> ParallelModule:
        return build_parallel(model.module, network, self.strategy, self.settings, context.device, model.loss)


def load(name: str) -> LoadedModel:
    return load_model(_whole_name(name))


def network_of(name: str) -> ModelGraph:
    return traced(_whole_name(name), _drawn(name))


def _whole_name(name: str) -> str:
    place, _, factory = name.rpartition(".")
    return f"{place or 'pipeline_networks'}:{factory}"


def case_of(text: str) -> Case:
    name, strategy, schedule, count, *stages = text.split(":")
    cuts = tuple(word for word in stages if word not in WORDS and "=" not in word)
    again = tuple(name.replace("-", ":") for word in stages if "=" in word for name in word[6:].split("+"))
    parsed = parse_strategy(strategy)
    lowered = next((word for word in stages if word in LOWERED), "")
    scatter, clipped = "scatter" in stages, "clip" in stages
    found = Case(name, parsed, schedule, int(count), cuts, scatter, lowered, again=again, clipped=clipped)
    exchange = next((word for word in stages if word in EXCHANGES), "gather")
    found = found._replace(sequence="sequence" in stages, unsummed="unsummed" in stages, reduced="reduced" in stages)
    return found._replace(exchange=exchange)


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
        if case.unsummed:
            assert found.differences, "training is serial without the sums"
            break
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
    optimizer = build_optimizer("sgd", model.module.parameters(), built.state_groups)
    for when in WHEN:
        with CollectiveRecorder() as recorder:
            pipeline.step(*model.make_batch(SAMPLES * case.count, seed=1))
            if built.clipper is not None:
                built.clipper.clip()
            optimizer.step()
            optimizer.zero_grad()
        issued += recorder.issued(when)
    found = differences(issued, planned_collectives(plan, context.rank))
    assert bool(found) == case.unsummed, "; ".join(found) or "nothing is missing without the sums"
    assert any(item.when == "iteration" and item.operation == "send_recv" for item in issued)
    return built.groups[1:]


def without_sums(case: Case) -> contextlib.AbstractContextManager[Any]:
    """Inside, no gradients of parameters are summed over parts of the sequence, if the case asks for that."""
    if not case.unsummed:
        return contextlib.nullcontext()
    return mock.patch.object(summed_gradients, "sum_gradients", lambda parameters, _: tuple(parameters))


def settings_of(case: Case) -> PlanSettings:
    return msgspec.structs.replace(case.settings, dtype=case.lowered, batch=2 * SAMPLES * case.count * case.replicas)


def serial_gradients(case: Case, dtype: str, samples: int) -> Gradients:
    """Of the mean over all samples, computed ``samples`` at a time."""
    model, _ = case.load()
    hold_weights(model.module, case.lowered)
    if dtype == "fp64":
        model.module.double()
    return gradients_of(model, case, dtype, samples)


def gradients_of(model: LoadedModel, case: Case, dtype: str, samples: int) -> Gradients:
    inputs, targets = model.make_batch(settings_of(case).batch, seed=7)
    inputs = as_given(inputs, dtype)
    parts = len(inputs) // samples
    for own, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        with autocast_to(dtype, torch.device("cpu"))():
            read = own.double() if dtype == "fp64" and own.is_floating_point() else own
            loss = model.loss(model.module(read), wanted)
        (loss / parts).backward()
    return {name: p.grad.double() for name, p in model.module.named_parameters() if p.grad is not None}


def serial_copies(case: Case, samples: int) -> Gradients:
    """How far the fp32 copies of parameters move in three steps of the serial model."""
    model, _ = case.load()
    hold_weights(model.module, case.lowered)
    optimizer = optimizer_of(settings_of(case), model.module.parameters(), None, None)
    before = {name: p.detach().double() for name, p in model.module.named_parameters()}
    for _ in WHEN:
        gradients_of(model, case, case.lowered, samples)
        optimizer.step()
        optimizer.zero_grad()
    return moved(model, optimizer, before)


def moved(model: LoadedModel, optimizer: torch.optim.Optimizer, before: Gradients) -> Gradients:
    """By parameter whose copy this rank keeps, what was added to that; the parameter itself is the rounded copy."""
    kept = getattr(optimizer, "optim", optimizer).state
    copies = {name: kept[p]["master"] for name, p in model.module.named_parameters() if "master" in kept.get(p, {})}
    parameters = dict(model.module.named_parameters())
    assert all(torch.equal(parameters[name], copy.bfloat16()) for name, copy in copies.items())
    # Shards take the place of copies.
    copies |= {name: whole(p.detach()) for name, p in parameters.items() if isinstance(p, DTensor)}
    assert all(copy.dtype == torch.float32 for copy in copies.values())
    return {name: copy.double() - before[name] for name, copy in copies.items()}


def iterate(built: ParallelModule, model: LoadedModel, case: Case, own: slice) -> None:
    inputs, targets = (tensor[own] for tensor in model.make_batch(settings_of(case).batch, seed=7))
    inputs = as_given(inputs, case.lowered)
    if built.pipeline is not None:
        built.pipeline.step(inputs, targets)
        return
    entered = autocast_to(case.lowered, torch.device("cpu"))
    MicroSteps(built, model.loss, inputs, targets, 1, entered).run(None, lambda: None, [], lambda _: None)


def compare_lowered(case: Case, context: RankContext) -> tuple[dist.ProcessGroup, ...]:
    settings = settings_of(case)
    place = place_of(case.strategy, settings, context.rank)
    exact = serial_gradients(case, "fp64", settings.batch)
    serial = serial_gradients(case, case.lowered, place.samples)
    model, network = case.load()
    hold_weights(model.module, case.lowered)
    with GradientOrder(model.module) as order, autocast_to(case.lowered, context.device)():
        inputs, targets = model.make_batch(SAMPLES, seed=1)
        model.loss(model.module(as_given(inputs, case.lowered)), targets).backward()
    network = order.of(network)
    plan = planner_for(case.strategy).plan(network, case.strategy, settings)
    with CollectiveRecorder() as recorder:
        built = build_parallel(model.module, network, case.strategy, settings, context.device, model.loss)
    issued = list(recorder.issued("setup"))
    of_update = settings_of_update(case.strategy, settings)
    optimizer = optimizer_of(of_update, model.module.parameters(), built.state_groups, None)
    before = {name: whole(p.detach()).double() for name, p in model.module.named_parameters()}
    for when in WHEN:
        model.module.zero_grad(set_to_none=True)
        with CollectiveRecorder() as recorder:
            iterate(built, model, case, place.own)
            if has_masters(case.lowered):
                optimizer.step()
        issued += recorder.issued(when)
    found = differences(issued, planned_collectives(plan, context.rank))
    assert not found, "; ".join(found)
    parts = own_parts(network, case.strategy, context.rank, settings)
    gradients = {name: whole(p.grad).double() for name, p in model.module.named_parameters() if p.grad is not None}
    held = {name: (serial[name][parts.get(name, ())], exact[name][parts.get(name, ())]) for name in gradients}
    rounding = apart((of_serial, of_exact) for of_serial, of_exact in held.values())
    assert rounding > 0, "serial training in bf16 is exact: nothing was rounded"
    off = apart((gradient, held[name][1]) for name, gradient in gradients.items()) / rounding
    assert off < MOST_TIMES, f"off by {off:.2f} times as much as serial training in bf16"
    if has_masters(case.lowered):
        check_copies(case, moved(model, optimizer, before), held, place.samples, parts)
    elif not any(axis.has(Trait.SHARDS_LAYERS) for axis in case.strategy.axes):
        off = apart((gradient, held[name][0]) for name, gradient in gradients.items()) / rounding
        assert off < LEAST_TIMES, f"off serial training in bf16 by {off:.2g} times as much as that is off fp64"
    return built.groups[1:]


def check_copies(
    case: Case,
    own: Gradients,
    held: dict[str, tuple[torch.Tensor, torch.Tensor]],
    samples: int,
    parts: dict[str, Any],
) -> None:
    """Hold the steps of copies against the serial ones, and these against the gradients in fp64."""
    serial = serial_copies(case, samples)
    assert own, "no copy is kept on this rank"
    for name in own:
        # A step below the last bit of a copy adds nothing to it.
        lost = STEPPED * held[name][1].abs().max() < torch.finfo(torch.float32).eps
        assert serial[name].abs().max() > 0 or lost, name
    exact = {name: -STEPPED * held[name][1] for name in own}
    steps = {name: serial[name][parts.get(name, ())] for name in own}
    rounding = STEPPED * apart(held[name] for name in own)
    # A step is rounded to fp32 when it is added to a copy.
    rounding += 1e-3 * apart((value, torch.zeros_like(value)) for value in exact.values())
    off = apart((steps[name], exact[name]) for name in own) / rounding
    assert off < MOST_TIMES, f"serial copies are off by {off:.2f} times as much as their gradients"
    off = apart((own[name], steps[name]) for name in own) / rounding
    assert off < MOST_TIMES + 1, f"copies are off the serial ones by {off:.2f} times as much as gradients"


def apart(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """How far two sets of gradients lie from each other."""
    return float(sum(((one - other).square().sum() for one, other in pairs), torch.zeros(()).double()).sqrt())


def main(cases: list[str]) -> None:
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        names = dict.fromkeys(text.partition(":")[0] for text in cases)
        trace_together((functools.partial(network_of, name) for name in names), context)
        # What was imported and traced stays: a collection after each case is to be of that case.
        gc.freeze()
        for text in cases:
            try:
                case = case_of(text)
                for compare in (compare_lowered,) if case.lowered else (compare_with_serial, compare_with_plan):
                    with without_sums(case):
                        groups = compare(case, context)
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
