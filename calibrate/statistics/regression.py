"""Regression of times on non-negative parameters, by relative errors."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.statistics import MAD_TO_SD, Floats

Bools = NDArray[np.bool_]

HUBER_K = 1.345
"""Huber's tuning constant: 95% efficiency for normal errors (Huber and Ronchetti, Robust Statistics, section 4.5)."""
_ITERATIONS = 10
_RIDGE = 1e-12
"""On columns of norm 1: columns that are multiples of each other share their part, and nothing else feels it."""
_CHUNK_NUMBERS = 2_000_000
"""Numbers of a design that are worked on at once."""


def fit_relative(design: Floats, seconds: Floats, *, noise: float = 0.0) -> Floats:
    """Non-negative x, (parameters,), that minimises the Huber loss of ``(design @ x - seconds) / seconds``.

    Relative errors, because a message of 1 KiB has to count as much as one of 64 MiB; Huber's loss by iteratively
    reweighted least squares, because a size measured in a slow spell has to count less.

    Args:
        design: (points, parameters). seconds: (points,) positive.
        noise: relative standard deviation of a point, where known; residuals below 1.345 of it are never weighted down.
    """
    alike = np.ones((1, len(seconds)))
    return np.asarray(fit_relative_many(design[None], seconds[None], noise=noise, precision=alike)[0])


def fit_relative_many(design: Floats, seconds: Floats, *, noise: float, precision: Floats) -> Floats:
    """:func:`fit_relative` of many problems at once: (problems, parameters).

    Args:
        design: (problems, points, parameters); a few parameters, since every set of those held at 0 may be tried.
        seconds: (problems, points), positive, also where a problem has fewer points.
        precision: (problems, points) how much each squared residual counts; 0 where a problem has fewer points.
    """
    step = max(1, _CHUNK_NUMBERS // max(design.shape[1] * design.shape[2], 1))
    parts = [
        _fit_chunk(design[at : at + step], seconds[at : at + step], noise, precision[at : at + step])
        for at in range(0, len(design), step)
    ]
    return np.concatenate(parts) if parts else np.zeros((0, design.shape[2]))


def _fit_chunk(design: Floats, seconds: Floats, noise: float, precision: Floats) -> Floats:
    told = precision > 0
    unit = np.where(told[..., None], design / seconds[..., None], 0.0)
    norms = np.sqrt((unit * unit).sum(axis=1))
    # A column that multiplies nothing keeps its parameter at 0.
    norms = np.where(norms > 0, norms, np.inf)
    unit /= norms[:, None, :]
    count = told.sum(axis=1)
    solution = np.zeros(norms.shape)
    free = np.isfinite(norms)
    weights = precision
    active = np.arange(len(design))
    for _ in range(_ITERATIONS):
        part = unit[active]
        update, free[active] = _least_squares(part, weights, free[active])
        residuals = np.abs((part @ update[..., None])[..., 0] - 1)
        scale = np.maximum(MAD_TO_SD * _medians(np.where(told[active], residuals, np.inf), count[active]), noise)
        moved = np.abs(update - solution[active]).max(axis=1)
        solution[active] = update
        going = (moved > 1e-6 * update.max(axis=1)) & (scale >= 1e-12)
        if not going.any():
            break
        active, residuals, scale = active[going], residuals[going], scale[going]
        weights = precision[active] * np.minimum(1.0, HUBER_K * scale[:, None] / np.maximum(residuals, 1e-300))
    return np.asarray(solution / norms)


def _medians(values: Floats, count: NDArray[np.int64]) -> Floats:
    """Of each row's ``count`` smallest values."""
    ordered = np.sort(values, axis=1)
    rows = np.arange(len(values))
    return np.asarray(ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2


def _least_squares(unit: Floats, weights: Floats, free: Bools) -> tuple[Floats, Bools]:
    """Non-negative least squares of ``unit @ x = 1`` under weights, and which parameters are not held at 0."""
    weighted = (unit * weights[..., None]).transpose(0, 2, 1)
    gram, target = weighted @ unit, weighted.sum(axis=2)
    gram[:, range(gram.shape[1]), range(gram.shape[1])] += _RIDGE
    # What was free before is tried first; where that is not the solution (Karush, Kuhn, Tucker), every set is.
    solution = _solve(gram, target, free)
    gradient = target - (gram @ solution[..., None])[..., 0]
    wrong = np.flatnonzero(((solution < 0) | (~free & (gradient > 1e-9))).any(axis=1))
    if len(wrong):
        solution[wrong] = _of_all_sets(gram[wrong], target[wrong])
    return solution, solution > 0


def _of_all_sets(gram: Floats, target: Floats) -> Floats:
    best = np.zeros(target.shape)
    gain = np.zeros(len(target))
    for chosen in itertools.product((False, True), repeat=target.shape[1]):
        if any(chosen):
            tried = _solve(gram, target, np.broadcast_to(np.array(chosen), target.shape))
            # What least squares gains over x = 0 is target @ x.
            value = np.where((tried >= 0).all(axis=1), (target * tried).sum(axis=1), -np.inf)
            better = value > gain
            best[better], gain[better] = tried[better], value[better]
    return best


def _solve(gram: Floats, target: Floats, free: Bools) -> Floats:
    both = free[:, :, None] & free[:, None, :]
    matrix = np.where(both, gram, np.eye(gram.shape[1]))
    return np.asarray(np.linalg.solve(matrix, np.where(free, target, 0.0)[..., None])[..., 0])


def told_apart(design: Floats, seconds: Floats) -> bool:
    """Whether the columns of a design can be told from each other by these points (none is a mix of the others)."""
    scaled = design / seconds[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    if len(seconds) < design.shape[1] or np.any(norms == 0):
        return False
    singular = np.linalg.svd(scaled / norms, compute_uv=False)
    return bool(singular[-1] > 1e-6 * singular[0])


def fit_line(design: Floats, seconds: Floats) -> tuple[float, float, int]:
    """Non-negative (alpha, beta) of a design of two columns by relative errors, and how many of them were fitted.

    All of it is beta where the points do not tell the two apart.
    """
    apart = told_apart(design, seconds)
    alpha, beta = map(float, fit_relative(design if apart else design * [0, 1], seconds))
    return alpha, beta, 2 if apart else 1


def deviation(residuals: Floats, freedom: int) -> float:
    """Standard deviation of residuals with so many degrees of freedom, which are taken as one at least."""
    return float(np.sqrt(np.sum(np.square(residuals)) / max(freedom, 1)))


def relative_covariance(design: Floats, seconds: Floats, variance: float, free: NDArray[np.bool_]) -> Floats:
    """Covariance of least squares for points with one relative variance; rows of parameters not ``free`` are 0."""
    covariance = np.zeros((design.shape[1], design.shape[1]))
    if not np.any(free):
        return covariance
    scaled = (design / seconds[:, None])[:, free]
    norms = np.linalg.norm(scaled, axis=0)
    norms = np.where(norms > 0, norms, 1.0)
    inverse = np.linalg.pinv((scaled / norms).T @ (scaled / norms))
    covariance[np.ix_(free, free)] = variance * inverse / np.outer(norms, norms)
    return covariance
