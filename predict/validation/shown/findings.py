"""What a validation found, a sentence each: ranking, memory, outliers."""

from __future__ import annotations

import math

from paradl_bench.core.statistics import Z90
from paradl_bench.core.units import counted, format_bytes, format_difference, format_seconds
from predict.validation.memory_validation import MemoryScore
from predict.validation.validation_report import (
    INPUT,
    PIPELINE_IDLE,
    PREDICTOR,
    Outlier,
    Ranking,
    Report,
    Unfit,
    pairs_of,
)

_PHASE_IN_WORDS = {
    PIPELINE_IDLE: "idle time of the pipeline (a stage waits for others, or for their messages)",
    INPUT: "waiting for its input",
}


def _activity_line(report: Report) -> list[str]:
    """Activity errors of all runs in a line; nothing where there are none."""
    known = [pair.activity for pair in pairs_of(report.pairs, PREDICTOR) if pair.activity is not None]
    if not known:
        return []
    mean = sum(activity.mean_error for activity in known) / len(known)
    worst = max(activity.worst_rank_error for activity in known)
    return [
        f"activity error (begin and end of every rank's work, relative to the iteration): {mean:.1%} in the mean of"
        f" {counted(len(known), 'run')}, {worst:.1%} on the worst rank"
    ]


def _coverage_line(report: Report) -> list[str]:
    """What to do about intervals that hold fewer runs than they should, by more than chance explains."""
    simulated = pairs_of(report.pairs, PREDICTOR)
    inside, count = sum(pair.covered for pair in simulated), len(simulated)
    # One time in twenty, as many would lie outside of intervals that are right.
    expected, by_chance = 0.9 * count, Z90 * math.sqrt(0.9 * 0.1 * count)
    if inside >= expected - by_chance:
        return []
    return [
        f"intervals hold {inside} of {counted(count, 'run')}, where 9 of 10 are expected: --profile-out FILE writes a"
        " profile whose intervals count these errors"
    ]


def findings(report: Report) -> list[str]:
    """Sentences about the whole report; :func:`beyond_measurement` has those on single predictions."""
    simulated = pairs_of(report.pairs, PREDICTOR)
    unlike = [pair.run for pair in simulated if pair.issued_equals_plan is False]
    floors = dict.fromkeys(pair.noise_floor_from for pair in simulated)
    return [
        *(_ranking_line(name, overall.ranking) for name, overall in report.overall.items() if overall.ranking.groups),
        *(_memory_line(name, overall.memory) for name, overall in report.overall.items() if overall.memory),
        *_activity_line(report),
        *_coverage_line(report),
        *(_outlier_line("outside its interval", outlier) for outlier in report.outliers),
        *(_outlier_line("large error, though inside its interval", outlier) for outlier in report.far_off),
        *report.busy_hosts,
        *map(_unfit_line, report.did_not_fit),
        *(f"{run}: its collectives differ from the plan (run.json lists them)" for run in unlike),
        *report.serial_runs_wanted,
        *report.not_applicable,
        *([f"noise floor from: {', '.join(floors)}"] if floors else []),
        *report.notes,
    ]


def beyond_measurement(report: Report) -> list[str]:
    """What predictions extrapolated, each once."""
    simulated = pairs_of(report.pairs, PREDICTOR)
    return [f"extrapolated: {line}" for line in dict.fromkeys(line for pair in simulated for line in pair.extrapolated)]


def _ranking_line(evaluator: str, ranking: Ranking) -> str:
    correlation = "" if ranking.rank_correlation is None else f"rank correlation {ranking.rank_correlation:.2f}, "
    regret = "" if ranking.top1_regret is None else f"regret of the strategy chosen {ranking.top1_regret:.1%}, "
    return f"{evaluator}: {correlation}{regret}over {ranking.groups} (model, batch) with several strategies"


def _memory_line(evaluator: str, memory: MemoryScore) -> str:
    left_out = f"{memory.left_out} left out, to which the profile's memory factors were fitted"
    if memory.mean_absolute_error is None or memory.worst_error is None:
        return f"memory by {evaluator}: no run to test it on; {left_out}"
    held = "" if memory.interval_coverage is None else f", interval holds {memory.interval_coverage:.0%}"
    return (
        f"memory by {evaluator}: mean error {memory.mean_absolute_error:.1%}, worst"
        f" {format_difference(memory.worst_error)}{held}, "
        f"over {counted(memory.runs, 'run')}" + (f"; {left_out}" if memory.left_out else "")
    )


def _unfit_line(unfit: Unfit) -> str:
    expected = "as predicted" if unfit.predicted_bytes > unfit.had_bytes else "and was predicted to fit"
    return (
        f"did not fit, {expected}: {unfit.model} {unfit.strategy} batch {unfit.batch}, rank {unfit.rank} in "
        f"{unfit.phase} needed {format_bytes(unfit.needed_bytes)} and had {format_bytes(unfit.had_bytes)}; "
        f"tensors were predicted to take {format_bytes(unfit.predicted_bytes)}"
    )


def _outlier_line(what: str, outlier: Outlier) -> str:
    direction, why = "more" if outlier.phase_difference_s > 0 else "less", ""
    # A weight update is as fast as memory, and nothing else: that it moved tells what did.
    if outlier.shares_memory and outlier.phase == "WU":
        why = "; ranks of a host share its memory, whose bandwidth may change: paradl-bench doctor --measure --ranks R"
    return (
        f"{what}: {outlier.model} {outlier.strategy} batch {outlier.batch}, error {format_difference(outlier.error)} "
        f"(noise floor {outlier.noise_floor:.1%}); most of it is {_PHASE_IN_WORDS.get(outlier.phase, outlier.phase)}, "
        f"predicted {format_seconds(abs(outlier.phase_difference_s))} {direction} than measured{why}"
    )
