"""What kernels of nearly the same shape differ by: the error that no regressor of smooth terms gets below.

A regressor's error has two parts: what it has not learned of the shape, and what shapes do not tell: noise of one
measurement, the clock that a card was at, and a library's choice between its kernels, which may change with one row
more. Two kernels a few percent apart in every size share the first part and not the second, so that the difference
of their errors is that of the second alone: the nugget of geostatistics (Cressie, Statistics for Spatial Data, 2.3).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from calibrate.fitting.kernels.kernel_drift import hats
from calibrate.fitting.kernels.kernel_trial import Ints, Timed, reached
from calibrate.kernels.features import log_sizes, roofline_features
from calibrate.kernels.model import roofline_s
from calibrate.kernels.trees import PARAMETERS, evaluate_trees, grow_trees
from paradl_bench.core.statistics import Floats

NEAR = 0.1
"""Euclid's distance in logarithms of sizes: a tenth in all of them together."""
FEWEST_PAIRS = 30
_FOLDS = 5
_ROUNDS = 150
_FASTER = {**PARAMETERS, "learning_rate": 0.1}


class Neighbours(NamedTuple):
    """Errors of kernels alike.

    Attributes:
        pairs: of kernels less than a tenth apart, each kernel in one pair at most.
        re: mean |difference of their log errors| / sqrt(2): the mean |RE| of what the two do not share, as long as
            those parts are independent and normal (of Student's with three degrees of freedom it is 6% too much).
            standard_error: of that mean, over the pairs.
        own_re: mean |RE| of these kernels themselves under the same trees. Kernels with neighbours may be easier than
            the others, and then ``re`` over ``own_re`` says more of all kernels than ``re`` does.
        correlation: of the two errors, clipped at their 1% and 99% quantiles: 0 where kernels alike share none.
    """

    pairs: int
    re: float
    standard_error: float
    own_re: float
    correlation: float


def neighbours(timed: Timed, drift_s: tuple[float, ...], *, seed: int) -> Neighbours | None:
    """Pair kernels that are alike, and compare their errors under trees that saw neither; None for too few.

    Trees take out what two shapes a few percent apart are expected to differ by. Both kernels of a pair, and whatever
    else lies near either, fall into one fold, so that nothing near them was fitted on.

    Args:
        drift_s: what the sweep added to times, taken out before.
    """
    points = log_sizes(timed.kernels, timed.names)
    pairs, groups = _alike(points)
    # Of a dense sweep everything is near something: nothing would be left to fit on.
    if len(pairs) < FEWEST_PAIRS or np.bincount(groups).max() > len(groups) / _FOLDS:
        return None
    base_s = roofline_s(timed.kernels, *reached(timed))
    added_s = hats(timed.order) @ np.array(drift_s) if drift_s else np.zeros(len(base_s))
    log_ratio = np.log(np.maximum(timed.seconds - added_s, 0.3 * float(np.quantile(timed.seconds, 0.005))) / base_s)
    features = roofline_features(timed.kernels, timed.names)[1]
    fold = np.random.default_rng(seed).integers(_FOLDS, size=len(base_s))[groups]
    errors = np.zeros(len(base_s))
    for out in (fold == number for number in range(_FOLDS)):
        arrays = grow_trees(features[~out], log_ratio[~out], seed=seed, rounds=_ROUNDS, parameters=_FASTER)
        errors[out] = evaluate_trees(arrays, features[out]) - log_ratio[out]
    one, other = errors[pairs[:, 0]], errors[pairs[:, 1]]
    apart = np.abs(one - other) / np.sqrt(2)
    low, high = np.quantile(errors, [0.01, 0.99])
    both = np.clip(np.concatenate([one, other]), low, high), np.clip(np.concatenate([other, one]), low, high)
    return Neighbours(
        pairs=len(pairs),
        re=float(apart.mean()),
        standard_error=float(apart.std(ddof=1) / np.sqrt(len(apart))),
        own_re=float(np.abs(np.expm1(errors[pairs])).mean()),
        correlation=float(np.corrcoef(*both)[0, 1]),
    )


def _alike(points: Floats) -> tuple[Ints, Ints]:
    """Disjoint pairs of near points, the nearest first; and of every point the group that near ones chain into."""
    one, other, distance = _near(points)
    groups = np.arange(len(points))
    for a, b in zip(one, other, strict=True):
        groups[groups == groups[b]] = groups[a]
    taken = np.zeros(len(points), bool)
    pairs = []
    for at in np.argsort(distance, kind="stable"):
        if not (taken[one[at]] or taken[other[at]]):
            taken[one[at]] = taken[other[at]] = True
            pairs.append((one[at], other[at]))
    return np.array(pairs, np.int64).reshape(-1, 2), groups


def _near(points: Floats) -> tuple[Ints, Ints, Floats]:
    """Every two points that are near, and how far apart they are; sorted by one size so that few are compared."""
    order = np.argsort(points[:, 0], kind="stable")
    along = points[order]
    ends = np.searchsorted(along[:, 0], along[:, 0] + NEAR, side="right")
    ones, others, distances = [], [], []
    for at, end in enumerate(ends):
        apart = np.sqrt(((along[at + 1 : end] - along[at]) ** 2).sum(axis=1))
        near = np.flatnonzero(apart < NEAR)
        ones.append(np.full(len(near), order[at]))
        others.append(order[at + 1 + near])
        distances.append(apart[near])
    return np.concatenate(ones), np.concatenate(others), np.concatenate(distances)
