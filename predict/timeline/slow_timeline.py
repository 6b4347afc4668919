"""The ranks beside a slow one, task by task: each computes at its own pace and waits for it in every collective.

A collective of theirs starts and ends when that of the slow rank does, the n-th with the n-th. Between, tasks run as in
:mod:`predict.simulation.simulator`. No task of a rank of the same role ends later than the slow rank's, so none is late
for a collective; where blocks differ, :func:`comes_late` looks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.plan.tasks import Plan, Role, Stream
from paradl_bench.records.slow_rank import SlowRank
from predict.costs.sourced import Floats
from predict.simulation.exposure import StreamTimes


def check_drawn(plan: Plan, slow: SlowRank) -> None:
    """Refuse strategies in which some ranks meet a slow one in some collectives, and others in others.

    Raises:
        UserError: says which can be drawn.
    """
    axes = [axis for axis in plan.strategy.axes if axis.degree > 1]
    if len(axes) > 1:
        raise UserError(
            f"a timeline with --slow-rank takes one kind of parallelism, as d4, f4 or p4, not {plan.strategy},"
            f" whose groups meet rank {slow.rank} in different collectives. predict --slow-rank gives its"
            " iteration time"
        )


def collectives_of(plan: Plan, role: Role) -> NDArray[np.integer]:
    """Tasks of a role in which ranks meet."""
    meets = np.array([work.meets for work in plan.works], bool)
    return np.flatnonzero((role.stream == Stream.COMMUNICATION) & meets[role.work])


def waiting_times(plan: Plan, role: Role, seconds: Floats, compute_slowdown: Floats, slow: StreamTimes) -> StreamTimes:
    """When a role's tasks start and end on a rank that waits for the slow one.

    Args:
        seconds: per task, as a rank in the middle takes. compute_slowdown: per task.
        slow: start and end of each collective on the slow rank, as many as the role has.
    """
    met = collectives_of(plan, role)
    # Calls that compute waits for may lie beside others; they slow nothing, and it needs spans one after the other.
    slows = compute_slowdown[met] > 1
    worked = _Progress(StreamTimes(slow.start_s[slows], slow.end_s[slows]), compute_slowdown[met][slows])
    start, end = np.zeros(role.tasks), np.zeros(role.tasks)
    start[met], end[met] = slow
    meets = np.zeros(role.tasks, bool)
    meets[met] = True
    free = [0.0] * len(Stream)
    rows, blocking, streams = role.dependency_start.tolist(), role.dependencies, role.stream.tolist()
    for task in range(role.tasks):
        stream = streams[task]
        if not meets[task]:
            begin = max(free[stream], float(end[blocking[rows[task] : rows[task + 1]]].max(initial=0.0)))
            lasting = float(seconds[task])
            start[task] = begin
            end[task] = worked.after(begin, lasting) if stream == Stream.COMPUTE else begin + lasting
        free[stream] = float(end[task])
    return StreamTimes(start, end)


def comes_late(plan: Plan, role: Role, times: StreamTimes) -> bool:
    """Whether a role would come to a collective after that had begun: it has more to do than the slow rank."""
    for task in collectives_of(plan, role).tolist():
        blocking = role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]]
        if float(times.end_s[blocking].max(initial=0.0)) > times.start_s[task] * (1 + 1e-9):
            return True
    return False


class _Progress:
    """How far compute gets by when, if it never stops: more slowly while a collective is under way."""

    def __init__(self, collectives: StreamTimes, slowdown: Floats) -> None:
        lasting = collectives.end_s - collectives.start_s
        idle = collectives.start_s - np.concatenate([[0.0], collectives.end_s[:-1]])
        steps = np.column_stack([idle, lasting / slowdown]).ravel()
        self._moments = np.concatenate([[0.0], np.column_stack(collectives).ravel()])
        self._done = np.concatenate([[0.0], np.cumsum(steps)])

    def after(self, begin_s: float, seconds: float) -> float:
        """When compute of so many seconds ends that begins then."""
        done = self._at(begin_s, self._moments, self._done) + seconds
        return self._at(done, self._done, self._moments)

    @staticmethod
    def _at(value: float, along: Floats, of: Floats) -> float:
        # Behind the last collective nothing slows compute.
        return float(np.interp(value, along, of)) + max(0.0, value - float(along[-1]))
