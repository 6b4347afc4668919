"""Memory factors from the measured peaks of training runs, by robust non-negative regression of relative errors.

A device's factor is over all of its runs. The paper's rho is fitted per model, and over all models with each counting
once. Repetitions of one configuration hold the same bytes: they count as one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.profile.memory_factors import MemoryFactor, MemoryMeasure, MemoryReuse, MemoryRun
from calibrate.statistics.regression import deviation, fit_relative, fit_relative_many, told_apart
from paradl_bench.core.statistics import Floats, grouped

_OUTERMOST_FIRST: tuple[MemoryMeasure, ...] = ("device", "allocator", "tensors")
_RESAMPLES = 200
_LEAST_FOR_TWO = 3
"""Runs that it takes to fit two numbers and still see how far runs lie from the line."""


class MemoryFit(NamedTuple):
    """What was fitted, and in words what could not be."""

    factors: tuple[MemoryFactor, ...]
    reuse: tuple[MemoryReuse, ...]
    notes: tuple[str, ...]


def fit_memory(runs: Iterable[MemoryRun]) -> MemoryFit:
    """Factors and reuse of every device that runs were made on; nothing of no runs."""
    factors: list[MemoryFactor] = []
    reuse: list[MemoryReuse] = []
    notes: list[str] = []
    for device, of_device in grouped(runs, lambda run: run.device).items():
        measured = next(name for name in _OUTERMOST_FIRST if all(name in run.measured_bytes for run in of_device))
        distinct = _without_repetitions(of_device, measured)
        if len(distinct) < 2:
            notes.append(
                f"memory on {device}: no factor was fitted, because one configuration does not show how others"
                " differ: run another strategy, batch or model"
            )
            continue
        factors.append(_factor(device, measured, distinct))
        of_models, more = _reuse(device, measured, [run for run in distinct if run.paradl_bytes is not None])
        reuse += of_models
        notes += more
    return MemoryFit(tuple(factors), tuple(reuse), tuple(notes))


class _Point(NamedTuple):
    model: str
    tensor_bytes: int
    paradl_bytes: int | None
    measured_bytes: float


def _without_repetitions(runs: Sequence[MemoryRun], measured: MemoryMeasure) -> list[_Point]:
    points = []
    for repeated in grouped(runs, lambda run: run.configuration).values():
        first, peak = repeated[0], float(np.median([run.measured_bytes[measured] for run in repeated]))
        points.append(_Point(first.model, first.tensor_bytes, first.paradl_bytes, peak))
    return points


def _factor(device: str, measured: MemoryMeasure, points: Sequence[_Point]) -> MemoryFactor:
    tensors = np.array([point.tensor_bytes for point in points], float)
    peaks = np.array([point.measured_bytes for point in points])
    two = len(points) >= _LEAST_FOR_TWO and told_apart(_design(tensors), peaks)
    line = _lines(tensors[None], peaks[None], two=two)[0]
    fitted = _design(tensors) @ line
    free = int(np.count_nonzero(line))
    models = tuple(sorted({point.model for point in points}))
    (fixed, both), (_, of_factor) = _covariance(points, tensors, peaks, two=two).tolist()
    return MemoryFactor(
        device=device,
        measured=measured,
        fixed_bytes=float(line[0]),
        factor=float(line[1]),
        covariance=((fixed, both), (both, of_factor)),
        relative_sd=deviation(peaks / fitted - 1, len(points) - free),
        deviations_90=_student(len(models) - free),
        runs=len(points),
        models=models,
        tensor_bytes_range=(int(tensors.min()), int(tensors.max())),
    )


def _design(tensors: Floats) -> Floats:
    return np.stack([np.ones(tensors.shape), tensors], axis=-1)


def _lines(tensors: Floats, peaks: Floats, *, two: bool) -> Floats:
    """(fixed bytes, factor) of each row of points; the factor alone unless there are points for two."""
    design = _design(tensors) if two else tensors[..., None]
    fitted = fit_relative_many(design, peaks, noise=0.0, precision=np.ones(peaks.shape))
    return fitted if two else np.column_stack([np.zeros(len(fitted)), fitted])


def _covariance(points: Sequence[_Point], tensors: Floats, peaks: Floats, *, two: bool) -> Floats:
    """Models are drawn, since runs of one are alike; runs where there are fewer than three models."""
    names = [point.model for point in points]
    if len(set(names)) < _LEAST_FOR_TWO:
        names = list(map(str, range(len(points))))
    groups = [np.flatnonzero(np.array(names) == name) for name in dict.fromkeys(names)]
    draw = np.random.default_rng(0)
    drawn = [
        np.concatenate([groups[i] for i in draw.integers(len(groups), size=len(groups))]) for _ in range(_RESAMPLES)
    ]
    if two:
        drawn = [chosen for chosen in drawn if told_apart(_design(tensors[chosen]), peaks[chosen])]
    lines = np.zeros((len(drawn), 2))
    counts = np.array([len(chosen) for chosen in drawn])
    # Those of as many points are fitted at once.
    for count in set(counts.tolist()):
        alike = np.flatnonzero(counts == count)
        chosen = np.array([drawn[i] for i in alike])
        lines[alike] = _lines(tensors[chosen], peaks[chosen], two=two)
    return np.cov(lines.T) if len(lines) > 1 else np.zeros((2, 2))


def _reuse(
    device: str, measured: MemoryMeasure, points: Sequence[_Point]
) -> tuple[tuple[MemoryReuse, ...], tuple[str, ...]]:
    by_model = {
        model: [(float(point.paradl_bytes or 0), point.measured_bytes) for point in of_model]
        for model, of_model in grouped(points, lambda point: point.model).items()
    }
    ratios = {model: _ratio(pairs) for model, pairs in by_model.items()}
    rhos = {model: min(ratio, 1.0) for model, ratio in ratios.items()}
    notes = [
        f"memory of {model} on {device} is {ratio:.3g} times the paper's sum; rho can be at most 1"
        for model, ratio in ratios.items()
        if ratio > 1
    ]
    within, freedom = _within(by_model, rhos)
    reuse = []
    if freedom:
        reuse = [
            MemoryReuse(
                device=device,
                measured=measured,
                model=model,
                rho=rhos[model],
                relative_sd=within,
                deviations_90=_student(freedom),
                runs=len(pairs),
            )
            for model, pairs in by_model.items()
        ]
    if len(rhos) > 1:
        values = np.array(list(ratios.values()))
        rho = min(1.0, float(fit_relative(np.ones((len(values), 1)), values)[0]))
        between = deviation(values / rho - 1, len(values) - 1)
        reuse.append(
            MemoryReuse(
                device=device,
                measured=measured,
                model="",
                rho=rho,
                relative_sd=float(np.hypot(between, within)),
                deviations_90=_student(len(values) - 1),
                runs=len(points),
            )
        )
    elif rhos:
        notes.append(f"memory on {device}: all runs are of one model; rho stays 1 for other models")
    return tuple(reuse), tuple(notes)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    sums, peaks = np.array(pairs).T
    return float(fit_relative(sums[:, None], peaks)[0])


def _within(by_model: Mapping[str, Sequence[tuple[float, float]]], rhos: Mapping[str, float]) -> tuple[float, int]:
    """Relative deviation of a run from its own model's rho, over all models, and how many degrees of freedom it has."""
    residuals: list[float] = []
    freedom = 0
    for model, pairs in by_model.items():
        if len(pairs) > 1:
            residuals += [peak / (rhos[model] * whole) - 1 for whole, peak in pairs]
            freedom += len(pairs) - 1
    return deviation(np.array(residuals), freedom), freedom


def _student(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.95, max(freedom, 1)))
