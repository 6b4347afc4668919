"""A Gaussian process of kernels' times: smooth in the logarithms of sizes, each with a length scale of its own.

Trees cut a range of sizes into steps, which takes many kernels; between a few hundred of them times are smooth but for
what a library's choice of algorithm changes, and that the features say (:mod:`calibrate.kernels.features`). Covariance:
Matern 5/2 with a length scale a feature, plus a plane, plus noise (Rasmussen and Williams 2006, 4.2 and 5.4). Length
scales maximise the marginal likelihood of a part of the kernels, under a weak prior that keeps those that matter little
from running away; a kernel far off the rest counts less, as under Student's t with four degrees of freedom.

It is fitted with scipy, kept as arrays, and evaluated with numpy alone. scikit-learn's process has neither that prior
nor weights that change as it is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.kernels.files import Arrays
from paradl_bench.core.statistics import Floats

_LEARN_FROM = 600
"""Kernels that length scales are found on: each step of the search takes the cube of their number."""
_STEPS = (30, 20)
_PRIOR_MEAN, _PRIOR_SD = math.log(3.0), 1.5
"""Of logs of length scales, in standard deviations of a feature."""
_FREEDOM = 4.0
_ROUNDS_LEARNING, _ROUNDS = 12, 4


def fit_process(
    features: Floats, target: Floats, *, seed: int, known: Mapping[str, NDArray[Any]] | None = None
) -> Arrays:
    """Fit to a target per row of features.

    Args:
        known: of a fit to some of the same kernels, whose ``length`` and ``variances`` are taken over.

    Returns:
        ``mean`` and ``scale`` of features; ``points`` (kernels, features) scaled by them and ``length``; ``weights``
        per point; ``plane`` per scaled feature and, last, at their mean; ``offset``; ``variances`` of the smooth part,
        of noise and of the plane.
    """
    mean, scale = features.mean(axis=0), features.std(axis=0)
    scale[scale < 1e-9] = 1.0
    scaled, offset = (features - mean) / scale, float(np.median(target))
    part = np.random.default_rng(seed).permutation(len(target))[:_LEARN_FROM]
    if known is None:
        length, variances = _learn(scaled[part], target[part] - offset)
    else:
        length, variances = known["length"], known["variances"]
    amplitude, noise, slope = (float(value) for value in variances)
    points = scaled / length
    planes = np.column_stack([scaled, np.ones(len(scaled))])
    covariance = amplitude * _matern(_squared(points, points)) + slope * planes @ planes.T
    alphas, _, _ = _robust(covariance, noise, target - offset, _ROUNDS)
    return {
        "mean": mean,
        "scale": scale,
        "length": length,
        "points": points,
        "weights": amplitude * alphas,
        "plane": slope * planes.T @ alphas,
        "offset": np.array([offset]),
        "variances": variances,
    }


def evaluate_process(arrays: Mapping[str, NDArray[Any]], features: Floats) -> Floats:
    """What the process expects for each row of ``features``.

    Raises:
        ValueError: the arrays do not belong together, or to these features. KeyError: one is missing.
    """
    scaled = (features - arrays["mean"]) / arrays["scale"]
    near = _matern(_squared(scaled / arrays["length"], arrays["points"])) @ arrays["weights"]
    expected = np.asarray(arrays["offset"][0] + near + scaled @ arrays["plane"][:-1] + arrays["plane"][-1], float)
    if expected.shape != (len(features),):
        raise ValueError(f"a process that gives {expected.shape} numbers for {len(features)} kernels")
    return expected


def _squared(one: Floats, other: Floats) -> Floats:
    apart = (one * one).sum(axis=1)[:, None] + (other * other).sum(axis=1) - 2 * one @ other.T
    return np.asarray(np.maximum(apart, 0.0))


def _matern(squared: Floats) -> Floats:
    distance = np.sqrt(5 * squared)
    return np.asarray((1 + distance + distance * distance / 3) * np.exp(-distance))


def _learn(scaled: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Length scales, and the variances of the smooth part, of noise and of the plane.

    Searched again with kernels far off counting less: one of twice its time would make all of them noise.
    """
    from scipy.optimize import minimize

    features, spread = scaled.shape[1], math.log(float(target.std()) + 1e-6)
    bounds = [(-3.0, 6.0)] * features + [(-6.0, 3.0), (-5.0, 2.0), (-7.0, 2.0)]
    logs = np.array([_PRIOR_MEAN] * features + [spread, spread - 1.2, spread - 2.3])
    apart = np.stack([(column[:, None] - column) ** 2 for column in scaled.T])
    plane = scaled @ scaled.T + 1.0
    kept = np.ones(len(target))
    for steps in _STEPS:
        logs = minimize(
            _misfit,
            np.clip(logs, *np.array(bounds).T),
            (apart, plane, target, kept),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": steps},
        ).x
        squared = np.tensordot(np.exp(-2 * logs[:features]), apart, 1)
        amplitude, noise, slope = np.exp(2 * logs[features:])
        _, kept, noise = _robust(amplitude * _matern(squared) + slope * plane, noise, target, _ROUNDS_LEARNING)
        logs[features + 1] = 0.5 * math.log(noise + 1e-12)
    return np.exp(logs[:features]), np.exp(2 * logs[features:])


def _misfit(logs: Floats, apart: Floats, plane: Floats, target: Floats, kept: Floats) -> tuple[float, Floats]:
    """Negative log marginal likelihood and prior, and their gradient by the logs (Rasmussen and Williams 5.9)."""
    from scipy.linalg import cho_factor, cho_solve

    features = len(apart)
    inverse = np.exp(-2 * logs[:features])
    amplitude, noise, slope = np.exp(2 * logs[features:])
    distance = np.sqrt(5 * np.tensordot(inverse, apart, 1))
    decay = np.exp(-distance)
    smooth = (1 + distance + distance * distance / 3) * decay
    identity = np.eye(len(target))
    factor = cho_factor(amplitude * smooth + slope * plane + np.diag((noise + 1e-10) / kept), lower=True)
    alphas = cho_solve(factor, target)
    inner = cho_solve(factor, identity) - np.outer(alphas, alphas)
    off = (logs[:features] - _PRIOR_MEAN) / _PRIOR_SD
    misfit = 0.5 * target @ alphas + np.log(np.diag(factor[0])).sum() + 0.5 * off @ off
    of_length = inner * amplitude * (5 / 6) * (1 + distance) * decay
    gradient = np.empty_like(logs)
    gradient[:features] = np.tensordot(apart, of_length, 2) * inverse + off / _PRIOR_SD
    gradient[features:] = [
        np.sum(inner * smooth) * amplitude,
        np.sum(np.diag(inner) / kept) * noise,
        np.sum(inner * plane) * slope,
    ]
    return float(misfit), gradient


def _robust(covariance: Floats, noise: float, target: Floats, rounds: int) -> tuple[Floats, Floats, float]:
    """Of every kernel what it adds to an estimate and how much it counts, in turn with the noise; and the noise."""
    from scipy.linalg import cho_factor, cho_solve

    identity = np.eye(len(target))
    kept = np.ones(len(target))
    alphas = np.zeros(len(target))
    for number in range(rounds):
        factor = cho_factor(covariance + np.diag((noise + 1e-10) / kept), lower=True)
        alphas = cho_solve(factor, target)
        if number == rounds - 1:
            break
        # Left out one by one (Rasmussen and Williams 5.12): off by alpha / diagonal, of variance 1 / diagonal.
        off = alphas * alphas / np.diag(cho_solve(factor, identity))
        kept = (_FREEDOM + 1) / (_FREEDOM + off)
        noise *= float(np.mean(kept * off))
    return np.asarray(alphas, float), np.asarray(kept, float), noise
