"""Times of a sweep brought to one speed of the host, by a kernel that was timed around every sample.

A shared host is faster at one moment than at the next, and kernels next to each other in time slow down alike, if not
by as much: one that waits for memory less than one that computes, a long one less than the moment around it. So how
much of the reference's slowing a kernel shares is an exponent, fitted for each range of times: of all pairs of samples
of one kernel, the ratio of their times against that of their references, by least absolute deviations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from paradl_bench.core.statistics import Floats
from paradl_bench.network.kernel import KernelSamples

_FEWEST_PAIRS = 30
"""Fewer say nothing: times stay as they are."""
_REWEIGHTINGS = 30


def usual_reference_s(records: Sequence[KernelSamples]) -> float:
    """Median of what the reference took over a sweep; 0 where it was not timed."""
    taken = [reference for record in records for reference in record.reference_s]
    return statistics.median(taken) if taken else 0.0


def medians_at_usual_pace(kernels: Sequence[Sequence[KernelSamples]], usual_s: float) -> list[list[float]]:
    """Median of every record's samples as the host's usual speed would have had them.

    Args:
        kernels: records by kernel, of one kind and stage. usual_s: of the reference; 0 leaves times as they are.
    """
    shared = _shared(kernels) if usual_s else {}
    return [[_median(record, usual_s, shared) for record in records] for records in kernels]


def _median(record: KernelSamples, usual_s: float, shared: dict[int, float]) -> float:
    median_s = statistics.median(record.samples_s)
    share = shared.get(_factor_of_ten(median_s), 0.0) if median_s > 0 else 0.0
    if not record.reference_s or not share:
        return median_s
    pairs = zip(record.samples_s, record.reference_s, strict=True)
    return float(statistics.median(sample * (usual_s / reference) ** share for sample, reference in pairs))


def _shared(kernels: Sequence[Sequence[KernelSamples]]) -> dict[int, float]:
    """By power of ten of a kernel's time, the exponent; from 0, a reference that says nothing, to 1."""
    apart: dict[int, list[tuple[float, float]]] = {}
    for records in kernels:
        samples = [
            (math.log(sample), math.log(reference))
            for record in records
            for sample, reference in zip(record.samples_s, record.reference_s, strict=False)
            if sample > 0
        ]
        if len(samples) < 2:
            continue
        # Every sample against the kernel's median: pairs of all would count a kernel of many samples too much.
        middle = [statistics.median(column) for column in zip(*samples, strict=True)]
        key = _factor_of_ten(math.exp(middle[0]))
        apart.setdefault(key, []).extend((reference - middle[1], sample - middle[0]) for sample, reference in samples)
    return {
        key: min(1.0, max(0.0, _slope(np.array(pairs)))) for key, pairs in apart.items() if len(pairs) >= _FEWEST_PAIRS
    }


def _factor_of_ten(seconds: float) -> int:
    return math.floor(math.log10(seconds))


def _slope(pairs: Floats) -> float:
    """Of a line through the origin with the least sum of absolute deviations, by reweighted least squares."""
    x, y = pairs[:, 0], pairs[:, 1]
    slope = 0.0
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.maximum(np.abs(y - slope * x), 1e-3)
        total = float(weights @ (x * x))
        if total == 0:
            return 0.0
        slope = float(weights @ (x * y)) / total
    return slope
