"""How likely each of several predictions is the shortest, errors that they share left to move all of them at once.

An error is drawn once for all: a mode by its name, and layers' own errors for all that run the same shards on as many
samples. What parts left unexplained counts between none and all of it. Errors multiply, since a time is above 0: a mode
that reaches the ends of its interval does so exactly.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from paradl_bench.core.statistics import Z90
from predict.costs.sourced import Floats, Ints
from predict.prediction.interval import Timed

DRAWS = 8192
_SEED = 20240229
_TIE = 1e-9
"""Relative difference of times that are the same: sums of the same parts in another order."""
_LEAST_RATIO = 1e-3
"""Of the lower end of an interval to the prediction: an interval may reach 0, of which there is no logarithm."""


def chances_of_best(timed: Sequence[Timed], layers: Sequence[Hashable]) -> Floats:
    """The share of draws in which each is the shortest; those that tie share a draw. Adds up to 1.

    Args:
        layers: of each, what it runs: equal ones share the errors of their layers.
    """
    generator = np.random.default_rng(_SEED)
    modes = sorted({name for candidate in timed for name in candidate.bounds.moved_s})
    of_modes = generator.standard_normal((len(modes), DRAWS))
    of_layers = {name: generator.standard_normal(DRAWS) for name in dict.fromkeys(layers)}
    unexplained = generator.random(DRAWS)
    upper, lower = np.zeros((2, len(timed), len(modes)))
    for row, candidate in enumerate(timed):
        for mode, ends in candidate.bounds.moved_s.items():
            ratios = (max(end / candidate.iteration_s, _LEAST_RATIO) for end in ends)
            upper[row, modes.index(mode)], lower[row, modes.index(mode)] = map(math.log, ratios)
    # Not as a product of matrices: threads of its library would spin on beside what comes next.
    drawn = np.einsum("cm,md->cd", upper, np.maximum(of_modes, 0.0))
    drawn -= np.einsum("cm,md->cd", lower, np.minimum(of_modes, 0.0))
    for row, candidate, name in zip(drawn, timed, layers, strict=True):
        bounds = candidate.bounds
        row += of_layers[name] * bounds.own_s / candidate.iteration_s
        missing = min(0.0, *bounds.unexplained_s, 0.0) + max(0.0, *bounds.unexplained_s, 0.0)
        row[:] = candidate.iteration_s * np.exp(row / Z90)
        row *= np.maximum(1 + unexplained * missing / candidate.iteration_s, _LEAST_RATIO)
    shortest = drawn <= drawn.min(axis=0) * (1 + _TIE)
    return np.asarray((shortest / shortest.sum(axis=0)).mean(axis=1))


def pareto(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Which points no other one is at least as small as in everything, and smaller in something."""
    values = np.array(points, float)
    return [not bool(((values <= point).all(axis=1) & (values < point).any(axis=1)).any()) for point in values]


def steps(seconds: Floats, sizes: Floats, below: float) -> Ints:
    """Indices of those than which none is faster and as small, by seconds; of finite seconds and sizes below that."""
    chosen = np.flatnonzero(np.isfinite(seconds) & (sizes < below))
    chosen = chosen[np.lexsort((sizes[chosen], seconds[chosen]))]
    least = np.minimum.accumulate(np.concatenate([[np.inf], sizes[chosen]]))
    return np.asarray(chosen[sizes[chosen] < least[:-1]])
