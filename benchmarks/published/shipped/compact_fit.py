"""Small regressors, for profiles that come with the tool: trees of few leaves, or one share of the roofline.

A published table may hold thousands of shapes of one kind. Some hundreds of them, drawn at random, tell nearly as much,
and take a hundredth of the bytes. A fifth is held out: it says which of the two answers, and how wide its interval is.
Then that one is fitted to all that were drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calibrate.fitting.kernels.kernel_trial import Timed, prefixed, reached
from calibrate.fitting.kernels.share_fit import FEWEST_FOR_SHARE, bound_90, candidate_of, fit_share, model_of
from calibrate.kernels.features import log_sizes, roofline_features
from calibrate.kernels.files import Arrays
from calibrate.kernels.model import KernelModel, distances, roofline_s
from calibrate.kernels.trees import evaluate_trees, grow_trees
from paradl_bench.core.statistics import Floats

FEWEST_FOR_TREES = 50
MOST_SHAPES = 600
_SEED = 0
_ROUNDS = 120
_SMALL: dict[str, Any] = {
    "objective": "l1",
    "learning_rate": 0.1,
    "num_leaves": 12,
    "min_data_in_leaf": 8,
    "feature_fraction": 0.6,
}


def fit_compact(timed: Timed, prefix: str) -> tuple[KernelModel, Arrays] | None:
    """A regressor of one group of kernels; None where there are too few of them to say how far it is off."""
    timed = timed.at(_drawn(len(timed.shapes)))
    if len(timed.shapes) < FEWEST_FOR_SHARE or not timed.names:
        return None
    model, arrays = fit_share(timed, prefix)
    if len(timed.shapes) >= FEWEST_FOR_TREES:
        trees, of_trees = _fit_trees(timed, prefix)
        if trees.interval_log < model.interval_log:
            model, arrays = trees, of_trees
    return model, prefixed(prefix, {name: _halved(array) for name, array in arrays.items()})


def _drawn(count: int) -> Any:
    shuffled = np.random.default_rng(_SEED).permutation(count)
    return np.sort(shuffled[:MOST_SHAPES])


def _fit_trees(timed: Timed, prefix: str) -> tuple[KernelModel, Arrays]:
    shuffled = np.random.default_rng(_SEED).permutation(len(timed.shapes))
    held = round(0.2 * len(shuffled))
    held_out, training = (timed.at(np.sort(rows)) for rows in (shuffled[:held], shuffled[held:]))
    errors = _estimated(_grown(training), training, held_out) - np.log(held_out.seconds)
    seen = log_sizes(timed.kernels, timed.names)
    apart = distances(log_sizes(held_out.kernels, timed.names), log_sizes(training.kernels, timed.names))
    candidate = candidate_of("trees", np.expm1(errors), held_out.seconds)
    distance = float(np.quantile(apart, 0.9))
    model = model_of(timed, prefix, reached(timed), candidate, bound_90(errors), distance)
    return model, {**prefixed("trees", _grown(timed)), "seen": seen}


def _grown(timed: Timed) -> Arrays:
    base_s = roofline_s(timed.kernels, *reached(timed))
    features = roofline_features(timed.kernels, timed.names)[1]
    target = np.log(timed.seconds / base_s)
    return grow_trees(features, target, seed=_SEED, rounds=_ROUNDS, parameters=_SMALL)


def _estimated(trees: Arrays, fitted: Timed, timed: Timed) -> Floats:
    """Logs of seconds of other kernels."""
    features = roofline_features(timed.kernels, timed.names)[1]
    base_s = roofline_s(timed.kernels, *reached(fitted))
    return np.asarray(np.log(base_s) + evaluate_trees(trees, features))


def _halved(array: Any) -> Any:
    """Numbers at half the width: seven digits are more than any time has."""
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    return array.astype(np.int16) if array.size and abs(array).max() < 1 << 15 else array
