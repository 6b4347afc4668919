"""What every rank of a test of autocast runs: a strategy's gradients in bf16, beside the serial model's in two dtypes.

Usage: lowered_program.py CASE...; as pipeline_program's, of a strategy with or without a pipeline.

bf16 keeps 8 bits, so that serial training in it is off by some share of what fp64 gives. A strategy rounds at other
places: partial sums before they are added up, micro-batches by themselves. It may be off by ``MOST_TIMES`` as much, and
not by more; a rule that is wrong is off by the gradient itself. Where whole layers run on the same micro-batches, what
is left is the order in which fp32 gradients are added up, ``LEAST_TIMES`` as much at most.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec
import torch
import torch.distributed as dist
from pipeline_program import SAMPLES, Case, case_of

from paradl_bench.measure.execution.micro_steps import MicroSteps
from paradl_bench.measure.proof.parts import own_parts, place_of
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.training.calls.recorder import CollectiveRecorder, When, differences, planned_collectives
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.ranks.groups.process_group import end_groups
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.parallel import ParallelModule, build_parallel
from paradl_bench.strategies.running.autocast import autocast_to

MOST_TIMES, LEAST_TIMES = 2.0, 1e-3
Gradients = dict[str, torch.Tensor]
WHEN: tuple[When, ...] = ("first", "rebuild", "iteration")


def settings_of(case: Case) -> PlanSettings:
    return msgspec.structs.replace(case.settings, dtype="bf16", batch=2 * SAMPLES * case.count * case.replicas)


def serial_gradients(case: Case, dtype: str, samples: int) -> Gradients:
    """Of the mean over all samples, computed ``samples`` at a time."""
    model, _ = case.load()
    if dtype == "fp64":
        model.module.double()
    inputs, targets = model.make_batch(settings_of(case).batch, seed=7)
    parts = len(inputs) // samples
    for own, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        with autocast_to(dtype, torch.device("cpu"))():
            loss = model.loss(model.module(own.double() if dtype == "fp64" else own), wanted)
        (loss / parts).backward()
    return {name: p.grad.double() for name, p in model.module.named_parameters() if p.grad is not None}


def iterate(built: ParallelModule, model: LoadedModel, case: Case, own: slice) -> None:
    inputs, targets = (tensor[own] for tensor in model.make_batch(settings_of(case).batch, seed=7))
    if built.pipeline is not None:
        built.pipeline.step(inputs, targets)
        return
    entered = autocast_to("bf16", torch.device("cpu"))
    MicroSteps(built, model.loss, inputs, targets, 1, entered).run(None, lambda: None, [], lambda _: None)


def compare(case: Case, context: RankContext) -> tuple[dist.ProcessGroup, ...]:
    settings = settings_of(case)
    place = place_of(case.strategy, settings, context.rank)
    exact = serial_gradients(case, "fp64", settings.batch)
    serial = serial_gradients(case, "bf16", place.samples)
    model, network = case.load()
    with GradientOrder(model.module) as order, autocast_to("bf16", context.device)():
        inputs, targets = model.make_batch(SAMPLES, seed=1)
        model.loss(model.module(inputs), targets).backward()
    network = order.of(network)
    plan = planner_for(case.strategy).plan(network, case.strategy, settings)
    with CollectiveRecorder() as recorder:
        built = build_parallel(model.module, network, case.strategy, settings, context.device, model.loss)
    issued = list(recorder.issued("setup"))
    for when in WHEN:
        model.module.zero_grad(set_to_none=True)
        with CollectiveRecorder() as recorder:
            iterate(built, model, case, place.own)
        issued += recorder.issued(when)
    found = differences(issued, planned_collectives(plan, context.rank))
    assert not found, "; ".join(found)
    parts = own_parts(network, case.strategy, context.rank, settings)
    gradients = {name: p.grad.double() for name, p in model.module.named_parameters() if p.grad is not None}
    held = {name: (serial[name][parts.get(name, ())], exact[name][parts.get(name, ())]) for name in gradients}
    rounding = apart((of_serial, of_exact) for of_serial, of_exact in held.values())
    assert rounding > 0, "serial training in bf16 is exact: nothing was rounded"
    off = apart((gradient, held[name][1]) for name, gradient in gradients.items()) / rounding
    assert off < MOST_TIMES, f"off by {off:.2f} times as much as serial training in bf16"
    if not any(axis.has(Trait.SHARDS_LAYERS) for axis in case.strategy.axes):
        off = apart((gradient, held[name][0]) for name, gradient in gradients.items()) / rounding
        assert off < LEAST_TIMES, f"off serial training in bf16 by {off:.2g} times as much as that is off fp64"
    return built.groups[1:]


def apart(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """How far two sets of gradients lie from each other."""
    return float(sum(((one - other).square().sum() for one, other in pairs), torch.zeros(()).double()).sqrt())


def main(cases: list[str]) -> None:
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        for text in cases:
            try:
                groups = compare(case_of(text), context)
            except BaseException as error:
                raise AssertionError(f"{text}, rank {context.rank}: {error}") from error
            context.barrier()
            end_groups(groups)


if __name__ == "__main__":
    main(sys.argv[1:])
