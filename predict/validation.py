"""Predictions held against training runs, with the baselines beside them (INTERFACE.md, "predict validate")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from calibrate.profile import Profile, read_profile
from paradl_bench.spec.cluster import Cluster
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.strategy import parse_strategy
from predict.cost_model import CostModel
from predict.costs import Floats
from predict.input_terms import InputOptions
from predict.inputs import choose_network, read_cluster
from predict.memory_validation import MemoryPair, MemoryScore, memory_pair, memory_score
from predict.prediction import Prediction, Predictor
from predict.runs import PHASES, Run, has_iterations, noise_floor, read_runs, runs_that_did_not_fit
from predict.workload import Point, evaluators

PREDICTOR = "simulate"
"""The evaluator under test; the others of :data:`EVALUATORS` are its baselines."""
EVALUATORS = (PREDICTOR, "proportional", "paradl", "csf")
_NO_BACKEND = "none"


class PhasePair(msgspec.Struct, frozen=True, kw_only=True):
    """A phase as predicted and as measured; error is (predicted - measured) / measured, None where it took no time."""

    predicted_s: float
    measured_s: float
    error: float | None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction beside the run that it predicts.

    Attributes:
        options: those of the strategy that are not the defaults, by the name of the setting.
        noise_floor: run-to-run spread of the measurement, relative to it. noise_floor_from: what it was taken from.
        error: (predicted - measured) / measured. accuracy: 1 - |error|.
        covered: whether the interval holds the measured median.
        explained_by: the phase whose difference has the error's sign and is largest.
        issued_equals_plan: whether the run issued the plan's collectives.
        memory: None where the run did not track it.
    """

    run: str
    complete: bool
    evaluator: str
    model: str
    input_shape: tuple[int, ...]
    strategy: str
    ranks: int
    batch: int
    dtype: str
    optimizer: str
    backend: str
    bucket_cap_bytes: int
    first_bucket_bytes: int
    options: dict[str, str]
    iterations: int
    predicted_s: float
    interval_s: tuple[float, float]
    measured_median_s: float
    measured_iqr_s: float
    noise_floor: float
    noise_floor_from: str
    error: float
    accuracy: float
    covered: bool
    phases: dict[str, PhasePair]
    explained_by: str
    issued_equals_plan: bool | None
    memory: MemoryPair | None
    sources: dict[str, float]
    extrapolated: tuple[str, ...]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How one evaluator did over some runs.

    Attributes:
        interval_coverage: share of runs whose median lies in the interval.
        median_half_width: of the interval, relative to the prediction.
        phase_accuracy: mean of 1 - |error| per phase, over runs in which it took time.
    """

    runs: int
    mean_accuracy: float
    worst_accuracy: float
    mean_error: float
    interval_coverage: float
    median_half_width: float
    median_noise_floor: float
    phase_accuracy: dict[str, float]


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """How one evaluator orders strategies that were run at the same model and batch; means over such groups.

    Attributes:
        rank_correlation: Spearman's.
        top1_regret: measured time of the strategy predicted best over that of the best, less 1.
    """

    groups: int
    rank_correlation: float | None
    top1_regret: float | None


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """How well a run is predicted by other real runs of its configuration: the median of their medians.

    Attributes:
        runs: those that have at least one other.
        half_width_85: relative half-width that an interval round it needs to hold 85% of the runs.
    """

    runs: int
    mean_accuracy: float
    half_width_85: float


class Overall(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluator's score and ranking over all runs; memory over those that it was not fitted to."""

    score: Score
    ranking: Ranking
    memory: MemoryScore | None = None


class Outlier(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose median lies outside the interval, and the phase that explains most of the error."""

    run: str
    model: str
    strategy: str
    batch: int
    error: float
    noise_floor: float
    phase: str
    phase_difference_s: float


class Unfit(msgspec.Struct, frozen=True, kw_only=True):
    """A run that memory ended, beside the memory that was predicted of it.

    Attributes:
        needed_bytes: what the rank that ran out held and asked for; its whole process, where the prediction counts
            tensors. had_bytes: what there was.
    """

    run: str
    model: str
    strategy: str
    batch: int
    rank: int
    phase: str
    needed_bytes: int
    had_bytes: int
    predicted_bytes: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``report.json`` holds.

    Attributes:
        strategies: by strategy, then by evaluator.
        overall: by evaluator.
        reruns: by strategy: what a prediction can reach at best on this machine.
        notes: runs that were skipped or incomplete, and differences of environment that were accepted.
        did_not_fit: runs that memory ended; those with enough iterations are among the pairs too.
    """

    profile: str
    pairs: tuple[Pair, ...]
    strategies: dict[str, dict[str, Score]]
    overall: dict[str, Overall]
    reruns: dict[str, Rerun]
    outliers: tuple[Outlier, ...]
    notes: tuple[str, ...]
    did_not_fit: tuple[Unfit, ...] = ()


def validate_runs(profile_path: Path, paths: Sequence[Path], *, cluster_path: Path | None, force: bool) -> Report:
    """Predict every run with every evaluator that covers its strategy, and compare.

    Args:
        force: compare runs of another environment or network than the profile's, and note it.

    Raises:
        UserError: no usable run, a run of a model that the profile lacks, or of another environment without ``force``.
    """
    profile = read_profile(profile_path)
    cluster = read_cluster(cluster_path) if cluster_path else None
    unfit = runs_that_did_not_fit(list(dict.fromkeys(paths)))
    without_times = {run.path for run in unfit if not has_iterations(run.path)}
    comparable = [path for path in dict.fromkeys(paths) if path not in without_times]
    runs, notes = read_runs(comparable) if comparable or not unfit else ((), ())
    differences = list(dict.fromkeys(line for run in (*runs, *unfit) for line in _unlike(profile, run)))
    if differences and not force:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise UserError(f"{differences[0]}{more}; give --force to compare nevertheless")
    predictors = _Predictors(profile, cluster)
    pairs = tuple(
        _pair(run, runs, profile, predictors.predict(run, evaluator))
        for run in runs
        for evaluator in EVALUATORS
        if predictors.covers(run, evaluator)
    )
    strategies = tuple(dict.fromkeys(run.description.strategy for run in runs))
    known = [name for name in EVALUATORS if any(pair.evaluator == name for pair in pairs)]
    return Report(
        profile=str(profile_path),
        pairs=pairs,
        strategies={strategy: _scores([p for p in pairs if p.strategy == strategy]) for strategy in strategies},
        overall={name: _overall(list(_of(pairs, name))) for name in known},
        reruns={
            strategy: rerun
            for strategy in strategies
            if (rerun := rerun_of([run for run in runs if run.description.strategy == strategy])) is not None
        },
        outliers=tuple(_outlier(pair) for pair in _of(pairs, PREDICTOR) if not pair.covered),
        notes=(*notes, *(f"compared by force: {line}" for line in differences)),
        did_not_fit=tuple(_unfit(run, predictors.predict(run, PREDICTOR)) for run in unfit),
    )


def _unfit(run: Run, prediction: Prediction) -> Unfit:
    about = run.description
    worst = max(about.did_not_fit, key=lambda found: found.needed_bytes)
    return Unfit(
        run=str(run.path),
        model=about.model,
        strategy=about.strategy,
        batch=about.batch,
        rank=worst.rank,
        phase=worst.phase,
        needed_bytes=worst.needed_bytes,
        had_bytes=worst.had_bytes,
        predicted_bytes=prediction.memory_bytes,
    )


def _unlike(profile: Profile, run: Run) -> list[str]:
    """What makes a run unlike the profile: its environment against the nearest of the profile's, and its network."""
    environment = run.manifest.environment
    found = min((known.differences(environment) for known in profile.environments), key=len, default=[])
    lines = [f"{run.path} was run in another environment than the profile's: {'; '.join(found)}"] if found else []
    network = profile.network.get(run.description.model)
    if network is not None and network.digest != run.description.network_digest:
        shapes = ["x".join(map(str, shape)) for shape in (network.input_shape, run.description.input_shape)]
        about = f"input {shapes[0]} against {shapes[1]}" if shapes[0] != shapes[1] else "layers or parameters differ"
        lines.append(f"{run.path} trained another {run.description.model} than the profile's: {about}")
    return lines


class _Predictors:
    """Cost models by what they are made for, kept from run to run."""

    def __init__(self, profile: Profile, cluster: Cluster | None) -> None:
        self._profile = profile
        self._cluster = cluster
        self._evaluators = evaluators()
        self._models: dict[tuple[str, ...], CostModel] = {}

    def covers(self, run: Run, evaluator: str) -> bool:
        """Whether the evaluator has something to say on a run's strategy."""
        return self._evaluators[evaluator].covers(parse_strategy(run.description.strategy))

    def predict(self, run: Run, evaluator: str) -> Prediction:
        """The prediction of a run's configuration.

        Raises:
            UserError: the profile lacks what the run needs; the message names the run.
        """
        try:
            return self._predict(run, evaluator)
        except UserError as error:
            raise UserError(f"{run.path}: {error}") from error

    def _predict(self, run: Run, evaluator: str) -> Prediction:
        about = run.description
        key = about.model, about.optimizer, about.dtype, about.backend
        if key not in self._models:
            self._models[key] = CostModel(
                profile=self._profile,
                network=choose_network(self._profile, about.model, None),
                optimizer=about.optimizer,
                dtype=about.dtype,
                cluster=self._cluster,
                backend=None if about.backend == _NO_BACKEND else about.backend,
                # A training run draws its samples in memory: nothing is read, whatever the profile knows of reading.
                input_options=InputOptions(io_s=0.0, h2d_s=0.0),
            )
        point = Point(strategy=parse_strategy(about.strategy), settings=about.settings)
        return Predictor(self._models[key], self._evaluators[evaluator]).predict(point)


def _pair(run: Run, runs: Sequence[Run], profile: Profile, prediction: Prediction) -> Pair:
    about, measured_s, predicted_s = run.description, run.median_s, prediction.iteration_s
    low, high = prediction.interval_s
    error = predicted_s / measured_s - 1
    floor, origin = noise_floor(run, runs)
    phases = {name: _phase(prediction.phases_s[name], run.phase_s[name]) for name in PHASES}
    sign = 1 if error > 0 else -1
    return Pair(
        run=str(run.path),
        complete=run.manifest.complete,
        evaluator=prediction.evaluator,
        model=about.model,
        input_shape=about.input_shape,
        strategy=about.strategy,
        ranks=about.ranks,
        batch=about.batch,
        dtype=about.dtype,
        optimizer=about.optimizer,
        backend=about.backend,
        bucket_cap_bytes=about.bucket_cap_bytes,
        first_bucket_bytes=about.first_bucket_bytes,
        options=about.settings.options,
        iterations=len(run.iteration_s),
        predicted_s=predicted_s,
        interval_s=prediction.interval_s,
        measured_median_s=measured_s,
        measured_iqr_s=float(np.subtract(*np.percentile(run.iteration_s, [75, 25]))),
        noise_floor=floor,
        noise_floor_from=origin,
        error=error,
        accuracy=1 - abs(error),
        covered=low <= measured_s <= high,
        phases=phases,
        explained_by=max(phases, key=lambda name: sign * (phases[name].predicted_s - phases[name].measured_s)),
        issued_equals_plan=about.issued_equals_plan,
        memory=memory_pair(profile, run, prediction),
        sources=prediction.sources,
        extrapolated=prediction.extrapolated,
    )


def _phase(predicted_s: float, measured_s: float) -> PhasePair:
    error = predicted_s / measured_s - 1 if measured_s > 0 else None
    return PhasePair(predicted_s=predicted_s, measured_s=measured_s, error=error)


def rerun_of(runs: Sequence[Run]) -> Rerun | None:
    """How the other runs of its configuration predict each run; None where no configuration was run twice."""
    deviations = []
    for run in runs:
        others = [o.median_s for o in runs if o is not run and o.configuration == run.configuration]
        if others:
            deviations.append(abs(float(np.median(others)) / run.median_s - 1))
    if not deviations:
        return None
    return Rerun(
        runs=len(deviations),
        mean_accuracy=float(1 - np.mean(deviations)),
        half_width_85=float(np.quantile(deviations, 0.85)),
    )


def _overall(pairs: Sequence[Pair]) -> Overall:
    of_memory = [pair.memory for pair in pairs if pair.memory is not None]
    return Overall(score=_score(pairs), ranking=rank(pairs), memory=memory_score(of_memory) if of_memory else None)


def _scores(pairs: Sequence[Pair]) -> dict[str, Score]:
    """By evaluator, of those that say something on these runs."""
    return {name: _score(own) for name in EVALUATORS if (own := list(_of(pairs, name)))}


def _of(pairs: Iterable[Pair], evaluator: str) -> Iterable[Pair]:
    return (pair for pair in pairs if pair.evaluator == evaluator)


def _score(pairs: Iterable[Pair]) -> Score:
    chosen = list(pairs)
    phase_errors = {
        name: [error for pair in chosen if (error := pair.phases[name].error) is not None] for name in PHASES
    }
    return Score(
        runs=len(chosen),
        mean_accuracy=float(np.mean([pair.accuracy for pair in chosen])),
        worst_accuracy=min(pair.accuracy for pair in chosen),
        mean_error=float(np.mean([pair.error for pair in chosen])),
        interval_coverage=float(np.mean([pair.covered for pair in chosen])),
        median_half_width=float(np.median([half_width(pair) for pair in chosen])),
        median_noise_floor=float(np.median([pair.noise_floor for pair in chosen])),
        phase_accuracy={name: float(1 - np.mean(np.abs(errors))) for name, errors in phase_errors.items() if errors},
    )


def half_width(pair: Pair) -> float:
    """Half the interval, relative to the prediction."""
    low, high = pair.interval_s
    return (high - low) / 2 / pair.predicted_s


def rank(pairs: Sequence[Pair]) -> Ranking:
    """Order of strategies within each (model, input shape, batch, dtype, optimizer), predicted against measured.

    Repeated runs of one strategy count as one, by the median of their medians.
    """
    groups: dict[tuple[object, ...], dict[tuple[object, ...], list[Pair]]] = {}
    for pair in pairs:
        key = pair.model, pair.input_shape, pair.batch, pair.dtype, pair.optimizer
        strategy = pair.strategy, pair.bucket_cap_bytes, pair.first_bucket_bytes, *sorted(pair.options.items())
        groups.setdefault(key, {}).setdefault(strategy, []).append(pair)
    correlations, regrets = [], []
    for strategies in groups.values():
        if len(strategies) < 2:
            continue
        measured = np.array([np.median([p.measured_median_s for p in repeated]) for repeated in strategies.values()])
        predicted = np.array([repeated[0].predicted_s for repeated in strategies.values()])
        correlations.append(_spearman(predicted, measured))
        regrets.append(float(measured[int(np.argmin(predicted))] / measured.min() - 1))
    known = [value for value in correlations if value is not None]
    return Ranking(
        groups=len(regrets),
        rank_correlation=float(np.mean(known)) if known else None,
        top1_regret=float(np.mean(regrets)) if regrets else None,
    )


def _spearman(first: Floats, second: Floats) -> float | None:
    """Correlation of ranks, ties sharing their mean rank; None where one side does not vary."""
    one, other = _ranks(first), _ranks(second)
    if min(np.ptp(one), np.ptp(other)) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: Floats) -> Floats:
    ordered = np.sort(values)
    return np.array([float(np.mean(np.flatnonzero(ordered == value))) for value in values])


def _outlier(pair: Pair) -> Outlier:
    phase = pair.phases[pair.explained_by]
    return Outlier(
        run=pair.run,
        model=pair.model,
        strategy=pair.strategy,
        batch=pair.batch,
        error=pair.error,
        noise_floor=pair.noise_floor,
        phase=pair.explained_by,
        phase_difference_s=phase.predicted_s - phase.measured_s,
    )
