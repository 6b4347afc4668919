"""How long a ghost sleeps where sleeps spread: drawn as the profile's measured iterations and layers do.

A profile keeps how single iterations spread round their median (quantiles), how single times of every layer do (an
interquartile range), and so how much of the former is tied: a rank is slow for the whole of an iteration, or one event
at a time (:mod:`predict.costs.spread.stragglers`, whose prediction of the last rank rests on the same numbers). So of
every iteration a rank draws

    (1 + x)     for all of its sleeps, x by the quantiles of the tied part
    g_j         for each sleep j by itself, of mean 1 and the event's own relative deviation

and sleeps (1 + x) g_j times as long as the profile says. g is of a gamma distribution: positive, and close to a normal
one where the deviation is small. The shape of a single layer's times is no part of a profile.

Draws hang on the seed, the rank and the iteration alone, so that a run that goes on draws as one that was not cut off.
"""

from __future__ import annotations

import numpy as np

from paradl_bench.records.training.ghost_record import GhostSpread


class IterationDraws:
    """What one rank draws in one iteration."""

    def __init__(self, spread: GhostSpread, *, seed: int, rank: int, iteration: int) -> None:
        # Numbers of one rank or iteration that are those of another, shifted, would tie the two.
        self._generator = np.random.default_rng([seed, rank, iteration])
        probabilities = np.linspace(0.0, 1.0, len(spread.tied_quantiles))
        self.tied = float(np.interp(self._generator.random(), probabilities, spread.tied_quantiles))

    def factor(self, own_relative_sd: float) -> float:
        """How many times as long the next sleep takes.

        Args:
            own_relative_sd: standard deviation of the event by itself, over its mean; 0 for none.
        """
        if not own_relative_sd:
            return 1 + self.tied
        shape = own_relative_sd**-2
        return (1 + self.tied) * float(self._generator.gamma(shape)) / shape
