"""Training runs as validation reads them: the iteration of the slowest rank, its phases, and the noise of the run.

An iteration's time is that of its slowest rank. Its phases are those of the rank that finishes backward last: the
others wait for it, and their wait is no exchange. Stages of a pipeline compute different layers, so there the phases
are those of the stage that the prediction speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.core.units import counted
from paradl_bench.measure.machine.node_findings import lines_of_nodes
from paradl_bench.measure.stragglers.pace import training_pace
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import group_axes
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.emulation import kind_of_emulation
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import Manifest, read_manifest, read_records, torn_rows
from paradl_bench.records.training.training_record import (
    RUN_NAME,
    TRAINING_FILE,
    TrainingIterations,
    TrainingRun,
    read_run,
    without_timed_calls,
)
from predict.costs.sourced import Floats

MIN_ITERATIONS = 5
"""A median of fewer says nothing of a run."""
PHASES = ("FW", "BW", "GE", "WU")
_ROUNDING = 1e-9
"""Of an iteration, what sums of its phases may be off by."""
_FIELDS = ("fw_s", "bw_s", "exposed_ge_s", "wu_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run that was measured; times are (iterations, ranks, 5): the whole, FW, BW, exposed GE and WU."""

    path: Path
    manifest: Manifest
    description: TrainingRun
    rank_times_s: Floats

    @property
    def iteration_s(self) -> Floats:
        """Of the slowest rank, per iteration in order."""
        return np.asarray(self.rank_times_s[:, :, 0].max(axis=1))

    @property
    def configuration(self) -> tuple[object, ...]:
        """What two runs share that repeat each other."""
        run = self.description
        emulated = kind_of_emulation(self.manifest.environment.emulated)
        of_model = run.model, run.input_shape, run.network_digest
        computed = run.strategy, run.settings, run.dtype, run.kernel_settings, run.backend, emulated
        return *of_model, *computed, run.input

    @property
    def median_s(self) -> float:
        """Median iteration."""
        return float(np.median(self.iteration_s))

    def phases_s(self, stage: int | None = None) -> dict[str, float]:
        """Medians of FW, BW, exposed GE and WU of the rank, of a stage if one is given, that finishes backward last."""
        medians = np.median(self._of_last(stage)[:, 1:], axis=0)
        return dict(zip(PHASES, map(float, medians), strict=True))

    def idle_s(self, stage: int) -> float | None:
        """Median of what the phases of the same ranks leave of an iteration: waiting for other stages of a pipeline.

        None where phases hold it, as in runs that did not time it by itself.
        """
        times = self._of_last(stage)
        idle_s = float(np.median(times[:, 0] - times[:, 1:].sum(axis=1)))
        return idle_s if idle_s > _ROUNDING * self.median_s else None

    @property
    def input_s(self) -> float | None:
        """Median of what the ranks of the phases wait for their input; None where nothing is read, or in a pipeline."""
        if self.description.input is None or group_axes(parse_strategy(self.description.strategy), Trait.STAGES):
            return None
        times = self._of_last(None)
        return max(float(np.median(times[:, 0] - times[:, 1:].sum(axis=1))), 0.0)

    def _of_last(self, stage: int | None) -> Floats:
        """Times of the rank of a stage that finishes backward last, of shape (iterations, 5)."""
        times = self.rank_times_s[:, self._ranks_of(stage)]
        last = np.argmax(times[:, :, 1] + times[:, :, 2], axis=1)
        return np.asarray(times[np.arange(len(times)), last])

    def _ranks_of(self, stage: int | None) -> list[int]:
        strategy, ranks = parse_strategy(self.description.strategy), range(self.rank_times_s.shape[1])
        if stage is None:
            return list(ranks)
        (along,) = group_axes(strategy, Trait.STAGES)
        return [rank for rank in ranks if strategy.coordinates(rank)[along] == stage]


def read_runs(paths: Sequence[Path]) -> tuple[tuple[Run, ...], tuple[str, ...]]:
    """Runs of directories, and lines on what to know of each: skipped, incomplete, on unlike nodes, held up by a rank.

    Raises:
        UserError: a directory holds no training run, one that can't be read, or none has enough iterations.
    """
    runs: list[Run] = []
    lines: list[str] = []
    for path in paths:
        manifest = read_manifest(path)
        if manifest.kind != "training":
            raise UserError(f"{path} holds {manifest.kind}, no training run: give directories of paradl-bench train")
        read = read_records(path, TRAINING_FILE, TrainingIterations)
        records = without_timed_calls(read)
        times = _by_iteration(records, _phases)
        if len(times) < MIN_ITERATIONS:
            lines.append(_too_short(path, len(times), timed=any(record.calls for record in read)))
            continue
        if not manifest.complete:
            lines.append(f"{path}: incomplete, its {len(times)} iterations are used")
        lines += [f"{path}/{name}: 1 row that was not written whole is left out" for name in torn_rows(path)]
        about = read_run(path)
        stray = next((record.rank for record in records if record.rank >= about.ranks), None)
        if stray is not None:
            raise UserError(f"{path} holds iterations of rank {stray}, and its run has ranks 0 to {about.ranks - 1}")
        pace = training_pace(about, records, read_host_records(path))
        lines += [f"{path}: {line}" for line in (*lines_of_nodes(path), *pace.lines())]
        if times.shape[1] != about.ranks:
            raise UserError(f"{path} holds iterations of {times.shape[1]} ranks, and its run has {about.ranks}")
        runs.append(Run(path=path, manifest=manifest, description=about, rank_times_s=_in_rounds(about, times)))
    if not runs:
        raise UserError(f"no run to compare with: {'; '.join(lines)}")
    return tuple(runs), tuple(lines)


def _too_short(path: Path, iterations: int, *, timed: bool) -> str:
    """Why a run is left out; iterations whose calls were timed one by one don't count."""
    besides = " besides those of --time-collectives" if timed else ""
    held = f"{counted(iterations, 'iteration')} on all ranks{besides}"
    return f"{path}: skipped, {held}; at least {MIN_ITERATIONS} are needed"


def _in_rounds(about: TrainingRun, times: Floats) -> Floats:
    """Times of iterations; where several workers read, which deliver in bursts, means over rounds of as many."""
    workers = about.input.workers if about.input is not None else 0
    if workers < 2 or len(times) < MIN_ITERATIONS * workers:
        return times
    rounds = len(times) // workers
    return np.asarray(times[: rounds * workers].reshape(rounds, workers, *times.shape[1:]).mean(axis=1))


def runs_that_did_not_fit(paths: Sequence[Path]) -> tuple[Run, ...]:
    """Runs that memory ended, without times.

    Raises:
        UserError: a directory holds no measurement, or one that can't be read.
    """
    unfit = []
    for path in paths:
        manifest = read_manifest(path)
        description = read_run(path) if manifest.kind == "training" and (path / RUN_NAME).exists() else None
        if description is not None and description.did_not_fit:
            no_times = np.empty((0, description.ranks, 5))
            unfit.append(Run(path=path, manifest=manifest, description=description, rank_times_s=no_times))
    return tuple(unfit)


def has_iterations(path: Path) -> bool:
    """Whether a run has enough iterations on all ranks to be compared."""
    return (
        len(_by_iteration(without_timed_calls(read_records(path, TRAINING_FILE, TrainingIterations)), _phases))
        >= MIN_ITERATIONS
    )


def communication_of(run: Run) -> dict[str, Floats]:
    """What communication for layers took in forward and backward, by kind: each of shape (iterations, ranks)."""
    records = without_timed_calls(read_records(run.path, TRAINING_FILE, TrainingIterations))
    kinds = sorted({kind for record in records for kind in (*record.fw_communication_s, *record.bw_communication_s)})

    def columns(record: TrainingIterations) -> list[Floats]:
        none = np.zeros(len(record.iteration_s))
        ways = record.fw_communication_s, record.bw_communication_s
        return [none + sum(np.asarray(way.get(kind, none)) for way in ways) for kind in kinds]

    times = _in_rounds(run.description, _by_iteration(records, columns)) if kinds else np.empty((0, 0, 0))
    return {kind: times[:, :, index] for index, kind in enumerate(kinds)}


def copies_of(run: Run) -> Floats | None:
    """What cutting tensors and putting them together took, of shape (iterations, ranks); None where none was timed."""
    records = without_timed_calls(read_records(run.path, TRAINING_FILE, TrainingIterations))
    if not any(record.copies_s for record in records):
        return None
    times = _by_iteration(records, lambda record: [record.copies_s or np.zeros(len(record.iteration_s))])
    return _in_rounds(run.description, times)[:, :, 0]


def _phases(record: TrainingIterations) -> list[Sequence[float]]:
    """The whole iteration, FW, BW, exposed GE and WU."""
    return [record.iteration_s, *(getattr(record, field) for field in _FIELDS)]


def _by_iteration(
    records: Iterable[TrainingIterations], columns: Callable[[TrainingIterations], Sequence[Sequence[float] | Floats]]
) -> Floats:
    """Columns of shape (iterations, ranks, columns) for the iterations that every rank holds."""
    iterations: dict[int, dict[int, tuple[float, ...]]] = {}
    for record in records:
        for index, times in enumerate(zip(*columns(record), strict=True), start=record.first_iteration):
            iterations.setdefault(index, {})[record.rank] = times
    ranks = max(map(len, iterations.values()), default=0)
    whole = [by_rank for _, by_rank in sorted(iterations.items()) if len(by_rank) == ranks]
    return np.array([[by_rank[rank] for rank in sorted(by_rank)] for by_rank in whole], float)


def noise_floor(run: Run, runs: Sequence[Run]) -> tuple[float, str]:
    """Run-to-run spread of the measurement, relative to it, and what it was taken from.

    Of a configuration's runs the median over pairs of how far their medians differ; of a single run, its halves'.
    """
    medians = [other.median_s for other in runs if other.configuration == run.configuration]
    if len(medians) > 1:
        pairs = [abs(a - b) / ((a + b) / 2) for i, a in enumerate(medians) for b in medians[i + 1 :]]
        return float(np.median(pairs)), f"{len(medians)} runs"
    half = len(run.iteration_s) // 2
    first, second = np.median(run.iteration_s[:half]), np.median(run.iteration_s[half:])
    return float(abs(first - second) / run.median_s), "halves of the run"
