"""Scaling factors (OSF, eq. 1): seconds of one rank over those of p at the same mini-batch a rank, as measured.

A factor needs a serial run of the same model, mini-batch a rank and settings. The predicted factor is the ratio of the
same evaluator's two predictions, weight update included, as it is in what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from paradl_bench.core.statistics import grouped
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.strategies.exchange.options import bucket_limits
from predict.prediction.prediction import Prediction
from predict.search.search import command_of
from predict.validation.runs import Run
from predict.validation.validation_report import Pair, PredictedFactor, ScalingFactor


def scaling_factors(runs: Sequence[Run], pairs: Iterable[Pair]) -> tuple[ScalingFactor, ...]:
    """Of every data parallel run that has serial runs to hold it against."""
    predicted_s: dict[str, dict[str, float]] = {}
    for pair in pairs:
        predicted_s.setdefault(pair.run, {})[pair.evaluator] = pair.predicted_s
    return tuple(_factor(run, alone, predicted_s) for run in runs if (alone := _serial_runs(run, runs)))


def _factor(run: Run, alone: Sequence[Run], predicted_s: Mapping[str, Mapping[str, float]]) -> ScalingFactor:
    about = run.description
    measured = float(np.median([serial.median_s for serial in alone])) / run.median_s
    of_one, of_many = predicted_s[str(alone[0].path)], predicted_s[str(run.path)]
    ratios = {name: of_one[name] / seconds for name, seconds in of_many.items() if name in of_one}
    return ScalingFactor(
        run=str(run.path),
        model=about.model,
        strategy=about.strategy,
        ranks=about.ranks,
        local_batch=_local_batch(run),
        serial_runs=tuple(str(serial.path) for serial in alone),
        measured=measured,
        by_evaluator={
            name: PredictedFactor(predicted=ratio, error=ratio / measured - 1) for name, ratio in ratios.items()
        },
    )


def serial_runs_wanted(runs: Sequence[Run], predict: Callable[[Run], Prediction]) -> tuple[str, ...]:
    """Which data parallel runs lack a serial run, a line for each command that measures one."""
    lacking = [(_command(run, predict(run)), run) for run in runs if _scales(run) and not _serial_runs(run, runs)]
    return tuple(
        f"no measured scaling factor of {', '.join(str(run.path) for _, run in of_command)}: no serial run has as many"
        f" samples a rank; measure it: {command}"
        for command, of_command in grouped(lacking, lambda pair: pair[0]).items()
    )


def _command(run: Run, prediction: Prediction) -> str:
    serial = msgspec.structs.replace(
        prediction,
        strategy=str(Strategy()),
        ranks=1,
        batch=_local_batch(run),
        bucket_cap_bytes=bucket_limits(None)[1],
        options=run.description.settings.simulated_alone,
    )
    command = command_of("train", serial, {})
    return command if run.description.ghost is None else f"{command}, emulated as that run is"


def _scales(run: Run) -> bool:
    """Whether all of its ranks compute samples of their own."""
    ranks = run.description.ranks
    return ranks > 1 and degree_of(parse_strategy(run.description.strategy), Trait.DIVIDES_BATCH) == ranks


def _local_batch(run: Run) -> int:
    return run.description.batch // run.description.ranks


def _serial_runs(run: Run, runs: Sequence[Run]) -> list[Run]:
    """Those of one rank, on as many samples as each of the run's ranks has; none of a run that is no such."""
    if not _scales(run):
        return []
    wanted, serial = _alone(run, _local_batch(run)), [other for other in runs if other.description.ranks == 1]
    return [other for other in serial if _alone(other, other.description.batch) == wanted]


def _alone(run: Run, samples: int) -> tuple[object, ...]:
    """What decides the iteration of one rank on so many samples."""
    about = run.description
    of_model = about.model, about.input_shape, about.network_digest
    computed_in = about.dtype, about.kernel_settings, about.optimizer
    settings = tuple(sorted(about.settings.simulated_alone.items()))
    # One rank has no links, whatever nodes were emulated for the others; nor is it late because another one is slow.
    ghost = about.ghost and (about.ghost.dilate, about.ghost.drawn is not None)
    return *of_model, *computed_in, settings, samples, ghost
