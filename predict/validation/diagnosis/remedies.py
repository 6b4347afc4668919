"""Configurations that suffer less: settings of the same strategy, and the strategies that a search likes best.

Each is predicted whole, so a gain is what the iteration gains and not what the limitation loses. Settings are given
as options of ``predict``, as a user would type them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.plan.schedules.catalog import schedules
from paradl_bench.plan.settings import from_words
from predict.costs.input.input_terms import input_options
from predict.prediction.interval import gain_band
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.request import request_of
from predict.search.candidates.mesh import divisors
from predict.search.command import SEARCHED
from predict.search.search import Answer, command_of, search
from predict.validation.diagnosis import limitations as of
from predict.validation.diagnosis.diagnosis import Case, Diagnostician
from predict.validation.diagnosis.findings import Diagnosis, Finding, Remedy

_CAPS_MB = ("1", "5", "25", "100", "400")
_MORE_MICRO_BATCHES = 4
"""Of the numbers of micro-batches beyond today's, the lowest."""
_INPUTS: tuple[dict[str, Any], ...] = ({"prefetch": 2}, *({"io_workers": workers} for workers in (1, 2, 4, 8)))
_STRATEGIES = 6
_PREDICTIONS = 24
"""Of a search, whose best strategies are tried."""
_LESS = 0.9
"""A remedy has to leave at most so much of a limitation's seconds."""
Options = Mapping[str, Any]
UNSET = {name: None for name in SEARCHED} | {
    "stages": None,
    "accumulate": 1,
    "evaluator": "simulate",
    "scaling": "weak",
}
"""What a search chooses itself, so that it has to be free of what was diagnosed."""


class _Tried(NamedTuple):
    change: str
    options: Options
    case: Case


def most_tries(case: Case) -> int:
    """Predictions that remedies of a case take at most."""
    return 1 + len(list(_settings(case))) + len(_INPUTS) + _PREDICTIONS + _STRATEGIES


def with_remedies(
    diagnosis: Diagnosis,
    diagnostician: Diagnostician,
    case: Case,
    options: Options,
    advance: Callable[[], None] = lambda: None,
    answer: Answer | None = None,
) -> Diagnosis:
    """The diagnosis with a remedy for each limitation that is there or may be, where one was found.

    Args:
        options: of the command line, by the names of its parameters, as :func:`request_of` takes them.
        advance: is called after each prediction.
        answer: of a search for the case's mini-batch, on its ranks and maybe others; None to search.
    """
    wanted = [finding for finding in diagnosis.findings if finding.state in ("present", "possible")]
    if not wanted:
        return diagnosis
    names = {finding.limitation.name for finding in wanted}
    tried, refused = _tried(diagnostician, case, options, names, advance, answer)
    findings = tuple(
        msgspec.structs.replace(finding, remedies=_best(finding, case, tried)) if finding in wanted else finding
        for finding in diagnosis.findings
    )
    said = (*diagnosis.said, *refused)
    return msgspec.structs.replace(diagnosis, findings=findings, said=said, remedies_tried=True)


def _tried(
    diagnostician: Diagnostician,
    case: Case,
    options: Options,
    wanted: Collection[str],
    advance: Callable[[], None],
    answer: Answer | None,
) -> tuple[list[_Tried], list[str]]:
    """All alternatives against limitations, predicted; and why strategies could not be searched."""
    tried: list[_Tried] = []
    # A host dispatches as many operations for twice as many samples.
    larger = [{"batch": str(2 * case.prediction.batch)}] if of.HOST_DISPATCH in wanted else []
    for change in (*larger, *_settings(case)):
        tried += _predicted(diagnostician, _in_words(change), {**options, **change})
        advance()
    for change in _INPUTS if of.INPUT in case.seconds else ():
        changed = {**options, **change}
        tried += _predicted(_with_input(diagnostician, changed), _in_words(change), changed)
        advance()
    try:
        answer = answer or _searched(diagnostician, case, options, advance)
        return [*tried, *_strategies(answer, diagnostician, case, options, advance)], []
    except UserError as error:
        return tried, [f"other strategies were not searched: {error}"]


def _with_input(diagnostician: Diagnostician, options: Options) -> Diagnostician:
    """One of the same costs, but for how a mini-batch is read."""
    predictor = diagnostician.predictor
    costs = dataclasses.replace(predictor.costs, input_options=input_options(predictor.evaluator.name, options))
    costs.communication.cluster = predictor.costs.communication.cluster
    return Diagnostician(Predictor(costs, predictor.evaluator), diagnostician.at_least)


def _predicted(diagnostician: Diagnostician, change: str, options: Options) -> Iterator[_Tried]:
    """The configuration of changed options; nothing where it is another axis', or beyond a limit."""
    predictor = diagnostician.predictor
    try:
        (point,) = request_of(predictor.costs, predictor.evaluator, options).points
        yield _Tried(change, options, diagnostician.case_of(point))
    except UserError:
        return


def _settings(case: Case) -> Iterator[dict[str, Any]]:
    """Other settings of the strategy; those that it has no use for are refused when they are read."""
    yield from ({"bucket_cap_mb": float(cap)} for cap in _CAPS_MB)
    yield from ({"exchange": exchange} for exchange in ("leader", "segmented"))
    yield {"filter_backward": "reduce-scatter"}
    yield {"stages": "measured"}
    now = int(case.prediction.options.get("micro_batches", 0))
    more = [count for count in divisors(case.point.local_batch) if count > now]
    for count in (now, *more[:_MORE_MICRO_BATCHES]) if now else ():
        for schedule, stages in itertools.product(schedules(), (None, "measured")):
            yield {"micro_batches": count, "schedule": schedule, "stages": stages}
    yield {"recompute": "all"}
    yield {"offload": "optimizer"}


def _in_words(change: Mapping[str, Any]) -> str:
    return " ".join(
        f"--{name.replace('_', '-')} {value:g}" if isinstance(value, float) else f"--{name.replace('_', '-')} {value}"
        for name, value in change.items()
        if value is not None
    )


def _searched(diagnostician: Diagnostician, case: Case, options: Options, advance: Callable[[], None]) -> Answer:
    """A search for as many ranks on the same mini-batch."""
    asked = {
        **options,
        **UNSET,
        "ranks": str(case.prediction.ranks),
        "top": _STRATEGIES,
        "pareto": True,
        "predictions": _PREDICTIONS,
        "caps": ",".join(_CAPS_MB),
        "price": None,
    }
    return search(asked, advance, diagnostician.predictor.costs)


def _strategies(
    answer: Answer, diagnostician: Diagnostician, case: Case, options: Options, advance: Callable[[], None]
) -> Iterator[_Tried]:
    """The other strategies of as many ranks that a search has found."""
    now = case.prediction
    for prediction in (row.prediction for row in answer.rows):
        if prediction.ranks == now.ranks and prediction.strategy != now.strategy:
            found = options_found(prediction, {**options, **UNSET})
            yield from _predicted(diagnostician, f"--strategy {prediction.strategy}", found)
            advance()


def options_found(prediction: Prediction, options: Options) -> dict[str, Any]:
    """The options that predict what a search found; ``options`` are those of the search, with :data:`UNSET`."""
    chosen = from_words(prediction.options)
    settings = {"batch": str(prediction.batch), "ranks": None, "bucket_cap_mb": prediction.bucket_cap_bytes / 1024**2}
    return {**options, **chosen, **settings, "strategy": prediction.strategy}


def _best(finding: Finding, case: Case, tried: Iterable[_Tried]) -> tuple[Remedy, ...]:
    """Of what helps against a limitation, the fastest settings of the strategy, and the fastest other strategy."""
    helping = [other for other in tried if _helps(finding.limitation.name, case, other.case)]
    same = [other for other in helping if other.case.prediction.strategy == case.prediction.strategy]
    others = [other for other in helping if other not in same]
    fastest = [min(some, key=lambda other: _like_s(case, other.case)) for some in (same, others) if some]
    return tuple(_remedy(case, other) for other in fastest)


def _more_samples(case: Case, other: Case) -> float:
    """The mini-batch of one over that of the other."""
    return other.prediction.batch / case.prediction.batch


def _like_s(case: Case, other: Case) -> float:
    """Seconds of an iteration, for as many samples as those of the case."""
    return other.prediction.iteration_s / _more_samples(case, other)


def _remedy(case: Case, other: _Tried) -> Remedy:
    prediction, more = other.case.prediction, _more_samples(case, other.case)
    low, high = gain_band(other.case.timed, case.timed)
    return Remedy(
        change=other.change,
        command=command_of("predict", prediction, other.options),
        iteration_s=prediction.iteration_s,
        gain=case.prediction.iteration_s / _like_s(case, other.case) - 1,
        gain_interval=((1 + low) * more - 1, (1 + high) * more - 1),
        memory_bytes=prediction.memory.memory_bytes,
    )


def _helps(name: str, case: Case, other: Case) -> bool:
    """Whether it takes less of a limitation; another mini-batch trains otherwise, and helps the host alone."""
    more = _more_samples(case, other)
    if more != 1 and name != of.HOST_DISPATCH:
        return False
    if name == of.REDUNDANT_MEMORY:
        limit, peak = case.memory_limit_bytes, other.prediction.memory.memory_bytes
        return peak < case.prediction.memory.memory_bytes and (limit is None or peak <= limit)
    if _like_s(case, other) >= case.prediction.iteration_s or other.prediction.memory.fits is False:
        return False
    if name in (of.RANKS, of.CONGESTION, of.MEMORY_STALLS):
        return name == of.RANKS and other.prediction.strategy != case.prediction.strategy
    before, after = case.seconds.get(name), other.seconds.get(name)
    if before is None or before.seconds <= 0:
        return False
    return after is None or after.seconds / more <= _LESS * before.seconds
