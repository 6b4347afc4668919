"""The 90% interval of a prediction, from the spread of its parts (docs/model.md, "Interval").

The interval is for the median of a run's iterations: the spread of single iterations is no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from predict.costs.sourced import CorrelatedError, Costs
from predict.workload import PreparedEvaluation

WORST_OVERLAP = 0.95
"""Of the time hidden, what 95% of the values lie below that are spread evenly between none and all of it."""
UNMEASURED_OVERLAP = "overlap that was not measured"
"""The error of what overlap costs where nobody measured it; all predictions of a profile share it."""
_STANDS_STILL = 1e9
"""Slow-down of compute that makes no progress beside a collective."""


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
    overlap, what is hidden may cost any part of itself: two things side by side take at least as long as the longer of
    them, and as a rule at most as long as both in turn.

    Raises:
        UserError: the profile's parts explain nothing of its iterations.
    """
    costs = workload.costs
    point = workload.timing().iteration_s
    own = Z90 * costs.independent_total_sd_s * workload.straggler
    moved = {
        mode.name: (_shifted(workload, costs, mode, Z90), _shifted(workload, costs, mode, -Z90)) for mode in costs.modes
    }
    if workload.overlap_is_unmeasured:
        moved[UNMEASURED_OVERLAP] = _unmeasured_overlap(workload)
    ups = {name: max(0.0, *(end - point for end in ends)) for name, ends in moved.items()}
    downs = {name: max(0.0, *(point - end for end in ends)) for name, ends in moved.items()}
    unexplained = [_unexplained_s(remainder, workload) for remainder in workload.spread.remainders]
    spread = {
        "each layer": own,
        **{name: max(up, downs[name]) for name, up in ups.items()},
        "remainder of closure": max((abs(value) for value in unexplained), default=0.0),
    }
    low = point - math.hypot(own, _lost(workload, point, downs)) + min(0.0, *unexplained)
    high = point + math.hypot(own, *ups.values()) + max(0.0, *unexplained)
    spread = {name: value for name, value in spread.items() if value}
    return Interval(max(low, 0.0), high, spread, moved, own, tuple(unexplained))


def _lost(workload: PreparedEvaluation, point: float, downs: Mapping[str, float]) -> float:
    """How much shorter all modes together make the iteration, in quadrature of what each does by itself (``downs``).

    Errors of communication save no more than communication takes: without any, compute is left. One of them stops there
    by itself, since no seconds are below none; several in quadrature would not.
    """
    costs = workload.costs
    computes = ~costs.is_communication
    of_compute = [mode.name for mode in costs.modes if np.any(mode.seconds[computes])]
    compute = math.hypot(*(downs[name] for name in of_compute))
    communication = math.hypot(*(down for name, down in downs.items() if name not in of_compute))
    if not communication:
        return compute
    alone_s = workload.iteration_s(
        np.where(computes, costs.seconds, 0.0), costs.compute_slowdown, costs.communication_slowdown
    )
    return math.hypot(compute, min(communication, max(0.0, point - alone_s)))


def _unmeasured_overlap(workload: PreparedEvaluation) -> tuple[float, float]:
    """Seconds of the iteration with most of what overlap hides gone again, and with overlap for nothing."""
    costs = workload.costs
    # What calls beside an all-reduce are slowed by was measured, whatever was not of compute.
    free = workload.time(costs.seconds, np.ones_like(costs.seconds), costs.communication_slowdown)
    hidden_s = free.overlap_s
    if free.stage is not None:
        # Stages wait for what others lose: one stage's own is not all. Compute that stands still beside is in turn.
        stopped = np.where(costs.is_communication & (costs.seconds > 0), _STANDS_STILL, 1.0)
        in_turn_s = workload.iteration_s(costs.seconds, stopped, costs.communication_slowdown)
        hidden_s = max(hidden_s, in_turn_s - free.iteration_s)
    return free.iteration_s + WORST_OVERLAP * hidden_s, free.iteration_s


def _shifted(workload: PreparedEvaluation, costs: Costs, mode: CorrelatedError, by: float) -> float:
    return workload.iteration_s(
        np.maximum(costs.seconds + by * mode.seconds, 0.0),
        np.maximum(costs.compute_slowdown + by * mode.compute_slowdown, 1.0),
        np.maximum(costs.communication_slowdown + by * mode.communication_slowdown, 1.0),
    )


def _unexplained_s(remainder: float, workload: PreparedEvaluation) -> float:
    """What is missing from the parts, 1 - parts / iteration being the remainder."""
    if remainder >= 1:
        raise UserError(
            "the profile's closure is broken: its layers explain nothing of its iterations; measure it anew"
        )
    return remainder / (1 - remainder) * workload.costs.compute_s * workload.straggler
