"""Runs whose collectives and messages are timed one by one, beside their prediction: what figures.py draws of calls.

    python benchmarks/figures/timed_calls.py -o DIR

Small runs on two ranks, and on four that share two cores: data parallelism of two models by DDP's buckets and by merged
gradients; filter and channel parallelism of one; CosmoFlow by spatial and by data and spatial parallelism, at the same
samples a replica. Layers, shards and collectives are measured before; one profile predicts all runs.

`calls.json` holds the single waits and transfers of every run, what its ranks spent, and the seconds of its layers by
kind. `report/` is `predict validate`'s. An interrupted benchmark goes on when called again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from repetitions import validate

from calibrate.profile.profile import Profile, read_profile
from paradl_bench.core.files.storage import write_bytes_atomically
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import read_records
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
from predict.validation.runs import read_runs

IMAGES, VOLUMES = "3x64x64", "4x32x32x32"
EXCHANGED = ("resnet18", "mobilenet_v2")
"""Models of much and of little to exchange."""
FUSIONS: Mapping[str, Sequence[str]] = {
    "ddp": (),
    "none": ("--fusion", "none"),
    "buffer": ("--fusion", "buffer", "--fusion-buffer", "4MiB"),
}
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
    transfers_s: tuple[float, ...]


class TimedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose calls were timed one by one.

    Attributes:
        fused_by: what merged its gradients; empty for DDP's buckets.
        compute_s: forward and backward of the mean rank, layer-wise communication left out.
        layers_s: of these, what layers take that were timed without ranks that communicate, by kind.
    """

    name: str
    model: str
    strategy: str
    batch: int
    fused_by: str
    iteration_s: float
    compute_s: float
    layers_s: dict[str, float]
    timing: CallTiming
    spent: tuple[RankSpent, ...]
    calls: tuple[Samples, ...]


def commands(output: Path, repetition: int) -> Iterator[tuple[list[str], Path]]:
    """(arguments, directory) of one repetition: what predictions need, and the runs."""
    base = output / f"r{repetition}"

    def layers(models: str, shape: str, batch: str, ranks: int, shards: str = "") -> tuple[list[str], Path]:
        split = ["--shards", shards] if shards else []
        options = f"--batch {batch} --ranks-on-host {ranks} --input-shape {shape} --isolated none --blocks 2"
        directory = base / f"layers-{models.partition(',')[0]}-{batch}-{ranks}"
        return ["layers", models, *options.split(), "--iterations", "3", *split], directory

    def train(model: str, shape: str, strategy: str, batch: int, *more: str, name: str = "") -> tuple[list[str], Path]:
        options = f"--strategy {strategy} --batch {batch} --input-shape {shape} --iterations {ITERATIONS} --warmup 3"
        timed = [] if strategy == "serial" else ["--time-collectives"]
        directory = base / f"train-{model}-{strategy}{name and '-'}{name}"
        return ["train", model, *options.split(), *timed, "--no-verify", *more], directory

    def sweep(ranks: int, operations: str, contexts: str) -> tuple[list[str], Path]:
        options = f"--ranks {ranks} --backend gloo --ops {operations} --sizes 1K:64M:16 --blocks 2"
        return ["collectives", *options.split(), "--contexts", contexts], base / f"collectives-{ranks}"

    yield layers("cosmoflow", VOLUMES, "2", 1)
    yield layers("cosmoflow", VOLUMES, "2", 2, "s2")
    yield layers("cosmoflow", VOLUMES, "2", 4, "s2")
    yield train("cosmoflow", VOLUMES, "serial", 2)
    yield train("cosmoflow", VOLUMES, "s2", 2)
    yield train("cosmoflow", VOLUMES, "d2s2", 4)
    yield layers(",".join(EXCHANGED), IMAGES, "4", 2)
    for model in EXCHANGED:
        for name, merged in FUSIONS.items():
            yield train(model, IMAGES, "d2", 8, *merged, name=name)
    yield layers("resnet18", IMAGES, "8", 1)
    yield layers("resnet18", IMAGES, "8", 2, "f2,c2")
    yield train("resnet18", IMAGES, "serial", 8)
    for strategy in ("f2", "c2"):
        yield train("resnet18", IMAGES, strategy, 8)
    yield sweep(2, "all_reduce,broadcast,all_gather,exchange", "after-compute,with-compute")
    yield sweep(4, "all_reduce,broadcast,all_gather,exchange", "after-compute")


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
    times = run.rank_times_s
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
        layers_s=layers_by_kind(RunPredictors(profile, profile_path, None).ledger(run)),
        timing=about.call_timing,
        spent=spent_by_rank(records, clocks),
        calls=tuple(
            Samples(
                operation=call.key.operation,
                message_bytes=call.key.message_bytes,
                ranks=call.ranks,
                wait_s=round(float(np.median(call.waits_s.mean(axis=0))), _DIGITS),
                transfers_s=tuple(round(float(value), _DIGITS) for value in call.transfers_s),
            )
            for call in call_times(records, clocks)
        ),
    )


def write_calls(output: Path) -> None:
    """Write `calls.json` beside the profile and the runs."""
    path = output / "profile.json"
    profile = read_profile(path)
    runs = [timed_run(directory.parent, profile, path) for directory in sorted(output.glob(f"r*/train-*/{RUN_NAME}"))]
    found = [run for run in runs if run is not None]
    write_bytes_atomically(output / "calls.json", msgspec.json.encode(found) + b"\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    validate(options.output, commands, repetitions=1)
    write_calls(options.output)


if __name__ == "__main__":
    main()
