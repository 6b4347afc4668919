"""The simulator's event loop in Python: what ``engine_compiled`` does, where that was not built.

When the task on a lane ends is known as soon as it starts, and changes only where another lane of the same role, which
it is slowed beside, starts or ends a task. So an event costs the depth of a heap, however many roles there are.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from paradl_bench.plan.tasks import Ints
from predict.costs.sourced import Floats

INTERFACE = 3
"""Of :func:`run_events` and what it does; a compiled loop of another number is left alone, as one that was built before
a change. To be raised in both with whatever changes it."""

_IDLE = -1


@dataclass(slots=True)
class _Lane:
    """A stream of a role.

    Attributes:
        next, stop: what is left of its queue.
        task: under way, or idle. left_s: seconds alone that were left of it at ``since_s``.
        stretch: how many times longer it takes now. ends_s: when it ends if nothing changes.
    """

    role: int
    next: int
    stop: int
    task: int = _IDLE
    left_s: float = 0.0
    since_s: float = 0.0
    stretch: float = 1.0
    ends_s: float = 0.0


def run_events(
    lane_start: Ints,
    queue: Ints,
    waits_for: Ints,
    follower_start: Ints,
    followers: Ints,
    seconds: Floats,
    compute_slowdown: Floats,
    communication_slowdown: Floats,
    start_s: Floats,
    end_s: Floats,
    overlap_s: Floats,
    exposed_s: Floats,
    rows: int,
    lanes_per_role: int,
    compute: int,
    communication: int,
    blocking: int,
) -> int:
    """Run a graph's tasks (:class:`predict.simulation.simulator.TaskGraph`), and write when; how many of them ended.

    They run under each row of costs by itself. Fewer than all end where they wait for each other in a circle.

    Args:
        seconds, compute_slowdown, communication_slowdown: per row and task; one row of an array is for all.
        start_s, end_s: written, per row and task. overlap_s, exposed_s: written, per row and role.
        rows: how many.
        lanes_per_role, compute, communication: how many lanes a role has, and which two slow each other. blocking: the
            one whose tasks are slowed beside those of ``communication`` by their own ``communication_slowdown``.
    """
    lanes = compute, communication, blocking
    results = [written.reshape(rows, -1) for written in (start_s, end_s, overlap_s, exposed_s)]
    costs = [np.atleast_2d(of_tasks) for of_tasks in (seconds, compute_slowdown, communication_slowdown)]
    finished = 0
    for row in range(rows):
        of_row = [of_tasks[min(row, len(of_tasks) - 1)].tolist() for of_tasks in costs]
        run = _Run(lane_start, queue, waits_for, follower_start, followers, lanes_per_role, lanes, of_row)
        finished += run.to_the_end()
        for written, found in zip(results, (run.start, run.end, run.overlap, run.exposed), strict=True):
            written[row] = found
    return finished


class _Run:
    """What is active on every lane, and what is left of it."""

    def __init__(
        self,
        lane_start: Ints,
        queue: Ints,
        waits_for: Ints,
        follower_start: Ints,
        followers: Ints,
        lanes_per_role: int,
        slowed: tuple[int, int, int],
        costs: list[list[float]],
    ) -> None:
        self._seconds, self._slow_compute, self._slow_communication = costs
        self._queue, self._waits_for = queue.tolist(), waits_for.tolist()
        self._follower_start, self._followers = follower_start.tolist(), followers.tolist()
        bounds = lane_start.tolist()
        self._lanes = [
            _Lane(index // lanes_per_role, *bounds[index : index + 2]) for index in range(len(lane_start) - 1)
        ]
        self._lane_of = {task: i for i, lane in enumerate(self._lanes) for task in self._queue[lane.next : lane.stop]}
        starts = range(0, len(self._lanes) // lanes_per_role * lanes_per_role, lanes_per_role)
        self._slowed = [(start + slowed[0], start + slowed[1], start + slowed[2]) for start in starts]
        self.start, self.end = [0.0] * len(self._queue), [0.0] * len(self._queue)
        self.overlap, self.exposed = [0.0] * len(self._slowed), [0.0] * len(self._slowed)
        self._counted_s = [0.0] * len(self._slowed)
        # When lanes end; an entry that is no longer true stays until it comes up.
        self._ends: list[tuple[float, int]] = []
        self._now = 0.0

    def to_the_end(self) -> int:
        """Until nothing is active; returns how many tasks ended."""
        finished = 0
        for index, lane in enumerate(self._lanes):
            if self._start_next(index):
                self._set_rates(lane.role)
        while self._ends:
            ends, index = heapq.heappop(self._ends)
            if self._lanes[index].task != _IDLE and self._lanes[index].ends_s == ends:
                self._finish(index)
                finished += 1
        return finished

    def _finish(self, index: int) -> None:
        lane = self._lanes[index]
        task, self._now = lane.task, lane.ends_s
        self._count_beside(lane.role)
        self.end[task] = self._now
        lane.task = _IDLE
        self._start_next(index)
        self._set_rates(lane.role)
        for follower in self._followers[self._follower_start[task] : self._follower_start[task + 1]]:
            self._waits_for[follower] -= 1
            if not self._waits_for[follower] and self._start_next(self._lane_of[follower]):
                self._set_rates(self._lanes[self._lane_of[follower]].role)

    def _start_next(self, index: int) -> bool:
        """Start the next task of an idle lane if nothing holds it back; whether it did."""
        lane = self._lanes[index]
        if lane.task != _IDLE or lane.next >= lane.stop:
            return False
        task = self._queue[lane.next]
        if self._waits_for[task]:
            return False
        self._count_beside(lane.role)
        lane.next += 1
        lane.task, lane.left_s, lane.since_s, lane.stretch = task, self._seconds[task], self._now, 1.0
        lane.ends_s = self._now + lane.left_s
        self.start[task] = self._now
        heapq.heappush(self._ends, (lane.ends_s, index))
        return True

    def _set_rates(self, role: int) -> None:
        compute, other, blocking = self._slowed[role]
        beside, call = self._lanes[other].task, self._lanes[blocking].task
        if call != _IDLE:
            self._stretch_to(blocking, 1.0 if beside == _IDLE else self._slow_communication[call])
        if beside != _IDLE and self._lanes[compute].task != _IDLE:
            self._stretch_to(compute, self._slow_compute[beside])
            self._stretch_to(other, self._slow_communication[beside])
        else:
            self._stretch_to(compute, 1.0)
            self._stretch_to(other, 1.0)

    def _stretch_to(self, index: int, stretch: float) -> None:
        lane = self._lanes[index]
        if lane.task == _IDLE or lane.stretch == stretch:
            return
        lane.left_s = max(0.0, lane.left_s - (self._now - lane.since_s) / lane.stretch)
        lane.since_s, lane.stretch = self._now, stretch
        lane.ends_s = self._now + lane.left_s * stretch
        heapq.heappush(self._ends, (lane.ends_s, index))

    def _count_beside(self, role: int) -> None:
        """Count the time since the role's lanes last changed, before they change again."""
        compute, other, blocking = self._slowed[role]
        if self._lanes[other].task != _IDLE or self._lanes[blocking].task != _IDLE:
            beside = self.exposed if self._lanes[compute].task == _IDLE else self.overlap
            beside[role] += self._now - self._counted_s[role]
        self._counted_s[role] = self._now
