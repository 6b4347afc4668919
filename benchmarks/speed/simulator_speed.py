"""Speed of the simulator: its event loop, a long pipeline, and a pipeline on many ranks as a whole process.

    python benchmarks/speed/simulator_speed.py
    python benchmarks/speed/simulator_speed.py --repetitions 21

Makes a synthetic profile of the model, which needs torch once, to trace it. Prints medians over the repetitions, with
the fastest and slowest of them, and the processor's own seconds, to which other load on the machine adds less. The
figures to reach: 5,000,000 tasks a second, 0.5 s, 1 s.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import numpy as np
from predict_speed import run_once, synthetic_profile

_MICRO_BATCHES = 512


def pipeline_profile(path: Path, model: str) -> None:
    """A synthetic profile of a model that has times of messages as well."""
    synthetic_profile(path, model, 2)
    from profile_factory import ring_fit

    from calibrate.profile.profile import read_profile, write_profile

    profile = read_profile(path)
    sent = ring_fit("send_recv", covariance=((1e-12, 0.0), (0.0, 1e-22)), block_relative_sd=0.05)
    write_profile(path, msgspec.structs.replace(profile, communication=(*profile.communication, sent)))


class Times(NamedTuple):
    """Seconds of repetitions: by the clock, and of the processor."""

    clock_s: list[float]
    processor_s: list[float]

    def __str__(self) -> str:
        low, high = min(self.clock_s), max(self.clock_s)
        processor = statistics.median(self.processor_s)
        return (
            f"median {statistics.median(self.clock_s):.3f} s ({low:.3f} to {high:.3f} s; processor {processor:.3f} s)"
        )


def timed(run: Callable[[], object], repetitions: int) -> Times:
    """Each repetition, after one that is not counted; processes that it starts count as its own."""
    run()
    clock, processor = [], []
    for _ in range(repetitions):
        begin, used = time.perf_counter(), sum(os.times()[:4])
        run()
        clock.append(time.perf_counter() - begin)
        processor.append(sum(os.times()[:4]) - used)
    return Times(clock, processor)


def simulate_pipelines(profile: Path, model: str, ranks: int, repetitions: int) -> None:
    """A pipeline of interleaved 1F1B from its plan to its iteration, then its event loop alone, on all of its tasks."""
    from calibrate.profile.profile import read_profile
    from paradl_bench.plan.settings import plan_settings
    from paradl_bench.plan.strategy import parse_strategy
    from paradl_bench.strategies.nesting.catalog import planner_for
    from predict.costs.cost_model import CostModel
    from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation
    from predict.simulation.simulator import run_events

    stored = read_profile(profile)
    network, strategy = stored.network[model], parse_strategy(f"p{ranks}")
    settings = plan_settings(batch=2 * _MICRO_BATCHES, schedule="interleaved", micro_batches=_MICRO_BATCHES)
    planner = planner_for(strategy)
    plan = planner.plan(network, strategy, settings)
    costs = CostModel(profile=stored, network=network).price(plan).costs
    arrays = costs.seconds, costs.compute_slowdown, costs.communication_slowdown
    straggler = np.ones(len(plan.works))

    def whole() -> float:
        again = planner.plan(network, strategy, settings)
        return PipelineSimulation(again, straggler).iteration_s(*arrays)

    tasks = sum(role.tasks for role in plan.roles)
    found = timed(whole, repetitions)
    click.echo(f"event loop: {run_events.__module__.rpartition('.')[2]}")
    click.echo(
        f"{model}, interleaved 1F1B, {ranks} ranks of two stages, {_MICRO_BATCHES} micro-batches, {tasks} tasks: "
        f"plan, condense, couple, simulate: {found}"
    )
    simulation = PipelineSimulation(plan, straggler, merge=False)
    again = timed(lambda: simulation.iteration_s(*arrays), repetitions)
    click.echo(
        f"the same plan with each of its tasks an event, once loaded: {again}: "
        f"{tasks / statistics.median(again.clock_s) / 1e6:.1f} million tasks a second"
    )


@click.command()
@click.option("--model", default="resnet152", show_default=True, help="One that can be cut into 128 stages.")
@click.option("--repetitions", default=11, show_default=True)
def main(model: str, repetitions: int) -> None:
    """Time the simulator, and predict as a whole process."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cases"))
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        pipeline_profile(profile, model)
        for ranks in (32, 64):
            simulate_pipelines(profile, model, ranks, repetitions)
        for schedule in ("gpipe", "1f1b"):
            options = ["--strategy", "d256p64", "--batch", str(2 * 256 * 64), "--schedule", schedule]
            arguments = ["--from-profile", str(profile), "--model", model, *options]
            found = timed(functools.partial(run_once, arguments), repetitions)
            click.echo(f"predict {' '.join(options)}, a process from start to end: {found}")


if __name__ == "__main__":
    main()
