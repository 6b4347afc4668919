"""Runs whose collectives and messages are timed one by one, beside their prediction: what figures.py draws of calls.

    python benchmarks/figures/timed_calls.py -o DIR

Small runs on two ranks, and on four that share two cores: data parallelism of two models by DDP's buckets, and by
gradients merged by each of OSF's rules; filter and channel parallelism of one; CosmoFlow by spatial and by data and
spatial parallelism, at the same samples a replica. Layers, shards and collectives are measured before; one profile
predicts all runs. Below `uplink/`, two emulated nodes train over a link of 1 Gbit/s, without and with foreign traffic.

`calls.json` holds the single waits and transfers of every run, what its ranks spent, and the seconds of its layers by
kind. `report/` is `predict validate`'s. An interrupted benchmark goes on when called again. Needs the right to make
network namespaces.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))
sys.path.insert(0, str(Path(__file__).parents[1] / "diagnosis"))

from diagnosis_disturbances import disturbed
from repetitions import Command, run, validate

from calibrate.profile.profile import Profile, read_profile
from paradl_bench.core.files.storage import write_bytes_atomically
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import is_complete, read_records
from paradl_bench.records.training.call_times import RankSpent, call_times, spent_by_rank
from paradl_bench.records.training.training_record import (
    RUN_NAME,
    TRAINING_FILE,
    CallTiming,
    TrainingIterations,
    read_run,
)
from paradl_bench.strategies.exchange.options import ExchangeOptions
from predict.ledger.ledger import Ledger
from predict.validation.run_predictors import RunPredictors
from predict.validation.runs import copies_of, read_runs

IMAGES, VOLUMES = "3x64x64", "4x32x32x32"
EXCHANGED = ("resnet18", "mobilenet_v2")
"""Models of much and of little to exchange."""
FUSIONS: Mapping[str, Sequence[str]] = {
    "ddp": (),
    "none": ("--fusion", "none"),
    "buffer": ("--fusion", "buffer", "--fusion-buffer", "4MiB"),
}
PLANNED_FUSIONS = ("ada", "mg-wfbp")
"""Rules that need costs: ``predict`` writes their messages from what was measured before."""
UPLINK = ("--nodes", "2", "--link-bandwidth", "1Gbit/s")
QUIET, CONGESTED = "quiet", "congested"
"""Runs over the uplink, without and with foreign traffic."""
ITERATIONS = 20
"""Timed in a run; the calls of half of them."""
_DIGITS = 6
"""Of seconds."""


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a run: how long the mean rank waits for the last one, the median; its transfer in every iteration."""

    operation: str
    message_bytes: int
    ranks: tuple[int, ...]
    wait_s: float
    transfers_us: tuple[int, ...]


class TimedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose calls were timed one by one.

    Attributes:
        fused_by: what merged its gradients; empty for DDP's buckets.
        compute_s: forward and backward of the mean rank, layer-wise communication left out.
        copies_s: of these, what the run took to split tensors and to put them together.
        layers_s: what layers take that were measured by themselves, these copies around them included, by kind.
    """

    name: str
    model: str
    strategy: str
    batch: int
    fused_by: str
    iteration_s: float
    compute_s: float
    copies_s: float
    layers_s: dict[str, float]
    timing: CallTiming
    spent: tuple[RankSpent, ...]
    calls: tuple[Samples, ...]


def _layers(base: Path, models: str, shape: str, batch: str, ranks: int, shards: str = "") -> Command:
    split = ["--shards", shards] if shards else []
    options = f"--batch {batch} --ranks-on-host {ranks} --input-shape {shape} --isolated none --blocks 2"
    directory = base / f"layers-{models.partition(',')[0]}-{batch}-{ranks}"
    return ["layers", models, *options.split(), "--iterations", "3", *split], directory


def _train(base: Path, model: str, shape: str, strategy: str, batch: int, *more: str, name: str = "") -> Command:
    options = f"--strategy {strategy} --batch {batch} --input-shape {shape} --iterations {ITERATIONS} --warmup 3"
    timed = [] if strategy == "serial" else ["--time-collectives"]
    directory = base / f"train-{model}-{strategy}{name and '-'}{name}"
    return ["train", model, *options.split(), *timed, "--no-verify", *more], directory


def _sweep(base: Path, ranks: int, operations: str, *more: str) -> Command:
    options = f"--ranks {ranks} --backend gloo --ops {operations} --sizes 1K:64M:16 --blocks 2"
    return ["collectives", *options.split(), *more], base / f"collectives-{ranks}"


def commands(output: Path, repetition: int) -> Iterator[Command]:
    """(arguments, directory) of one repetition: what predictions need, and the runs."""
    base, operations = output / f"r{repetition}", "all_reduce,broadcast,all_gather,exchange"
    yield _layers(base, "cosmoflow", VOLUMES, "2", 1)
    yield _layers(base, "cosmoflow", VOLUMES, "2", 2, "s2")
    yield _layers(base, "cosmoflow", VOLUMES, "2", 4, "s2")
    yield _train(base, "cosmoflow", VOLUMES, "serial", 2)
    yield _train(base, "cosmoflow", VOLUMES, "s2", 2)
    yield _train(base, "cosmoflow", VOLUMES, "d2s2", 4)
    yield _sweep(base, 2, operations, "--contexts", "after-compute,with-compute")
    yield _layers(base, ",".join(EXCHANGED), IMAGES, "4", 2)
    for model in EXCHANGED:
        for name, merged in FUSIONS.items():
            yield _train(base, model, IMAGES, "d2", 8, *merged, name=name)
        for rule in PLANNED_FUSIONS:
            messages = str(base / f"messages-{model}-{rule}.json")
            yield _train(base, model, IMAGES, "d2", 8, "--fusion", messages, name=rule)
    yield _layers(base, "resnet18", IMAGES, "8", 1)
    yield _layers(base, "resnet18", IMAGES, "8", 2, "f2,c2")
    yield _train(base, "resnet18", IMAGES, "serial", 8)
    for strategy in ("f2", "c2"):
        yield _train(base, "resnet18", IMAGES, strategy, 8)
    yield _sweep(base, 4, operations, "--contexts", "after-compute")


def uplink_commands(output: Path, repetition: int) -> Iterator[Command]:
    """Likewise, of data parallelism over a link between two emulated nodes."""
    base = output / f"r{repetition}"
    yield _layers(base, "resnet18", IMAGES, "4", 2)
    yield _sweep(base, 2, "all_reduce,broadcast", *UPLINK)
    for name in (QUIET, CONGESTED):
        yield _train(base, "resnet18", IMAGES, "d2", 8, *UPLINK, name=name)


def measured(of: Callable[[Path, int], Iterator[Command]], output: Path, repetition: int) -> Iterator[Command]:
    """Commands, behind what they need: planned messages, or traffic beside them."""
    for arguments, directory in of(output, repetition):
        if directory.name.endswith(PLANNED_FUSIONS):
            plan_messages(arguments, directory.parent)
        if directory.name.endswith(CONGESTED) and not is_complete(directory):
            train_beside_traffic([*arguments, "-o", str(directory)])
        yield arguments, directory


def plan_messages(arguments: Sequence[str], base: Path) -> None:
    """Write the messages that a run's ``--fusion`` names, from layers and sweeps of two ranks."""
    messages, profile = Path(arguments[arguments.index("--fusion") + 1]), base / "planning.json"
    if messages.exists():
        return
    if not profile.exists():
        measurements = [base / f"layers-{EXCHANGED[0]}-4-2", base / "collectives-2"]
        run("calibrate", ["fit", *map(str, measurements), "-o", str(profile)])
    model, rule = arguments[1], next(rule for rule in PLANNED_FUSIONS if messages.stem.endswith(rule))
    configuration = f"--from-profile {profile} --model {model} --strategy d2 --batch 8 --fusion {rule}"
    run("predict", [*configuration.split(), "--fusion-out", str(messages)])


def train_beside_traffic(arguments: Sequence[str]) -> None:
    """Train while bursts of foreign traffic take the link.

    Raises:
        CalledProcessError: the run failed.
    """
    command = [sys.executable, "-m", "paradl_bench", *arguments]
    print("$ paradl-bench", *arguments, "# beside it: traffic", flush=True)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as training, disturbed(training, "traffic"):
        training.wait()
    if training.returncode:
        raise subprocess.CalledProcessError(training.returncode, command)


def layers_by_kind(ledger: Ledger) -> dict[str, float]:
    """Seconds of layers in forward and backward by what they do, effects left out; the mean over ranks."""
    seconds: Counter[str] = Counter()
    for role in ledger.roles:
        for entry in role.entries:
            if entry.phase in ("FW", "BW") and "group" not in entry.details:
                kind = str(entry.details.get("operation", "between operations")).partition("(")[0]
                seconds[kind] += entry.base_s * role.ranks / ledger.ranks
    return {kind: round(of_kind, _DIGITS) for kind, of_kind in seconds.items()}


def timed_run(directory: Path, profile: Profile, profile_path: Path) -> TimedRun | None:
    """What a run's calls took; None of one whose calls were not timed."""
    records = read_records(directory, TRAINING_FILE, TrainingIterations)
    clocks, about = HostClocks(read_host_records(directory)), read_run(directory)
    if about.call_timing is None:
        return None
    ((run,), _) = read_runs([directory])
    times, copies = run.rank_times_s, copies_of(run)
    communicated = sum(
        sum(map(sum, (*record.fw_communication_s.values(), *record.bw_communication_s.values()))) for record in records
    ) / sum(len(record.iteration_s) for record in records)
    return TimedRun(
        name=directory.name,
        model=about.model,
        strategy=about.strategy,
        batch=about.batch,
        fused_by=about.settings.of(ExchangeOptions).fused_by,
        iteration_s=run.median_s,
        compute_s=float(times[:, :, 1:3].sum(axis=2).mean()) - communicated,
        copies_s=0.0 if copies is None else float(copies.mean()),
        layers_s=layers_by_kind(RunPredictors(profile, profile_path, None).ledger(run)),
        timing=about.call_timing,
        spent=spent_by_rank(records, clocks),
        calls=tuple(
            Samples(
                operation=call.key.operation,
                message_bytes=call.key.message_bytes,
                ranks=call.ranks,
                wait_s=round(float(np.median(call.waits_s.mean(axis=0))), _DIGITS),
                transfers_us=tuple(round(1e6 * float(value)) for value in call.transfers_s),
            )
            for call in call_times(records, clocks)
        ),
    )


def timed_runs(output: Path) -> list[TimedRun]:
    """The runs below a directory whose calls were timed, by its profile."""
    path = output / "profile.json"
    profile = read_profile(path)
    runs = [timed_run(directory.parent, profile, path) for directory in sorted(output.glob(f"r*/train-*/{RUN_NAME}"))]
    return [run for run in runs if run is not None]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    found: list[TimedRun] = []
    for output, of in ((options.output, commands), (options.output / "uplink", uplink_commands)):
        validate(output, partial(measured, of), repetitions=1)
        found += timed_runs(output)
    write_bytes_atomically(options.output / "calls.json", msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
