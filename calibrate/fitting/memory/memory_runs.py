"""Training runs as memory factors are fitted to them: the peaks of their memory and nothing else.

A profile says of each run used here which it was, so that a validation leaves its memory out of the account.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from calibrate.fitting.reading import first_few, unlike_nearest
from calibrate.profile.memory_factors import MemoryMeasure, MemoryRun
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_whole
from paradl_bench.network.graph import ModelGraph, read_network
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.measurement import MANIFEST_NAME, Environment, Manifest, read_manifest
from paradl_bench.records.training.training_record import RUN_NAME, TrainingRun, read_run
from paradl_bench.strategies.memory.of_plan import memory_of_plan, paradl_memory_of_plan
from paradl_bench.strategies.memory.paradl import has_papers_row


class MemoryRuns(NamedTuple):
    """Runs, the environments of a profile with theirs added, and what a reader should know."""

    runs: tuple[MemoryRun, ...]
    environments: tuple[Environment, ...]
    notes: tuple[str, ...]


def read_memory_runs(
    paths: Sequence[Path],
    environments: Sequence[Environment],
    networks: Mapping[str, ModelGraph],
    *,
    force: bool,
) -> MemoryRuns:
    """The peaks of runs beside what the memory model says of their plans.

    Args:
        paths: directories of runs, or directories that hold those.
        environments: of the profile so far; runs of another one are refused.
        networks: by model, where a run's directory does not hold its own.
        force: use runs of different environments.

    Raises:
        UserError: no run, one twice, a network that is nowhere, an unlike environment, or something that can't be read.
    """
    known = list(environments)
    runs: list[MemoryRun] = []
    notes: list[str] = []
    for directory in (run for path in paths for run in _runs_in(path)):
        manifest = read_manifest(directory)
        if manifest.kind != "training":
            raise UserError(
                f"{directory} holds {manifest.kind}, not a training run: --memory-runs takes training runs only"
            )
        about = read_run(directory) if (directory / RUN_NAME).exists() else None
        if about is not None and about.ghost is not None:
            raise UserError(f"{directory} is emulated: its layers slept and did not hold a real run's memory")
        if about is None or not about.memory:
            notes.append(f"{directory}: left out, because no memory was tracked (interrupted, or out of memory)")
            continue
        notes += _check_alike(directory, manifest.environment, environments or known[:1], force=force)
        if manifest.environment not in known:
            known.append(manifest.environment)
        run = _run(directory, manifest, about, _network(directory, about, networks), known.index(manifest.environment))
        same = next((other.path for other in runs if other.sha256 == run.sha256), None)
        if same is not None:
            raise UserError(f"{same} and {directory} hold the same run; give it once")
        runs.append(run)
    return MemoryRuns(tuple(runs), tuple(known), tuple(notes))


def _runs_in(path: Path) -> list[Path]:
    if (path / MANIFEST_NAME).exists() or not path.is_dir():
        return [path]
    runs = [directory for directory in sorted(path.iterdir()) if (directory / RUN_NAME).exists()]
    if not runs:
        raise UserError(f"{path} is not a training run and holds none: give directories of paradl-bench train")
    return runs


def _check_alike(directory: Path, environment: Environment, known: Sequence[Environment], *, force: bool) -> list[str]:
    differences = unlike_nearest(known, environment)
    if not differences:
        return []
    text = f"{directory} ran in another environment ({first_few(differences)})"
    if not force:
        raise UserError(
            f"{text}; give runs from the environment of the other measurements, or --force to use this one anyway"
        )
    return [f"{text}; its memory is used because of --force"]


def _network(directory: Path, about: TrainingRun, networks: Mapping[str, ModelGraph]) -> ModelGraph:
    """The network that was trained, known by its digest."""
    of_profile = [networks[about.model]] if about.model in networks else []
    for network in (*map(read_network, sorted(directory.glob("network*.json"))), *of_profile):
        if network.digest == about.network_digest:
            return network
    shape = "x".join(map(str, about.input_shape))
    raise UserError(
        f"{directory} does not hold the network that it trained; write it: paradl-bench describe {about.model}"
        f" --input-shape {shape} -o {directory / 'network.json'}"
    )


def _run(directory: Path, manifest: Manifest, about: TrainingRun, network: ModelGraph, environment: int) -> MemoryRun:
    strategy = parse_strategy(about.strategy)
    device = manifest.environment.device
    planned = memory_of_plan(network, strategy, about.settings, dtype=about.dtype, device=device)
    paradl_bytes = None
    if has_papers_row(strategy):
        paradl_bytes = paradl_memory_of_plan(network, strategy, about.settings, dtype=about.dtype).peak_bytes
    return MemoryRun(
        path=str(directory),
        command_line=manifest.command_line,
        created_utc=manifest.created_utc,
        sha256=run_hash(directory),
        configuration=configuration_hash(about),
        environment=environment,
        device=manifest.environment.device_name,
        model=about.model,
        strategy=about.strategy,
        batch=about.batch,
        dtype=about.dtype,
        optimizer=about.optimizer,
        tensor_bytes=planned.peak_bytes,
        paradl_bytes=paradl_bytes,
        measured_bytes=measured_peaks(about),
    )


def measured_peaks(about: TrainingRun) -> dict[MemoryMeasure, int]:
    """The largest peak over ranks, by what was measured on all of them."""
    ranks: dict[MemoryMeasure, list[int | None]] = {
        "tensors": [peak.tracked_bytes for peak in about.memory],
        "allocator": [peak.allocator_bytes for peak in about.memory],
        "device": [peak.device_bytes for peak in about.memory],
    }
    return {
        measure: max(size for size in sizes if size is not None)
        for measure, sizes in ranks.items()
        if sizes and None not in sizes
    }


def run_hash(directory: Path) -> str:
    """SHA-256 over what says which run this was and what it held: the manifest and ``run.json``."""
    digest = hashlib.sha256()
    for name in (MANIFEST_NAME, RUN_NAME):
        content = read_whole(directory / name)
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def configuration_hash(about: TrainingRun) -> str:
    """Equal for runs that repeat each other, and hold the same bytes."""
    # Hashes of runs without settings are what they were.
    computed_in = f"{about.dtype} {about.kernel_settings}".rstrip()
    parts = (about.network_digest, about.strategy, computed_in, about.backend, about.settings)
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:16]
