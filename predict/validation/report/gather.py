"""From the options of ``predict report`` to what the page says; everything is computed where other commands do it."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from calibrate.profile.profile import read_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.strategy import Strategy
from predict.costs.compute.layer_source import parse_layers
from predict.costs.cost_model import CostModel
from predict.evaluators import simulate
from predict.prediction.interval import Timed
from predict.prediction.points import left_out_lines
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.request import limit_memory, predict_request, read_model, request_of
from predict.prediction.scaling import with_knees
from predict.search.search import Answer, search
from predict.timeline.timeline_run import predict_timeline
from predict.validation.diagnosis.against_run import held_against
from predict.validation.diagnosis.diagnosis import Case, Diagnostician
from predict.validation.diagnosis.limitations import AT_LEAST
from predict.validation.diagnosis.of_run import options_of_run, read_run_to_diagnose
from predict.validation.diagnosis.remedies import UNSET, options_found, with_remedies
from predict.validation.report.content import Content, Scaling
from predict.validation.validation import validate_runs
from predict.validation.validation_report import PREDICTOR, Report, pairs_of
from predict.workload import Configuration

KNEE = 0.8
"""Of the efficiency at the fewest ranks, as ``predict`` takes it."""
_TIMES_THE_RANKS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
Options = Mapping[str, Any]


class _Found(NamedTuple):
    """What was predicted, best first, and the configuration to look into."""

    predictions: tuple[Prediction, ...]
    costs: CostModel
    point: Configuration
    options: Options
    answer: Answer | None = None
    scaling: Scaling = Scaling()
    left_out: tuple[str, ...] = ()


def gather(options: Options, runs: Sequence[Path], advance: Callable[[], None] = lambda: None) -> Content:
    """A report on the fastest strategy that the options ask for; without a model, on runs.

    Args:
        options: of ``predict report``, by the names of its parameters. advance: called after each exact prediction.

    Raises:
        UserError: whatever of the options, files or limits is wrong, in one line.
    """
    validation = None
    if runs:
        layers_from = parse_layers(options["layers"])
        validation = validate_runs(
            options["profile"],
            runs,
            cluster_path=options["cluster"],
            force=options["force"],
            layers_from=layers_from,
        )
    if validation is not None and options["model"] is None:
        return gather_runs(options, validation)
    chosen = _of_strategies(options) if options["strategy"] else _of_search(options, advance)
    diagnostician = Diagnostician(Predictor(chosen.costs, simulate.EVALUATOR), AT_LEAST)
    case = diagnostician.case_of(chosen.point)
    diagnosis = diagnostician.diagnose(case)
    if options["remedies"]:
        diagnosis = with_remedies(diagnosis, diagnostician, case, chosen.options, answer=chosen.answer)
    return Content(
        **_about(options, chosen.costs, case),
        predictions=chosen.predictions,
        diagnosis=diagnosis,
        answer=chosen.answer,
        scaling=chosen.scaling,
        validation=validation,
        left_out=chosen.left_out,
    )


def gather_runs(options: Options, validation: Report) -> Content:
    """A report on runs, which looks into the one whose prediction is farthest off.

    Raises:
        UserError: memory ended every run, so that none has times.
    """
    pairs = pairs_of(validation.pairs, PREDICTOR)
    if not pairs:
        raise UserError("every run ran out of memory: give a run that has times, or --model")
    worst = max(pairs, key=lambda pair: abs(pair.error))
    run, costs, point, notes = read_run_to_diagnose(Path(worst.run), options)
    limit_memory(costs, options["memory"])
    diagnostician = Diagnostician(Predictor(costs, simulate.EVALUATOR), AT_LEAST)
    case = diagnostician.case_of(point)
    diagnosis = held_against(diagnostician.diagnose(case), case, run)
    try:
        if options["remedies"]:
            asked = options_of_run(run, options, knows_input=bool(costs.profile.input_side))
            diagnosis = with_remedies(diagnosis, diagnostician, case, asked)
    except UserError as error:
        notes = (*notes, f"no remedies were tried: {error}")
    return Content(
        **_about(options, costs, case),
        predictions=(case.prediction,),
        diagnosis=msgspec.structs.replace(diagnosis, said=(*diagnosis.said, *notes)),
        scaling=_grown(costs, point, options),
        validation=validation,
        run=worst.run,
    )


def _about(options: Options, costs: CostModel, case: Case) -> dict[str, Any]:
    """What every report has."""
    return {
        "command": shlex.join(["predict", *sys.argv[1:]]),
        "profile_path": str(options["profile"]),
        "profile": read_profile(options["profile"]),
        "case": case,
        "timeline": predict_timeline(costs, case.point).timeline,
    }


def _of_search(options: Options, advance: Callable[[], None]) -> _Found:
    """The fastest that a search finds."""
    costs = read_model(options, simulate.EVALUATOR)
    answer = search({**options, "pareto": True}, advance, costs)
    best = answer.rows[0].prediction
    options_of_best = options_found(best, {**options, **UNSET})
    (point,) = request_of(costs, simulate.EVALUATOR, options_of_best).points
    predictions = tuple(row.prediction for row in answer.rows)
    return _Found(predictions, costs, point, options_of_best, answer, _grown(costs, point, options))


def _of_strategies(options: Options) -> _Found:
    """The fastest of the strategies that were given: those that fit first."""
    predicted = predict_request({"spread": None, "dilate": None, **options, "knee": KNEE})
    best = min(range(len(predicted.points)), key=lambda index: _worth(predicted.predictions[index]))
    point = predicted.points[best]
    scaling = Scaling(predictions=_swept(predicted.predictions), sweeps=predicted.sweeps)
    if not scaling.sweeps:
        scaling = _grown(predicted.costs, point, options)
    return _Found(
        predictions=tuple(sorted(predicted.predictions, key=_worth)),
        costs=predicted.costs,
        point=point,
        options={**options, "strategy": str(point.strategy), "batch": str(point.settings.batch), "ranks": None},
        scaling=scaling,
        left_out=predicted.left_out,
    )


def _worth(prediction: Prediction) -> tuple[bool, float]:
    return prediction.memory.fits is False, -prediction.time.samples_per_s


def _sweeps(predictions: Sequence[Prediction], timed: Sequence[Timed], options: Options) -> Scaling:
    strong = options["scaling"] == "strong"
    with_knee, sweeps = with_knees(predictions, timed, strong=strong, fraction=KNEE)
    return Scaling(predictions=_swept(with_knee), sweeps=sweeps)


def _swept(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """Those that are part of a sweep, from the fewest ranks on."""
    swept = (prediction for prediction in predictions if prediction.use.knee_ranks is not None)
    return tuple(sorted(swept, key=lambda prediction: prediction.ranks))


def _grown(costs: CostModel, point: Configuration, options: Options) -> Scaling:
    """The configuration with an eighth to eight times the ranks along its outermost axis."""
    if not point.strategy.axes:
        return Scaling()
    outer, *inner = point.strategy.axes
    strong = options.get("scaling") == "strong"
    predictor = Predictor(costs, simulate.EVALUATOR, strong_scaling=strong)
    grown: list[tuple[Prediction, Timed]] = []
    refused: list[tuple[Strategy, UserError]] = []
    for factor in _TIMES_THE_RANKS:
        extents = (outer.extents[0] * factor, *outer.extents[1:])
        batch = point.settings.batch * (1 if strong else factor)
        if extents[0] < 2 or extents[0] % 1 or batch % 1:
            continue
        strategy = Strategy(axes=(msgspec.structs.replace(outer, extents=tuple(map(int, extents))), *inner))
        settings = msgspec.structs.replace(point.settings, batch=int(batch))
        try:
            grown.append(predictor.predict_timed(Configuration(strategy=strategy, settings=settings)))
        except UserError as error:
            refused.append((strategy, error))
    if len(grown) < 2:
        return Scaling(left_out=left_out_lines(refused))
    scaling = _sweeps([prediction for prediction, _ in grown], [timed for _, timed in grown], options)
    return dataclasses.replace(scaling, left_out=left_out_lines(refused))
