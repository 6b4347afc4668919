"""Accuracy of every strategy that shares a model out, on two ranks: measured shards against a shard taken as 1/p.

    python benchmarks/strategies.py -o DIR [--repetitions 6]

A shared host changes its speed for minutes, so that a profile and a run that lie minutes apart were made by two
machines. Two ranks are started once for a repetition, and measure for each model in turn what a strategy's prediction
needs and, right behind it, the strategy's own run: the model whole on one rank, and serial training; what one rank of
f2, c2 and s2 runs, two ranks at once, and these three; micro-batches (a pipeline has as many as ranks; one rank and two
in turn, since stages wait for each other), and p2. Then the collectives that the plans hold are swept: alone, beside
and behind compute, and beside an all-reduce. Repetitions are short and several. One profile is then fitted from all of
them and held against every run; memory too. The report tells single runs from configurations: the median of a
configuration's runs.

An interrupted benchmark goes on when called again: what is complete is not measured again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
from repetitions import fit_and_validate, run

from paradl_bench.measure.layers.profiling import measure_layers
from paradl_bench.measure.layers.request import LayersRequest
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.run import measure_training
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.measurement import is_complete

MODELS = {"vgg11": ((3, 32, 32), 8, 6), "resnet18": ((3, 64, 64), 8, 12), "cosmoflow": ((4, 32, 32, 32), 2, 12)}
"""Input shape, global batch, timed iterations."""
SHARDS = ("f2", "c2", "s2")
RANKS = 2
SIZES = "16:512M:4"
"""From statistics of a few numbers to the gradients of vgg11."""
BLOCKS, PAIRS, WARMUP = 2, 2, 1
LEAST_BLOCKS = 3
"""Of a sweep of collectives."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a repetition.

    Attributes:
        strategy: what is trained; empty where layers are timed. ranks_on_host, shards: of those.
        batch: global where something is trained, else local.
    """

    directory: str
    model: str
    batch: int
    strategy: str = ""
    ranks_on_host: tuple[int, ...] = ()
    shards: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether it was measured to its end."""
        return is_complete(Path(self.directory))

    def measure(self, context: RankContext) -> None:
        """Measure it on this rank, together with the other."""
        command = ("benchmarks/strategies.py",)
        if not self.strategy:
            measure_layers(self.layers(), context, Path(self.directory), command)
            return
        among = context.first(parse_strategy(self.strategy).ranks)
        if context.rank >= among.ranks:
            context.rest()
            return
        measure_training(self.training(), among, Path(self.directory), command)
        if among.ranks < context.ranks:
            context.barrier()

    def layers(self) -> LayersRequest:
        """What is timed."""
        return LayersRequest(
            models=(self.model,),
            batches=(self.batch,),
            input_shape=MODELS[self.model][0],
            device="cpu",
            dtype="fp32",
            optimizer="sgd",
            ranks_on_host=self.ranks_on_host,
            blocks=BLOCKS,
            pairs=PAIRS,
            warmup=WARMUP,
            isolated="none",
            shards=tuple(map(parse_strategy, self.shards)),
        )

    def training(self) -> TrainingRequest:
        """What is trained."""
        shape, _, iterations = MODELS[self.model]
        return TrainingRequest(
            model=self.model,
            input_shape=shape,
            strategy=parse_strategy(self.strategy),
            batch=self.batch,
            device="cpu",
            verify=False,
            iterations=iterations,
            warmup=3,
        )


def steps_of(output: Path, repetition: int) -> Iterator[Step]:
    """A repetition's measurements, what is held against each other side by side."""
    base = output / f"r{repetition}"
    for model, (_, batch, _) in MODELS.items():
        step = partial(Step, model=model)
        yield step(directory=f"{base}/layers-{model}-1", batch=batch, ranks_on_host=(1,))
        yield step(directory=f"{base}/train-{model}-serial", batch=batch, strategy="serial")
        yield step(directory=f"{base}/layers-{model}-2", batch=batch, ranks_on_host=(RANKS,), shards=SHARDS)
        for strategy in SHARDS:
            yield step(directory=f"{base}/train-{model}-{strategy}", batch=batch, strategy=strategy)
        yield step(directory=f"{base}/layers-{model}-micro", batch=batch // RANKS, ranks_on_host=(1, RANKS))
        yield step(directory=f"{base}/train-{model}-p2", batch=batch, strategy="p2")


def sweep(output: Path, repetition: int, repetitions: int) -> Path:
    """Measure the collectives, at least three blocks in all repetitions together; returns the directory."""
    directory = output / f"r{repetition}" / "collectives"
    swept = f"--ranks {RANKS} --backend gloo --ops all_reduce,broadcast,all_gather,send_recv,exchange --sizes {SIZES}"
    beside = ["--contexts", "after-compute,with-compute,with-all-reduce"]
    beside += ["--blocks", str(math.ceil(LEAST_BLOCKS / repetitions))]
    run("paradl_bench", ["collectives", *swept.split(), *beside, "-o", str(directory)])
    return directory


def measure(steps: list[Step]) -> None:
    """Measure what is not complete, by ranks that are started once."""
    missing = [step for step in steps if not step.complete]
    if not missing:
        return
    print(f"{len(missing)} measurements by {RANKS} ranks, the first into {missing[0].directory}", flush=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", msgspec.json.encode(missing).decode()]
    launch_ranks(command, ranks=RANKS, device="cpu", timeout_s=3600, hang_timeout_s=600)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        with join_ranks("gloo", "cpu", timeout_s=3600) as context:
            for step in msgspec.json.decode(options.as_rank, type=list[Step]):
                step.measure(context)
        return
    if options.output is None:
        parser.error("-o DIR: where measurements and the report go")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    repetitions = [list(steps_of(output, repetition)) for repetition in range(options.repetitions)]
    swept = []
    for number, steps in enumerate(repetitions):
        measure(steps)
        swept.append(str(sweep(output, number, options.repetitions)))
    directories = [step for steps in repetitions for step in steps]
    profiles = [*swept, *(step.directory for step in directories if not step.strategy)]
    runs = [step.directory for step in directories if step.strategy]
    fit_and_validate(output, profiles, runs)


if __name__ == "__main__":
    main()
