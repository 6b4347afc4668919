"""Accuracy of every strategy on two ranks, of many networks: predictions from layers and sweeps against real runs.

    python benchmarks/accuracy/strategies.py -o DIR [--repetitions 3] [--minutes 1]
                                                    [--networks resnet18,own_networks:branches]

A shared host changes its speed for minutes, so that a profile and a run that lie minutes apart were made by two
machines. Two ranks are started, and measure for each network and batch in turn what a strategy's prediction needs and,
right behind it, the strategy's own run: the network whole on one rank, and serial training; what one rank of a strategy
that shares layers out runs, two ranks at once, and these; half of the batch (a pipeline has as many micro-batches as
ranks; one rank and two in turn, since stages wait for each other), d2 and p2. Then the collectives that the plans hold
are swept: alone, beside and behind compute, and beside an all-reduce. Repetitions are short and several. One profile is
then fitted from all of them and held against every run; memory too. The report tells single runs from configurations:
the median of a configuration's runs. Last, the runs of every other network are compared, and intervals that count their
errors are held against the other networks; and in turn.

An interrupted benchmark goes on when called again: what is complete is not measured again. With --minutes it ends by
itself behind the measurement in which they are over, and says what is left.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "networks"))

from repetitions import fit_and_validate, run, validate_across

from paradl_bench.measure.layers.profiling import measure_layers
from paradl_bench.measure.layers.request import LayersRequest
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.run import measure_training
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.measurement import is_complete

RANKS = 2
SIZES = "16:512M:4"
"""From statistics of a few numbers to the gradients of vgg16."""
BLOCKS, PAIRS, WARMUP = 2, 2, 1
LEAST_BLOCKS = 3
"""Of a sweep of collectives."""


class Trained(msgspec.Struct, frozen=True):
    """A network, and what of it is trained.

    Attributes:
        input_shape: None for its own. batches: global. iterations: timed ones.
        shards: strategies that share its layers out, those that apply.
    """

    input_shape: tuple[int, ...] | None
    batches: tuple[int, ...]
    iterations: int
    shards: tuple[str, ...] = ("f2", "c2", "s2")


NETWORKS = {
    "resnet18": Trained((3, 64, 64), (8,), 10),
    "resnet50": Trained((3, 64, 64), (8,), 8),
    "cosmoflow": Trained((4, 32, 32, 32), (2,), 10, ("f2", "c2", "s2", "t2")),
    "mobilenet_v2": Trained((3, 64, 64), (8,), 10),
    "squeezenet1_1": Trained((3, 64, 64), (8,), 10),
    "own_networks:branches": Trained(None, (8, 4), 10),
    "own_networks:dense": Trained(None, (8, 4), 10),
    "own_networks:grouped": Trained(None, (8, 4), 8),
    "own_networks:gated": Trained(None, (8, 4), 10),
    "own_networks:perceptron": Trained(None, (16, 64), 20, ("f2", "c2", "t2")),
    "own_networks:language": Trained(None, (8, 4), 10, ("f2", "c2", "t2")),
    "own_networks:patches": Trained(None, (8, 4), 10, ("f2", "c2", "s2", "t2")),
    "own_networks:sound": Trained(None, (8, 16), 10),
    "resnet152": Trained((3, 32, 32), (4,), 6),
    "vgg16": Trained((3, 32, 32), (8,), 5, ("f2", "c2", "s2", "t2")),
}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a repetition.

    Attributes:
        network: a name among the networks above.
        strategy: what is trained; empty where layers are timed. ranks_on_host, shards: of those.
        batch: global where something is trained, else local.
    """

    directory: str
    network: str
    batch: int
    strategy: str = ""
    ranks_on_host: tuple[int, ...] = ()
    shards: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether it was measured to its end."""
        return is_complete(Path(self.directory))

    def measure(self, context: RankContext, traced: ModelGraph) -> None:
        """Measure it on this rank, together with the other."""
        command = ("benchmarks/accuracy/strategies.py",)
        if not self.strategy:
            measure_layers(self.layers(), context, Path(self.directory), command, traced)
            return
        among = context.first(parse_strategy(self.strategy).ranks)
        if context.rank >= among.ranks:
            context.rest()
            return
        measure_training(self.training(), among, Path(self.directory), command, traced)
        if among.ranks < context.ranks:
            context.barrier()

    def layers(self) -> LayersRequest:
        """What is timed."""
        return LayersRequest(
            models=(self.network,),
            batches=(self.batch,),
            input_shape=NETWORKS[self.network].input_shape,
            device="cpu",
            dtype="fp32",
            optimizer="sgd",
            ranks_on_host=self.ranks_on_host,
            blocks=BLOCKS,
            pairs=PAIRS,
            warmup=WARMUP,
            isolated="none",
            shards=tuple(map(parse_strategy, self.shards)),
            verify=False,
        )

    def training(self) -> TrainingRequest:
        """What is trained."""
        network = NETWORKS[self.network]
        return TrainingRequest(
            model=self.network,
            input_shape=network.input_shape,
            strategy=parse_strategy(self.strategy),
            batch=self.batch,
            device="cpu",
            verify=False,
            iterations=network.iterations,
            warmup=3,
        )


def steps_of(base: Path, name: str, batch: int) -> list[Step]:
    """A network's measurements at a batch, what is held against each other side by side."""
    shards, step = NETWORKS[name].shards, partial(Step, network=name)
    at = f"{base}/{{}}-{name.rpartition(':')[2]}-{batch}-{{}}".format
    return [
        step(directory=at("layers", "1"), batch=batch, ranks_on_host=(1,)),
        step(directory=at("train", "serial"), batch=batch, strategy="serial"),
        step(directory=at("layers", "2"), batch=batch, ranks_on_host=(RANKS,), shards=shards),
        *(step(directory=at("train", strategy), batch=batch, strategy=strategy) for strategy in shards),
        step(directory=at("layers", "half"), batch=batch // RANKS, ranks_on_host=(1, RANKS)),
        *(step(directory=at("train", strategy), batch=batch, strategy=strategy) for strategy in ("d2", "p2")),
    ]


def sweep(output: Path, repetition: int, repetitions: int) -> Path:
    """Measure the collectives, at least three blocks in all repetitions together; returns the directory."""
    directory = output / f"r{repetition}" / "collectives"
    swept = f"--ranks {RANKS} --backend gloo --ops all_reduce,broadcast,all_gather,send_recv,exchange --sizes {SIZES}"
    beside = ["--contexts", "after-compute,with-compute,with-all-reduce"]
    beside += ["--blocks", str(math.ceil(LEAST_BLOCKS / repetitions))]
    if not is_complete(directory):
        run("paradl_bench", ["collectives", *swept.split(), *beside, "-o", str(directory)])
    return directory


def measure(groups: Iterable[list[Step]], until_s: float) -> None:
    """Measure what is not complete, by ranks that are started once and stop where the time is over.

    Args:
        groups: steps of one network each. until_s: on the monotonic clock, which ranks of a host have in common.
    """
    missing = [left for steps in groups if (left := [step for step in steps if not step.complete])]
    if not missing or time.monotonic() > until_s:
        return
    print(
        f"{sum(map(len, missing))} measurements by {RANKS} ranks, the first into {missing[0][0].directory}", flush=True
    )
    command = [sys.executable, str(Path(__file__).resolve()), "--until", str(until_s)]
    command += ["--as-rank", msgspec.json.encode(missing).decode()]
    launch_ranks(command, ranks=RANKS, device="cpu", timeout_s=3600, hang_timeout_s=600)


def measure_as_rank(groups: Iterable[list[Step]], until_s: float) -> None:
    """What each of the two ranks does."""
    with join_ranks("gloo", "cpu", timeout_s=3600) as context:
        # What is imported stays: collecting garbage between blocks would visit all of it each time.
        gc.freeze()
        for steps in groups:
            name = steps[0].network
            traced = trace_network(load_model(name, NETWORKS[name].input_shape, device="meta"))
            for step in steps:
                if context.share(time.monotonic() > until_s, bool):
                    return
                step.measure(context, traced)
                # Modules hold each other in circles, and their buckets and groups with them.
                gc.collect()


def options() -> argparse.Namespace:
    """What the command was called with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of these: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which the next measurement is left to another call"
    )
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.output is None and not found.as_rank:
        parser.error("-o DIR: where measurements and the report go")
    found.networks = found.networks.split(",")
    if unknown := [name for name in found.networks if name not in NETWORKS]:
        parser.error(f"--networks {unknown[0]}: there are {', '.join(NETWORKS)}")
    return found


def groups_of(base: Path, names: Iterable[str]) -> Iterator[list[Step]]:
    """A repetition's measurements, by batch and network: every network's first batch comes first."""
    of_names = [[steps_of(base, name, batch) for batch in NETWORKS[name].batches] for name in names]
    for at_batch in itertools.zip_longest(*of_names):
        yield from filter(None, at_batch)


def main() -> None:
    """The command."""
    asked = options()
    if asked.as_rank:
        measure_as_rank(msgspec.json.decode(asked.as_rank, type=list[list[Step]]), asked.until)
        return
    until_s = time.monotonic() + 60 * asked.minutes
    output = asked.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    profiles, steps = [], []
    for number in range(asked.repetitions):
        groups = list(groups_of(output / f"r{number}", asked.networks))
        measure(groups, until_s)
        steps += [step for group in groups for step in group]
        if time.monotonic() < until_s:
            profiles.append(str(sweep(output, number, asked.repetitions)))
    left = sum(not step.complete for step in steps)
    if left or len(profiles) < asked.repetitions:
        print(f"{left} measurements and {asked.repetitions - len(profiles)} sweeps are left: call it again")
        return
    profiles += [step.directory for step in steps if not step.strategy]
    trained = [step for step in steps if step.strategy]
    fit_and_validate(output, profiles, [step.directory for step in trained])
    # Every other network: what their runs show is held against networks that it is not of.
    of_half = [[step.directory for step in trained if step.network in list(NETWORKS)[half::2]] for half in (0, 1)]
    if all(of_half):
        validate_across(output, (of_half[0], of_half[1]))


if __name__ == "__main__":
    main()
