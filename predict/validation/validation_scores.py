"""How evaluators did over some runs: accuracy, coverage of intervals, order of strategies, and what reruns allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from calibrate.fitting.memory.memory_runs import configuration_hash, run_hash
from calibrate.profile.compared_runs import ComparedRun
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90, grouped
from paradl_bench.records.training.training_record import TrainingRun, read_run
from predict.costs.sourced import Floats
from predict.validation.memory_validation import memory_score
from predict.validation.runs import PHASES, Run
from predict.validation.validation_report import (
    EVALUATORS,
    PREDICTOR,
    Overall,
    Pair,
    Ranking,
    Repeated,
    RepeatedPrediction,
    Report,
    Rerun,
    Score,
    pairs_of,
)


def overall_score(pairs: Sequence[Pair]) -> Overall:
    """Score, ranking and memory over one evaluator's pairs."""
    of_memory = [pair.memory for pair in pairs if pair.memory is not None]
    return Overall(score=_score(pairs), ranking=rank(pairs), memory=memory_score(of_memory) if of_memory else None)


def scores_by_evaluator(pairs: Sequence[Pair]) -> dict[str, Score]:
    """By evaluator, of those that say something on these runs."""
    return {name: _score(of_evaluator) for name in EVALUATORS if (of_evaluator := pairs_of(pairs, name))}


def _score(pairs: Sequence[Pair]) -> Score:
    phase_errors = {
        name: [error for pair in pairs if (error := pair.phases[name].error) is not None] for name in PHASES
    }
    half_widths = [(pair.interval_s[1] - pair.interval_s[0]) / 2 / pair.predicted_s for pair in pairs]
    return Score(
        runs=len(pairs),
        mean_accuracy=float(np.mean([pair.accuracy for pair in pairs])),
        worst_accuracy=min(pair.accuracy for pair in pairs),
        mean_error=float(np.mean([pair.error for pair in pairs])),
        interval_coverage=float(np.mean([pair.covered for pair in pairs])),
        median_half_width=float(np.median(half_widths)),
        median_noise_floor=float(np.median([pair.noise_floor for pair in pairs])),
        phase_accuracy={name: float(1 - np.mean(np.abs(errors))) for name, errors in phase_errors.items() if errors},
    )


def rank(pairs: Sequence[Pair]) -> Ranking:
    """Order of strategies, predicted and measured, within each model, input shape, batch, dtype, kernel settings,
    optimizer and emulation.

    Repeated runs of one strategy count as one, by the median of their medians.
    """
    correlations, regrets = [], []
    for of_work in grouped(pairs, _work_of).values():
        strategies = grouped(of_work, _way_of)
        if len(strategies) < 2:
            continue
        measured = np.array([np.median([p.measured_median_s for p in repeated]) for repeated in strategies.values()])
        predicted = np.array([repeated[0].predicted_s for repeated in strategies.values()])
        correlations.append(spearman(predicted, measured))
        regrets.append(float(measured[int(np.argmin(predicted))] / measured.min() - 1))
    known = [value for value in correlations if value is not None]
    return Ranking(
        groups=len(regrets),
        rank_correlation=float(np.mean(known)) if known else None,
        top1_regret=float(np.mean(regrets)) if regrets else None,
    )


def _work_of(pair: Pair) -> tuple[object, ...]:
    """What strategies are compared at."""
    computed_in = pair.dtype, pair.kernel_settings
    return pair.model, pair.input_shape, pair.batch, *computed_in, pair.optimizer, pair.emulated


def _way_of(pair: Pair) -> tuple[object, ...]:
    return pair.strategy, pair.bucket_cap_bytes, pair.first_bucket_bytes, *sorted(pair.options.items())


def repeated_of(pairs: Iterable[Pair]) -> tuple[Repeated, ...]:
    """Configurations with more than one run, predictions held against the median of the runs' medians."""
    groups = grouped(pairs, lambda pair: (*_work_of(pair), pair.backend, *_way_of(pair)))
    configurations = (grouped(of_configuration, lambda pair: pair.evaluator) for of_configuration in groups.values())
    return tuple(
        _repeated(by_evaluator) for by_evaluator in configurations if len(next(iter(by_evaluator.values()))) > 1
    )


def _repeated(by_evaluator: dict[str, list[Pair]]) -> Repeated:
    runs = next(iter(by_evaluator.values()))
    medians_s = [pair.measured_median_s for pair in runs]
    measured_s = float(np.median(medians_s))
    shared = ("model", "input_shape", "strategy", "batch", "options", "emulated")
    return Repeated(
        **{field: getattr(runs[0], field) for field in shared},
        runs=len(runs),
        measured_median_s=measured_s,
        measured_range_s=(min(medians_s), max(medians_s)),
        by_evaluator={name: _of_repeated(of_evaluator[0], measured_s) for name, of_evaluator in by_evaluator.items()},
    )


def _of_repeated(pair: Pair, measured_s: float) -> RepeatedPrediction:
    low, high = pair.interval_s
    return RepeatedPrediction(
        predicted_s=pair.predicted_s, error=pair.predicted_s / measured_s - 1, covered=low <= measured_s <= high
    )


def spearman(first: Floats, second: Floats) -> float | None:
    """Correlation of ranks, ties sharing their mean rank; None where one side does not vary."""
    one, other = _ranks(first), _ranks(second)
    if min(np.ptp(one), np.ptp(other)) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: Floats) -> Floats:
    ordered = np.sort(values)
    return np.array([float(np.mean(np.flatnonzero(ordered == value))) for value in values])


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


def with_compared_runs(profile: Profile, report: Report) -> Profile:
    """The profile with the runs of a report, whose errors its intervals then count; a run that it holds is replaced.

    Emulated runs whose layers slept are left out: they show nothing of real ones.

    Args:
        report: by predictions of this profile without compared runs.

    Raises:
        UserError: no run whose layers computed was compared.
    """
    compared = {run.sha256: run for run in profile.runs_compared}
    for pair in pairs_of(report.pairs, PREDICTOR):
        about = read_run(Path(pair.run))
        if about.ghost is None:
            run = _compared_run(pair, about)
            compared[run.sha256] = run
    if not compared:
        raise UserError("no run has times of real layers to compare: its profile would be the same")
    return msgspec.structs.replace(profile, compared_runs=tuple(compared.values()))


def _compared_run(pair: Pair, about: TrainingRun) -> ComparedRun:
    low, high = pair.interval_s
    return ComparedRun(
        path=pair.run,
        sha256=run_hash(Path(pair.run)),
        configuration=configuration_hash(about),
        model=pair.model,
        strategy=pair.strategy,
        ranks=pair.ranks,
        batch=pair.batch,
        measured_s=pair.measured_median_s,
        predicted_s=pair.predicted_s,
        relative_sd=(high - low) / 2 / Z90 / pair.predicted_s,
    )
