"""The 90% interval of a prediction (docs/model/interval.md), and of a ratio of two iterations.

An interval is for the median of a run's iterations: the spread of single iterations is no part of it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from predict.costs.sourced import CorrelatedError, Floats
from predict.workload import PreparedEvaluation

WORST_OVERLAP = 0.95
"""Of the time hidden, what 95% of the values lie below that are spread evenly between none and all of it."""
UNMEASURED_OVERLAP = "overlap that was not measured"
"""The error of what overlap costs where nobody measured it; all predictions of a profile share it."""
_STANDS_STILL = 1e9
"""Slow-down of compute that makes no progress beside a collective."""
_WORTH_THREADS_S = 0.001
"""An evaluation that takes longer leaves the interpreter alone for most of it, and others can go on beside it."""
_AT_ONCE_S = 0.02
"""As many evaluations as take so long are one."""
_MOST_THREADS = 8
"""Evaluations at a time, each of which holds arrays as long as the plan has tasks."""
_SHORTEST = 1e-3
"""Of an iteration, what is left of it in a ratio where its errors are larger than itself: a ratio needs seconds."""


class Interval(NamedTuple):
    """Bounds in seconds, and the half-width that each source of error alone would have (its larger side).

    Attributes:
        moved_s: the iteration with each mode at the upper and at the lower end of its own interval.
        own_s: half-width from parts' own spreads alone. unexplained_s: what the parts left of each measured iteration.
    """

    low_s: float
    high_s: float
    spread_s: dict[str, float]
    moved_s: dict[str, tuple[float, float]]
    own_s: float
    unexplained_s: tuple[float, ...]


def interval(workload: PreparedEvaluation) -> Interval:
    """90% interval of the iteration.

    Each mode of error is moved to both ends of its own 90% interval and the iteration is evaluated anew; what it gains
    and loses are added in quadrature over the modes, each side by itself, and errors of communication lose no more than
    it takes. Parts' own spreads are taken at full weight, as if nothing hid them. What the parts left unexplained of
    the iteration that they were measured in moves the end on its side, by itself. Where nothing was measured of
    overlap, what is hidden may cost any part of itself.

    Raises:
        UserError: the profile's parts explain nothing of its iterations.
    """
    costs = workload.costs
    point = workload.timing().iteration_s
    begun = time.perf_counter()
    # All that is compared is evaluated alike, so that an error that changes nothing moves it by nothing.
    still_s, alone_s = _still_and_without_communication(workload)
    takes_s = (time.perf_counter() - begun) / 2
    independent_s = Z90 * costs.independent_total_sd_s * workload.straggler
    moved = _moved(workload, takes_s)
    if workload.overlap_is_unmeasured:
        moved[UNMEASURED_OVERLAP] = _unmeasured_overlap(workload)
    ups = {name: max(0.0, *(end - still_s for end in ends)) for name, ends in moved.items()}
    downs = {name: max(0.0, *(still_s - end for end in ends)) for name, ends in moved.items()}
    unexplained = [_unexplained_s(remainder, workload) for remainder in workload.spread.remainders]
    spread = {
        "each layer": independent_s,
        **{name: max(up, downs[name]) for name, up in ups.items()},
        "remainder of closure": max((abs(value) for value in unexplained), default=0.0),
    }
    low = point - math.hypot(independent_s, _lost(workload, still_s - alone_s, downs)) + min(0.0, *unexplained)
    high = point + math.hypot(independent_s, *ups.values()) + max(0.0, *unexplained)
    spread = {name: value for name, value in spread.items() if value}
    return Interval(max(low, 0.0), high, spread, moved, independent_s, tuple(unexplained))


def _moved(workload: PreparedEvaluation, takes_s: float) -> dict[str, tuple[float, float]]:
    """The iteration with each mode at both ends of its interval, of a workload that takes so long to evaluate."""
    modes = workload.costs.modes
    shifts = [(mode, by) for mode in modes for by in (Z90, -Z90)]
    # Evaluated at once, they share what a call takes; arrays of very many would lie beyond the processor's caches.
    at_once = max(1, int(_AT_ONCE_S / takes_s)) if takes_s else len(shifts)
    parts = [shifts[start : start + at_once] for start in range(0, len(shifts), at_once)]

    def shifted(part: Sequence[tuple[CorrelatedError, float]]) -> list[float]:
        return _shifted(workload, part)

    if takes_s <= _WORTH_THREADS_S:
        ends = list(chain.from_iterable(map(shifted, parts)))
    else:
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS)) as threads:
            ends = list(chain.from_iterable(threads.map(shifted, parts)))
    return dict(zip((mode.name for mode in modes), zip(ends[::2], ends[1::2], strict=True), strict=True))


def _still_and_without_communication(workload: PreparedEvaluation) -> tuple[float, float]:
    """Seconds of the iteration as it is, and of one in which no communication takes any."""
    costs = workload.costs
    seconds = np.stack([costs.seconds, np.where(costs.is_communication, 0.0, costs.seconds)])
    still_s, alone_s = workload.iterations_s(seconds, costs.compute_slowdown, costs.communication_slowdown).tolist()
    return still_s, alone_s


def _lost(workload: PreparedEvaluation, communication_s: float, downs: Mapping[str, float]) -> float:
    """How much shorter all modes together make the iteration, in quadrature of what each does by itself (``downs``).

    Errors of communication save no more than it adds to the iteration (``communication_s``): without any, compute is
    left. One of them stops there by itself, since no seconds are below none; several in quadrature would not.
    """
    costs = workload.costs
    computes = ~costs.is_communication
    of_compute = [mode.name for mode in costs.modes if np.any(mode.seconds[computes])]
    compute = math.hypot(*(downs[name] for name in of_compute))
    communication = math.hypot(*(down for name, down in downs.items() if name not in of_compute))
    return math.hypot(compute, min(communication, max(0.0, communication_s)))


def _unmeasured_overlap(workload: PreparedEvaluation) -> tuple[float, float]:
    """Seconds of the iteration with most of what overlap hides gone again, and with overlap for nothing."""
    costs = workload.costs
    # What calls beside an all-reduce are slowed by stays as it is: it has an error of its own.
    unslowed = np.ones_like(costs.seconds)
    free = workload.time(costs.seconds, unslowed, costs.communication_slowdown)
    (free_s,) = workload.iterations_s(costs.seconds[None], unslowed, costs.communication_slowdown).tolist()
    hidden_s = free.overlap_s
    if free.stage is not None:
        # Stages wait for what others lose: one stage's own is not all. Compute that stands still beside is in turn.
        stopped = np.where(costs.is_communication & (costs.seconds > 0), _STANDS_STILL, 1.0)
        (in_turn_s,) = workload.iterations_s(costs.seconds[None], stopped, costs.communication_slowdown).tolist()
        hidden_s = max(hidden_s, in_turn_s - free_s)
    return free_s + WORST_OVERLAP * hidden_s, free_s


def _shifted(workload: PreparedEvaluation, shifts: Sequence[tuple[CorrelatedError, float]]) -> list[float]:
    """The iteration with each of some modes shifted by so many standard deviations, all evaluated at once."""
    costs, by = workload.costs, np.array([[by] for _, by in shifts])

    def rows(values: Floats, errors: Sequence[Floats], least: float) -> Floats:
        return np.asarray(np.maximum(values + by * np.array(errors), least))

    seconds = rows(costs.seconds, [mode.seconds for mode, _ in shifts], 0.0)
    slowdowns = [
        # Few errors move these: one row is for all where none does.
        rows(values, errors, 1.0) if np.any(errors) else np.maximum(values, 1.0)
        for values, errors in (
            (costs.compute_slowdown, [mode.compute_slowdown for mode, _ in shifts]),
            (costs.communication_slowdown, [mode.communication_slowdown for mode, _ in shifts]),
        )
    ]
    # None is below nothing, and a sum with one that is not finite is not.
    sums = sum((values.sum(axis=-1) for values in slowdowns), start=seconds.sum(axis=-1))
    for number in np.flatnonzero(~np.isfinite(sums)).tolist():
        name = shifts[number][0].name
        raise UserError(f"the error of {name} in the profile is too large for a prediction; measure it again")
    return list(map(float, workload.iterations_s(seconds, *slowdowns)))


def _unexplained_s(remainder: float, workload: PreparedEvaluation) -> float:
    """What is missing from the parts, 1 - parts / iteration being the remainder."""
    if remainder >= 1:
        raise UserError("the layers of the profile explain nothing of its measured iterations; measure them again")
    return remainder / (1 - remainder) * workload.costs.compute_s * workload.straggler


class Timed(NamedTuple):
    """An iteration and its interval."""

    iteration_s: float
    bounds: Interval


def efficiency_band(point: Timed, reference: Timed, efficiency: float) -> tuple[float, float]:
    """90% interval of ``efficiency``, which goes as the reference's iteration over the point's.

    An error that both share moves both at once, so each mode is moved in both and the ratio taken anew. Layers' own
    errors are taken as independent between the two, which is on the safe side. What parts left unexplained counts in
    both.
    """
    half_width = efficiency * math.hypot(
        point.bounds.own_s / point.iteration_s, reference.bounds.own_s / reference.iteration_s
    )
    return _band(point, reference, efficiency, half_width, ())


def gain_band(point: Timed, reference: Timed) -> tuple[float, float]:
    """90% interval of the reference's iteration over the point's, less 1, where both run the same layers alike.

    As :func:`efficiency_band`, but layers' own errors are the same errors in both and move both at once; what one has
    more of them is its own.
    """
    ours, theirs = point.bounds.own_s, reference.bounds.own_s
    shared, ratio = min(ours, theirs), reference.iteration_s / point.iteration_s
    more = ratio * math.sqrt(abs(ours**2 - theirs**2)) / min(point.iteration_s, reference.iteration_s)
    ends = [(reference.iteration_s + by, point.iteration_s + by) for by in (shared, -shared)]
    low, high = _band(point, reference, ratio, more, [ends])
    return low - 1.0, high - 1.0


def _band(
    point: Timed, reference: Timed, value: float, half_width: float, moved: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, float]:
    """The interval of ``value``.

    Args:
        half_width: of errors that the two do not share.
        moved: beside the modes, seconds of reference and point at both ends of an error that they share.
    """
    scale = value * point.iteration_s / reference.iteration_s

    def moved_by(reference_s: float, point_s: float) -> float:
        kept_s = max(reference_s, _SHORTEST * reference.iteration_s)
        return scale * kept_s / max(point_s, _SHORTEST * point.iteration_s) - value

    ours, theirs = point.bounds.moved_s, reference.bounds.moved_s
    unmoved = (reference.iteration_s,) * 2, (point.iteration_s,) * 2
    modes = [
        list(zip(theirs.get(name, unmoved[0]), ours.get(name, unmoved[1]), strict=True))
        for name in dict.fromkeys((*ours, *theirs))
    ]
    above, below = half_width**2, half_width**2
    for both in (*modes, *moved):
        gains = [moved_by(*seconds) for seconds in both]
        above += max(0.0, *gains) ** 2
        below += max(0.0, *(-gain for gain in gains)) ** 2
    unexplained = [
        moved_by(reference.iteration_s + missing_there, point.iteration_s + missing)
        for missing_there, missing in zip(reference.bounds.unexplained_s, point.bounds.unexplained_s, strict=False)
    ]
    low = value - math.sqrt(below) + min(0.0, *unexplained, 0.0)
    return max(low, 0.0), value + math.sqrt(above) + max(0.0, *unexplained, 0.0)
