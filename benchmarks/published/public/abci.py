"""ABCI: ResNet-50 under Horovod, from one node's epochs and the sweeps to more nodes.

Known: an epoch on the fewest nodes, NCCL's all-reduce sweeps, and the network. Backward of each layer was not measured;
the iteration is shared out by the roofline of the network's layers, at the rates of the device's data sheet. What an
evaluator says that the exchange adds on the fewest nodes is in that iteration already, so

    predicted(p) = iteration(p0) + evaluator(p) - evaluator(p0)

An epoch is ceil(D / B) iterations. Not in it: restart of the loader, checkpoint, first iterations, what Horovod
negotiates.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from public.estimated import described, shared_out
from public.pairs import Pair
from public.toolkit import Told, TraceLayer, predict, run, write_trace

SOURCE = "ABCI"
SAMPLES, BATCH = 1_281_167, 96
"""Images of an epoch, and of a GPU's mini-batch (shared/data/README.md)."""

HOROVOD = ("--fusion", "buffer", "--fusion-buffer", "128MiB", "--fusion-timeout", "1ms")
"""Horovod's defaults since 0.21; these runs took 0.22.0, as their repository says."""

EVALUATORS: dict[str, tuple[str, ...]] = {
    "simulate, Horovod's buffer": ("--evaluator", "simulate", *HOROVOD),
    "osf, Horovod's buffer": ("--evaluator", "osf", *HOROVOD),
    "csf": ("--evaluator", "csf"),
}
CHOSEN = "simulate, Horovod's buffer"
"""What predicts by default. Until it took compute to be slowed by what it runs beside, it and osf said the same."""


class Epochs(NamedTuple):
    """Measured epochs of one node type: seconds by number of GPUs."""

    node_type: str
    seconds: dict[int, list[float]]


def iterations(gpus: int) -> int:
    """Of an epoch."""
    return math.ceil(SAMPLES / (BATCH * gpus))


def read_epochs(path: Path) -> list[Epochs]:
    """By node type; the first epoch of a run, which has no time, is left out."""
    found: dict[str, dict[int, list[float]]] = {}
    with open(path, newline="") as stream:
        for row in csv.DictReader(stream):
            if row["train_epoch_s"]:
                of_type = found.setdefault(row["node_type"], {})
                of_type.setdefault(int(row["gpus"]), []).append(float(row["train_epoch_s"]))
    return [Epochs(node_type, seconds) for node_type, seconds in found.items()]


def calibrated(folder: Path, sweeps: Sequence[Path], layers: Sequence[TraceLayer]) -> Path:
    """A profile of an iteration and the sweeps, by import and fit."""
    trace, profile = folder / "resnet50.txt", folder / "profile.json"
    write_trace(trace, [layers])
    run("paradl_bench", "import", "ssgd-trace", str(trace), "--model", "resnet50", "--batch", str(BATCH),
        "-o", str(folder / "layers"))  # fmt: skip
    run("paradl_bench", "import", "nccl-tests", *map(str, sweeps), "-o", str(folder / "sweeps"))
    # A trace tells no device: the two count as different environments.
    run("calibrate", "fit", str(folder / "layers"), str(folder / "sweeps"), "--force", "-o", str(profile))
    return profile


def device_of(sweep: Path) -> str:
    """The name that nccl-tests prints of its first rank's device."""
    lines = sweep.read_text(errors="replace").splitlines()
    line = next((line for line in lines if " device " in line and "[0x" in line), "")
    return line.rpartition("]")[2].strip()


def pairs(data: Path, folder: Path) -> list[Pair]:
    """Every number of GPUs beyond the fewest, of every node type that has sweeps.

    Raises:
        RuntimeError: a command failed.
    """
    home = data / "abci-v100"
    network = described("resnet50", folder)
    found = []
    for epochs in read_epochs(home / "resnet50_horovod_epoch_times.csv"):
        sweeps = sorted((home / "nccl_osu").glob(f"allreduce__*_{epochs.node_type}__*.nccl"))
        if sweeps and len(epochs.seconds) > 1:
            own = folder / epochs.node_type
            own.mkdir()
            found += _of_type(epochs, sweeps, network, own)
    return found


def _of_type(epochs: Epochs, sweeps: Sequence[Path], network: dict[str, Any], folder: Path) -> list[Pair]:
    fewest = min(epochs.seconds)
    base = median(epochs.seconds[fewest])
    measured_s = base / iterations(fewest)
    layers = shared_out(network, device_of(sweeps[0]), BATCH, measured_s)
    profile = calibrated(folder, sweeps, layers)
    found = []
    for name, options in EVALUATORS.items():
        told = {gpus: predict(profile, "resnet50", gpus, BATCH * gpus, *options) for gpus in epochs.seconds}
        inside = told[fewest].iteration_s
        for gpus in sorted(set(epochs.seconds) - {fewest}):
            low, middle, high = _anchored(told[gpus], measured_s - inside, iterations(gpus))
            found.append(
                Pair(
                    source=f"{SOURCE} {epochs.node_type}",
                    what=f"ResNet-50, {BATCH} a GPU, {gpus} GPUs",
                    ranks=gpus,
                    evaluator=name,
                    chosen=name == CHOSEN,
                    unit="epoch",
                    predicted_s=middle,
                    low_s=low,
                    high_s=high,
                    perfect_s=base * fewest / gpus,
                    measured_s=median(epochs.seconds[gpus]),
                )
            )
    return found


def _anchored(told: Told, shift_s: float, count: int) -> tuple[float, float, float]:
    return (
        count * (told.low_s + shift_s),
        count * (told.iteration_s + shift_s),
        count * (told.high_s + shift_s),
    )
