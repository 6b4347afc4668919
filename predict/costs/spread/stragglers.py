"""How late the last of several ranks is: the expected maximum over ranks, stretch of compute by stretch.

Of p ranks that start level and are slow independently of each other, each with a time of the iterations' distribution
F, the last one is expected to be late by

    wait(p) = E[max of p draws from F] - E[F] = integral of F^-1(u) d(u^p) - integral of F^-1(u) du
    late_k = wait(p) sqrt(omega t_k^2 + own_weight sum of t_i^2 v_i),     own_weight = (1 - omega) / V

times the iteration, and behind a stretch k of compute between two meetings, whose events have t_i seconds and relative
variance v_i. omega is the tied share of an iteration's variance, V what its events have by themselves
(docs/model/simulate.md, "The slowest rank", which says what is assumed and left out).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from calibrate.statistics.blocks import pull_in
from paradl_bench.core.statistics import IQR_TO_SD
from predict.costs.sourced import Floats, Remark

_POINTS = 2001
"""At which a distribution is read to integrate it."""


class RankSpread(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """How single iterations of one rank spread.

    Attributes:
        quantiles: of an iteration over the median, at evenly spaced probabilities from 0 to 1.
        samples: how many iterations they rest on.
        common_variance: omega, of the variance: from 0 (events are slow by themselves) to 1 (the whole iteration is).
        own_weight: what the square of an event's own relative deviation counts for.
    """

    quantiles: tuple[float, ...] = (1.0, 1.0)
    samples: int = 1
    common_variance: float = 1.0
    own_weight: float = 0.0

    def __post_init__(self) -> None:
        if len(self.quantiles) < 2:
            raise ValueError("quantiles has to hold at least two numbers")
        if not 0 <= self.common_variance <= 1:
            raise ValueError(f"common_variance has to lie between 0 and 1, not {self.common_variance}")

    @cached_property
    def _pulled_in(self) -> Floats:
        return pull_in(self.quantiles, middle=median(self.quantiles))

    def wait(self, ranks: int, slower: float = 1.0) -> float:
        """How late the last of so many ranks is expected to be, over an iteration; 0 for one.

        Beyond as many ranks as there are samples it would rest on nothing: their number counts there.

        Args:
            slower: how many times longer one of them takes; it is that one which the last is later than.
        """
        counted = min(ranks, self.samples)
        if counted <= 1 or self._pulled_in[0] == self._pulled_in[-1]:
            return 0.0
        if slower == 1.0:
            return self._expected_maximum(counted) - self._expected_maximum(1)
        return self._expected_maximum_beside(counted - 1, slower) - slower * self._expected_maximum(1)

    def _expected_maximum_beside(self, others: int, slower: float) -> float:
        """E[max] of so many draws and of one that is stretched: the integral of 1 - F(x)^others F(x / slower)."""
        values = self._pulled_in
        probabilities = np.linspace(0.0, 1.0, len(values))
        even = np.linspace(values[0], slower * values[-1], _POINTS)
        points = np.unique(np.concatenate([even, values, slower * values]))
        below = np.interp(points, values, probabilities) ** others * np.interp(points / slower, values, probabilities)
        area = float(np.sum((below[1:] + below[:-1]) / 2 * np.diff(points)))
        return float(points[-1]) - area

    def _expected_maximum(self, ranks: int) -> float:
        """E[max] of ``ranks`` draws: F^-1 runs straight between its quantiles, and u^p is integrated piece by piece."""
        # A search asks for the same few numbers of ranks thousands of times.
        if ranks not in self._maxima:
            # Powers by integers of numpy and of Python end in other digits.
            self._maxima[ranks] = self._integrated_maximum(int(ranks))
        return self._maxima[ranks]

    @cached_property
    def _maxima(self) -> dict[int, float]:
        return {}

    def _integrated_maximum(self, ranks: int) -> float:
        values = self._pulled_in
        probabilities = np.linspace(0.0, 1.0, len(values))
        weights = np.diff(probabilities ** (ranks + 1)) / (ranks + 1)
        slopes = np.diff(values) / np.diff(probabilities)
        return float(values[-1] - slopes @ weights)

    @cached_property
    def relative_sd(self) -> float:
        """Standard deviation of an iteration, over the median."""
        values = self._pulled_in
        low, high = values[:-1], values[1:]
        mean_square = float(np.mean((low**2 + low * high + high**2) / 3))
        return math.sqrt(max(mean_square - self._expected_maximum(1) ** 2, 0.0))

    def own_deviation(self, own_relative_sd: Floats) -> Floats:
        """Of events that spread so in all, what falls on each by itself: standard deviations over their seconds."""
        return np.asarray(own_relative_sd * self.relative_sd * math.sqrt(self.own_weight))

    def common_deviation(self, probabilities: Floats) -> Floats:
        """By how much all of a rank's compute is slower than in the mean, at probabilities."""
        return np.asarray(self.deviation(probabilities) * math.sqrt(self.common_variance))

    def deviation(self, probabilities: Floats) -> Floats:
        """By how much an iteration is slower than the mean one, at probabilities."""
        values = self._pulled_in
        ratios = np.interp(probabilities, np.linspace(0.0, 1.0, len(values)), values)
        return np.asarray(ratios - self._expected_maximum(1))

    def remarks(self, ranks: int) -> tuple[Remark, ...]:
        """What to say of the wait for so many ranks."""
        if ranks <= 1:
            return ()
        remarks = [Remark("the straggler factor assumes that ranks are slow independently of each other", False)]
        if self.samples < ranks:
            text = f"straggler factor beyond {self.samples} ranks: as many iterations were measured"
            remarks.append(Remark(text, True))
        return tuple(remarks)


class Parting(NamedTuple):
    """How a spread parts: ``common_variance`` and ``own_weight`` as of :class:`RankSpread`."""

    common_variance: float
    own_weight: float


def part_spread(quantiles: Sequence[float], seconds: Floats, own_sd_s: Floats, whole_s: float) -> Parting:
    """omega by moments: 1 where events do not spread, 0 where they spread as much as the iteration or more.

    Args:
        quantiles: of single iterations over their median, at evenly spaced probabilities.
        seconds, own_sd_s: of each event of an iteration of ``whole_s``, and its standard deviation.
    """
    low, high = np.interp([0.25, 0.75], np.linspace(0.0, 1.0, len(quantiles)), quantiles)
    variance = ((high - low) * IQR_TO_SD) ** 2
    of_events = float(np.sum(own_sd_s**2)) / whole_s**2 if whole_s else 0.0
    if not variance or not of_events:
        return Parting(1.0, 0.0)
    alike = float(np.sum(seconds**2)) / whole_s**2
    share = min(max((1 - of_events / variance) / max(1 - alike, 1e-9), 0.0), 1.0)
    return Parting(share, (1 - share) / of_events)
