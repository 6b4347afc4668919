"""Regression of times on non-negative parameters, by relative errors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paradl_bench.spec.statistics import MAD_TO_SD

Floats = NDArray[np.float64]

HUBER_K = 1.345
"""Huber's tuning constant: 95% efficiency for normal errors (Huber and Ronchetti, Robust Statistics, section 4.5)."""
_ITERATIONS = 10


def fit_relative(design: Floats, seconds: Floats, *, noise: float = 0.0, precision: Floats | None = None) -> Floats:
    """Non-negative x that minimises the Huber loss of ``(design @ x - seconds) / seconds``.

    Relative errors, because a message of 1 KiB has to count as much as one of 64 MiB; Huber's loss by iteratively
    reweighted least squares, because a size measured in a slow spell has to count less.

    Args:
        design: (points, parameters) coefficients.
        seconds: (points,) measured, positive.
        noise: relative standard deviation of a point, where known; residuals below 1.345 of it are never weighted down.
        precision: (points,) how much each point's squared residual counts; None for all alike.

    Returns:
        (parameters,) estimates, at least 0.
    """
    used = design.any(axis=0)
    if not used.all():
        # What multiplies nothing costs the solver as much as what does.
        found = np.zeros(design.shape[1])
        found[used] = fit_relative(design[:, used], seconds, noise=noise, precision=precision)
        return found
    unit = design / seconds[:, None]
    norms = np.sqrt((unit * unit).sum(axis=0))
    unit = unit / norms
    weights = known = np.ones(len(seconds)) if precision is None else precision
    solution = np.zeros(design.shape[1])
    for _ in range(_ITERATIONS):
        root = np.sqrt(weights)
        update = _solve(unit * root[:, None], root)
        residuals = np.abs(unit @ update - 1)
        scale = max(MAD_TO_SD * _median(residuals), noise)
        settled = float(np.abs(update - solution).max()) <= 1e-6 * float(update.max())
        solution = update
        if settled or scale < 1e-12:
            break
        weights = known * np.minimum(1.0, HUBER_K * scale / np.maximum(residuals, 1e-300))
    return np.asarray(solution / norms)


def _median(values: Floats) -> float:
    # numpy's own spends ten times as long on checks, and this runs thousands of times in a fit.
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _solve(matrix: Floats, target: Floats) -> Floats:
    from scipy.optimize import nnls

    solution, _ = nnls(matrix, target)
    return np.asarray(solution, float)


def told_apart(design: Floats, seconds: Floats) -> bool:
    """Whether the columns of a design can be told from each other by these points (none is a mix of the others)."""
    scaled = design / seconds[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    if len(seconds) < design.shape[1] or np.any(norms == 0):
        return False
    singular = np.linalg.svd(scaled / norms, compute_uv=False)
    return bool(singular[-1] > 1e-6 * singular[0])


def relative_covariance(design: Floats, seconds: Floats, variance: float, free: NDArray[np.bool_]) -> Floats:
    """Covariance of least squares for points with one relative variance; rows of parameters held at 0 are 0.

    Args:
        design: (points, parameters). seconds: (points,). free: (parameters,) those not held at their bound.
    """
    covariance = np.zeros((design.shape[1], design.shape[1]))
    if not np.any(free):
        return covariance
    scaled = (design / seconds[:, None])[:, free]
    norms = np.linalg.norm(scaled, axis=0)
    norms = np.where(norms > 0, norms, 1.0)
    inverse = np.linalg.pinv((scaled / norms).T @ (scaled / norms))
    covariance[np.ix_(free, free)] = variance * inverse / np.outer(norms, norms)
    return covariance
