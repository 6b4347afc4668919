"""Predictions held against training runs, with the baselines beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from calibrate.fitting.memory.memory_runs import configuration_hash
from calibrate.profile.profile import Profile, read_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import grouped
from paradl_bench.core.units import counted
from paradl_bench.records.emulation import words_of_emulation
from paradl_bench.records.hosts.host_load import busy_lines, read_load
from predict.costs.compute.layer_source import MEASURED_FIRST, LayersFrom
from predict.costs.files import read_cluster
from predict.prediction.interval import WORST_OVERLAP
from predict.prediction.prediction import Prediction
from predict.validation.diagnosis.of_validation import limitations_of
from predict.validation.memory_validation import memory_pair
from predict.validation.ranks.activity import Activity
from predict.validation.ranks.calls import Calls
from predict.validation.run_predictors import RunPredictors
from predict.validation.runs import PHASES, Run, has_iterations, noise_floor, read_runs, runs_that_did_not_fit
from predict.validation.scaling_factors import scaling_factors, serial_runs_wanted
from predict.validation.validation_report import (
    EVALUATORS,
    FAR_OFF,
    IN_ORDER_OF_PAIRS,
    INPUT,
    PIPELINE_IDLE,
    PREDICTOR,
    Outlier,
    Pair,
    PhasePair,
    Report,
    Rerun,
    Unfit,
    pairs_of,
)
from predict.validation.validation_scores import overall_score, repeated_of, rerun_of, scores_by_evaluator

_OF_RUN = (
    *("model", "input_shape", "strategy", "ranks", "batch", "dtype", "kernel_settings", "optimizer", "backend"),
    *("bucket_cap_bytes", "first_bucket_bytes", "issued_equals_plan"),
)
"""What a pair takes over from the run as it is."""
_TOLD_WHERE_NOT_APPLICABLE = ("csf", "osf", "dag", "flops")
"""Baselines of which a reader would expect a number of every run."""


def validate_runs(
    profile_path: Path,
    paths: Sequence[Path],
    *,
    cluster_path: Path | None,
    force: bool,
    layers_from: LayersFrom = MEASURED_FIRST,
    profile: Profile | None = None,
) -> Report:
    """Predict every run with every evaluator that covers its strategy, and compare.

    Args:
        profile: where it has been read; else it is read from its path.
        force: compare runs of another environment or network than the profile's, and note it.
        layers_from: what layers take in the predictions.

    Raises:
        UserError: no usable run, a run of a model that the profile lacks, or of another environment without ``force``.
    """
    profile = profile or read_profile(profile_path)
    runs, unfit, notes = _read(list(dict.fromkeys(paths)))
    predictors = RunPredictors(profile, profile_path, read_cluster(cluster_path) if cluster_path else None, layers_from)
    differences = list(dict.fromkeys(line for run in (*runs, *unfit) for line in predictors.differences(run)))
    if differences and not force:
        raise _of_another_environment(differences, profile_path)
    of_ranks = {run.path: (predictors.activity(run), predictors.calls(run)) for run in runs}
    limits = {run.path: limitations_of(run, predictors) for run in runs}
    pairs = tuple(
        _pair(run, runs, profile, predictors.predict(run, evaluator), *of_ranks[run.path])
        for names in IN_ORDER_OF_PAIRS
        for run in runs
        for evaluator in names
        if predictors.covers(run, evaluator)
    )
    simulated = pairs_of(pairs, PREDICTOR)
    strategies = tuple(dict.fromkeys(run.description.strategy for run in runs))
    known = [name for name in EVALUATORS if any(pair.evaluator == name for pair in pairs)]
    return Report(
        profile=str(profile_path),
        pairs=pairs,
        strategies={name: scores_by_evaluator([p for p in pairs if p.strategy == name]) for name in strategies},
        overall={name: overall_score(pairs_of(pairs, name)) for name in known},
        reruns=_reruns(runs, strategies),
        outliers=tuple(_outlier(pair) for pair in simulated if not pair.covered),
        far_off=tuple(_outlier(pair) for pair in simulated if pair.covered and abs(pair.error) > FAR_OFF),
        notes=(
            *notes,
            *(() if layers_from.measured else (f"{layers_from.asked}: no prediction uses measured layers",)),
            *_emulated([*runs, *unfit]),
            *_compared_before(profile, runs),
            *(f"compared by force: {line}" for line in differences),
            *_shared("no activity error", ((why, path) for path, (why, _) in of_ranks.items() if isinstance(why, str))),
            *_shared("no diagnosis", ((why, path) for path, why in limits.items() if isinstance(why, str))),
        ),
        did_not_fit=tuple(_unfit(run, predictors.predict(run, PREDICTOR)) for run in unfit),
        repeated=repeated_of(pairs),
        scaling_factors=scaling_factors(runs, pairs),
        serial_runs_wanted=serial_runs_wanted(runs, lambda run: predictors.predict(run, PREDICTOR)),
        not_applicable=_not_applicable(runs, predictors),
        limitations=tuple(row for rows in limits.values() if not isinstance(rows, str) for row in rows),
        busy_hosts=tuple(busy_lines((*profile.host_loads, *((str(run.path), read_load(run.path)) for run in runs)))),
    )


def _read(paths: Sequence[Path]) -> tuple[tuple[Run, ...], tuple[Run, ...], tuple[str, ...]]:
    """Runs with times, those that memory ended, which may be among them, and lines on what to know of each."""
    unfit = runs_that_did_not_fit(paths)
    without_times = {run.path for run in unfit if not has_iterations(run.path)}
    comparable = [path for path in paths if path not in without_times]
    runs, notes = read_runs(comparable) if comparable or not unfit else ((), ())
    return runs, unfit, notes


def _not_applicable(runs: Sequence[Run], predictors: RunPredictors) -> tuple[str, ...]:
    """Which baselines have nothing to say on which runs, a line for those that leave out the same."""
    lines, left_out_by = [], dict[str, str]()
    for name in _TOLD_WHERE_NOT_APPLICABLE:
        left_out = dict.fromkeys(_in_words(run) for run in runs if not predictors.covers(run, name))
        lacking = dict.fromkeys(words for run in runs if (words := predictors.lacks(run, name)))
        if lacking:
            lines += [f"not applicable: {words}" for words in lacking]
        elif left_out:
            left_out_by[name] = ", ".join(left_out)
    groups = grouped(left_out_by, left_out_by.__getitem__)
    return (*(f"not applicable to {words}: {', '.join(names)}" for words, names in groups.items()), *lines)


def _in_words(run: Run) -> str:
    """Strategy, and what no closed form knows of its settings."""
    about = run.description
    options = [f"{name} {text}" for name, text in about.settings.simulated_alone.items()]
    options += [f"input {about.input.source}"] if about.input is not None else []
    slow = [f"slow rank {about.ghost.slow_rank}"] if about.ghost and about.ghost.slow_rank else []
    return about.strategy + (f" ({'; '.join([*options, *slow])})" if options or slow else "")


def _of_another_environment(differences: Sequence[str], profile_path: Path) -> UserError:
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return UserError(f"{differences[0]}{more} (profile {profile_path}); give --force to compare nevertheless")


def _reruns(runs: Sequence[Run], strategies: Iterable[str]) -> dict[str, Rerun]:
    reruns = {name: rerun_of([run for run in runs if run.description.strategy == name]) for name in strategies}
    return {name: rerun for name, rerun in reruns.items() if rerun is not None}


def _unfit(run: Run, prediction: Prediction) -> Unfit:
    about = run.description
    worst = max(about.did_not_fit, key=lambda shortage: shortage.needed_bytes)
    return Unfit(
        run=str(run.path),
        model=about.model,
        strategy=about.strategy,
        batch=about.batch,
        rank=worst.rank,
        phase=worst.phase,
        needed_bytes=worst.needed_bytes,
        had_bytes=worst.had_bytes,
        predicted_bytes=prediction.memory.memory_bytes,
    )


def _shared(what: str, said: Iterable[tuple[str, Path]]) -> list[str]:
    """What is said of runs, a line for what several share; nothing of those of which nothing is."""
    of_words = grouped(said, lambda pair: pair[0])
    return [f"{what}, {words}: {', '.join(str(path) for _, path in told)}" for words, told in of_words.items() if words]


def _compared_before(profile: Profile, runs: Sequence[Run]) -> list[str]:
    """Which intervals are no test, as the profile counts the errors of these runs or of repetitions of them."""
    configurations = {run.configuration for run in profile.runs_compared}
    known = [run for run in runs if configuration_hash(run.description) in configurations]
    if not known:
        return []
    return [
        f"intervals are no test for {counted(len(known), 'run')}: the profile holds these runs, or repetitions of them,"
        " as compared runs"
    ]


def _emulated(runs: Sequence[Run]) -> list[str]:
    """What was emulated of which runs."""
    lines = _shared("emulated", ((words_of_emulation(run.manifest.environment.emulated), run.path) for run in runs))
    if any(run.description.ghost is not None and run.description.ghost.host_s is not None for run in runs):
        lines.append(
            "intervals of emulated runs end later, because their ranks also use the host for other work than"
            " communication. Each run measured that time, and any part of it may show"
        )
    return lines


def _pair(
    run: Run,
    runs: Sequence[Run],
    profile: Profile,
    prediction: Prediction,
    activity: Activity | str,
    calls: Calls | None,
) -> Pair:
    about, measured_s, predicted_s = run.description, run.median_s, prediction.iteration_s
    low, high = _interval(run, prediction)
    error = predicted_s / measured_s - 1
    floor, origin = noise_floor(run, runs)
    measured_phases_s = run.phases_s(prediction.time.pipeline_stage)
    phases = {name: _phase(prediction.time.phases_s[name], measured_phases_s[name]) for name in PHASES}
    pair = Pair(
        run=str(run.path),
        complete=run.manifest.complete,
        evaluator=prediction.evaluator,
        **{field: getattr(about, field) for field in _OF_RUN},
        options=about.settings.options,
        iterations=len(run.iteration_s),
        predicted_s=predicted_s,
        interval_s=(low, high),
        measured_median_s=measured_s,
        measured_iqr_s=float(np.subtract(*np.percentile(run.iteration_s, [75, 25]))),
        noise_floor=floor,
        noise_floor_from=origin,
        error=error,
        accuracy=1 - abs(error),
        covered=low <= measured_s <= high,
        phases=phases,
        explained_by="",
        memory=memory_pair(profile, run, prediction),
        sources=prediction.provenance.sources,
        extrapolated=prediction.provenance.extrapolated,
        emulated=words_of_emulation(run.manifest.environment.emulated),
        activity=activity if isinstance(activity, Activity) and prediction.evaluator == PREDICTOR else None,
        idle=_idle(run, prediction),
        input=_input(run, prediction),
        calls=calls if prediction.evaluator == PREDICTOR else None,
    )
    parts = pair.parts
    worst = max(parts, key=lambda name: (1 if error > 0 else -1) * _difference_s(parts[name]))
    return msgspec.structs.replace(pair, explained_by=worst)


def _interval(run: Run, prediction: Prediction) -> tuple[float, float]:
    """As predicted; of an emulated run with what its ranks take the host for besides communication at its upper end."""
    (low, high), ghost, predicted_s = prediction.time.interval_s, run.description.ghost, prediction.iteration_s
    if ghost is not None and ghost.host_s is not None:
        # As with what overlap may cost: any part of it shows, on this side alone.
        high = predicted_s + math.hypot(high - predicted_s, WORST_OVERLAP * ghost.host_at_most_s)
    return low, high


def _idle(run: Run, prediction: Prediction) -> PhasePair | None:
    """Waiting for other stages, of the stage that the phases are of."""
    if prediction.time.pipeline_stage is None:
        return None
    measured_s = run.idle_s(prediction.time.pipeline_stage)
    return None if measured_s is None else _phase(prediction.time.breakdown_s.get(PIPELINE_IDLE, 0.0), measured_s)


def _input(run: Run, prediction: Prediction) -> PhasePair | None:
    """Waiting for the mini-batch."""
    measured_s, parts = run.input_s, prediction.time.breakdown_s
    if measured_s is None:
        return None
    return _phase(parts.get(INPUT, 0.0) + parts.get("h2d", 0.0), measured_s)


def _difference_s(pair: PhasePair) -> float:
    return pair.predicted_s - pair.measured_s


def _phase(predicted_s: float, measured_s: float) -> PhasePair:
    error = predicted_s / measured_s - 1 if measured_s > 0 else None
    return PhasePair(predicted_s=predicted_s, measured_s=measured_s, error=error)


def _outlier(pair: Pair) -> Outlier:
    phase = pair.parts[pair.explained_by]
    shared = ("run", "model", "strategy", "batch", "error", "noise_floor")
    return Outlier(
        **{field: getattr(pair, field) for field in shared},
        phase=pair.explained_by,
        phase_difference_s=_difference_s(phase),
        shares_memory=pair.ranks > 1 and pair.backend != "nccl" and not pair.emulated,
    )
