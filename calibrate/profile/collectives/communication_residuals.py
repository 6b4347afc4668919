"""How far measured times of a collective lie off their fit, by rank count and size: what was measured goes first.

Times at the sizes and rank counts measured differ from a fit by more than their noise, the more so where one form has
to do for all rank counts and messages outgrow caches. So a prediction inside of what was measured is the fit times what
measured times are of it there (docs/model/communication.md), and the fit alone where nothing near was measured.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.profile.collectives.communication import CommunicationFit
from paradl_bench.core.statistics import Floats


class SizeRatios(NamedTuple):
    """What some times are of others by message size, in logarithms: of bytes, ascending, and of the ratio there.

    Empty where nothing is known.
    """

    log_bytes: tuple[float, ...] = ()
    log_ratios: tuple[float, ...] = ()

    def log_ratio(self, message_bytes: ArrayLike) -> Floats:
        """Of any sizes: straight between two known ones, beyond the smallest and the largest as there; else 0."""
        log_bytes = np.log(np.maximum(np.asarray(message_bytes, float), 1.0))
        return np.interp(log_bytes, self.log_bytes, self.log_ratios) if self.log_bytes else np.zeros(log_bytes.shape)

    def log_ratio_of_one(self, message_bytes: float) -> float:
        """:meth:`log_ratio` of one size; numpy gives the same to the last bit."""
        if not self.log_bytes:
            return 0.0
        log_bytes = float(np.log(max(message_bytes, 1.0)))
        after = bisect.bisect_right(self.log_bytes, log_bytes)
        if after in (0, len(self.log_bytes)):
            return self.log_ratios[max(after - 1, 0)]
        (low, high), (at_low, at_high) = self.log_bytes[after - 1 : after + 1], self.log_ratios[after - 1 : after + 1]
        return (at_high - at_low) / (high - low) * (log_bytes - low) + at_low


class Residuals(NamedTuple):
    """What measured times are of fitted ones.

    Attributes:
        counts: each rank count measured, ascending, and its sizes; none where nothing is known.
    """

    counts: tuple[tuple[int, SizeRatios], ...] = ()

    def factor_of_one(self, ranks: float, message_bytes: float) -> float:
        """:meth:`factor` of one message, in a fraction of the time."""
        known = [count for count, _ in self.counts]
        if not known or not known[0] <= ranks <= known[-1]:
            return 1.0
        above = bisect.bisect_left(known, ranks)
        high, at_high = self.counts[above]
        if ranks == high:
            return float(np.exp(at_high.log_ratio_of_one(message_bytes)))
        low, at_low = self.counts[above - 1]
        share = float(np.log(ranks / low)) / math.log(high / low)
        log_ratios = at_low.log_ratio_of_one(message_bytes), at_high.log_ratio_of_one(message_bytes)
        return float(np.exp((1 - share) * log_ratios[0] + share * log_ratios[1]))

    def factor(self, ranks: ArrayLike, message_bytes: ArrayLike) -> Floats:
        """What to multiply fitted seconds by, broadcast: 1 beyond the rank counts measured.

        Between two rank counts it goes straight over the logarithm of ranks, from the one's factor to the other's.
        """
        p, m = np.broadcast_arrays(np.asarray(ranks, float), np.asarray(message_bytes, float))
        factor = np.ones(p.shape)
        pairs = itertools.pairwise(self.counts) if len(self.counts) > 1 else zip(self.counts, self.counts, strict=True)
        for (low, at_low), (high, at_high) in pairs:
            inside = (p >= low) & (p <= high)
            if not inside.any():
                continue
            share = np.log(p[inside] / low) / math.log(high / low) if high > low else 0.0
            factor[inside] = np.exp((1 - share) * at_low.log_ratio(m[inside]) + share * at_high.log_ratio(m[inside]))
        return factor


def residuals_of(fits: Sequence[CommunicationFit]) -> Residuals:
    """Of the fits of one (library, operation, level)."""
    known: dict[int, dict[int, float]] = {}
    for fit in fits:
        for point in fit.measured:
            if point.message_bytes > 0 and point.measured_s > 0 and point.fitted_s > 0:
                known.setdefault(point.ranks, {})[point.message_bytes] = math.log(point.measured_s / point.fitted_s)
    return Residuals(
        tuple(
            (ranks, SizeRatios(tuple(map(math.log, sorted(logs))), tuple(logs[size] for size in sorted(logs))))
            for ranks, logs in sorted(known.items())
        )
    )
