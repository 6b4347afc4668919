"""Cost of profiling, of one model or of a whole search.

    python benchmarks/speed/profiling_cost.py [--model resnet50] [--batch 8] [--repetitions 3]
    python benchmarks/speed/profiling_cost.py DIR... --from-profile P --model M --batch 16 --ranks 16

Without directories: `layers` of one model at one batch against 60 of its training iterations, as whole processes.

With those that a profile was fitted from: seconds of devices that they took by their records (from start to end, times
their ranks), against those of running all that a grid search tries (:func:`emulation_distsim.grid`), as predicted from
the profile: ``--iterations`` of each on ``--ranks`` devices, start-up and set-up not counted (DistSim, Table 3). What
cannot run is named and not counted. Likewise against running all candidates that ``predict search`` tells apart,
each as its median takes, by lower bounds where it was not predicted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "emulation"))

from emulation_distsim import MICRO_BATCHES, grid

from calibrate.profile.profile import read_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.hosts.host_load import read_load
from paradl_bench.records.measurement import Manifest, read_manifest
from predict import load_profile
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, evaluator_named

ITERATIONS = 60
RUN_ITERATIONS = 35
"""What ``paradl-bench train`` runs unless told otherwise: 5 to warm up, 30 timed."""


class Cost(NamedTuple):
    """What was measured, or a strategy, and what its devices take for it."""

    name: str
    devices: int
    seconds: float

    @property
    def device_s(self) -> float:
        """Of all devices together."""
        return self.devices * self.seconds


def measured_cost(directory: Path) -> Cost:
    """A measurement's, from its start to its end.

    Raises:
        UserError: it is no measurement, or its records do not say how long it took.
    """
    manifest = read_manifest(directory)
    load = read_load(directory)
    if load is None:
        raise UserError(f"{directory} does not say how long it took: it has no load.jsonl, or was over within a moment")
    return Cost(directory.name, _ranks(manifest), load.seconds)


def _ranks(manifest: Manifest) -> int:
    """How many devices took part: all that were started, for as long as any measured."""
    asked = manifest.arguments
    counts = [int(count) for count in asked.get("ranks_on_host", asked.get("ranks", "1")).split(",")]
    return max(counts) * int(asked.get("concurrent", "1"))


def run_costs(model: CostModel, ranks: int, batch: int, iterations: int) -> tuple[list[Cost], list[str]]:
    """What running each strategy of a grid would take, and in lines what cannot run.

    Raises:
        UserError: nothing can.
    """
    predictor = Predictor(model, evaluator_named("simulate"))
    costs, refused = [], []
    for name in grid(ranks):
        strategy = parse_strategy(name)
        replicas = int(name.rpartition("P")[2].removesuffix("D"))
        turns = {} if "1P" in name else {"micro_batches": min(MICRO_BATCHES, batch // replicas), "schedule": "1f1b"}
        try:
            point = Configuration(strategy=strategy, settings=plan_settings(batch=batch, **turns))
            costs.append(Cost(name, ranks, iterations * predictor.predict(point).iteration_s))
        except UserError as error:
            refused.append(f"{name}: {error}")
    if not costs:
        raise UserError(f"none of {len(refused)} strategies of {ranks} ranks can run; {refused[0]}")
    return costs, refused


def print_costs(title: str, costs: Iterable[Cost]) -> float:
    """One line each, and their sum; returns device seconds."""
    found = list(costs)
    print(title)
    for cost in found:
        print(f"  {cost.name:24} {cost.devices:3} devices x {cost.seconds:8.1f} s = {cost.device_s:9.1f} device-s")
    whole_s = sum(cost.device_s for cost in found)
    print(f"  {'all':24} {whole_s:39.1f} device-s")
    return whole_s


def count(options: argparse.Namespace) -> None:
    """Print what profiling a search took, what running its strategies would, and the ratio.

    Raises:
        UserError: directories or the profile are not what is needed.
    """
    profile = read_profile(options.from_profile)
    if options.model not in profile.network:
        raise UserError(f"--model {options.model}: the profile holds {', '.join(profile.network)}")
    profiled_s = print_costs("profiling, by its records", map(measured_cost, options.measured))
    begin = time.perf_counter()
    model = CostModel(profile=profile, network=profile.network[options.model])
    costs, refused = run_costs(model, options.ranks, options.batch, options.iterations)
    simulated_s = time.perf_counter() - begin
    run_s = print_costs(f"running {len(costs)} strategies, {options.iterations} iterations each, as predicted", costs)
    for line in refused:
        print(f"  not counted, {line}")
    print(f"relative scale {profiled_s / run_s:.4f}; {simulated_s:.2f} s to predict all")
    begin = time.perf_counter()
    searched = load_profile(options.from_profile).search(options.model, ranks=options.ranks, batch=options.batch)
    searched_s = time.perf_counter() - begin
    every = searched.answer.searched[0].of_all
    all_s = every.candidates * every.median.iteration_s * options.iterations * options.ranks
    print(
        f"running all {every.candidates:,} candidates of predict search, {options.iterations} iterations each, as the"
        f" median of {every.median.iteration_s:.3g} s ({every.median.candidate}): {all_s:.3g} device-s"
    )
    print(f"relative scale {profiled_s / all_s:.2g}; {searched_s:.2f} s to search")


def seconds(arguments: list[str]) -> float:
    """Wall time of one command in a directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paradl_bench", *arguments, "-o", str(Path(folder) / "out")]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin


def time_processes(options: argparse.Namespace) -> None:
    """Time both in turn (A B A B ...) and print medians and the ratio of each pair."""
    shared = [options.model, "--batch", str(options.batch), "--input-shape", options.input_shape]
    profiled, trained = [], []
    for _ in range(options.repetitions):
        profiled.append(seconds(["layers", *shared]))
        warmup = 3
        counted = ["--iterations", str(ITERATIONS - warmup), "--warmup", str(warmup)]
        trained.append(seconds(["train", *shared, "--strategy", "serial", *counted]))
        print(f"layers {profiled[-1]:.1f} s, {ITERATIONS} iterations {trained[-1]:.1f} s", flush=True)
    ratios = [a / b for a, b in zip(profiled, trained, strict=True)]
    print(f"median: layers {statistics.median(profiled):.1f} s, training {statistics.median(trained):.1f} s")
    print(f"ratio: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", nargs="*", type=Path, metavar="DIR", help="that the profile was fitted from")
    parser.add_argument("--from-profile", type=Path, help="of the model, fitted from DIR...")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=8, help="local one of layers, global one of a search")
    parser.add_argument("--input-shape", default="3x64x64", help="where processes are timed")
    parser.add_argument("--repetitions", type=int, default=3, help="where processes are timed")
    parser.add_argument("--ranks", type=int, default=16, help="of a search")
    parser.add_argument("--iterations", type=int, default=RUN_ITERATIONS, help="of each strategy of a search")
    options = parser.parse_args(arguments)
    if bool(options.measured) != (options.from_profile is not None):
        parser.error("a search takes both: directories of measurements, and --from-profile")
    try:
        count(options) if options.measured else time_processes(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
