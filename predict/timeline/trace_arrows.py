"""Arrows of a trace (flow events): to a collective from what it waited for, and along messages between stages.

An end of an arrow belongs to the task that is under way on its thread at that moment, so arrows leave a task right
before its end. Tasks too short to be under way at any moment are passed over for the one before, or behind, them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.tasks import Phase, Role, Stream
from predict.costs.sourced import Floats, Ints
from predict.timeline.timeline import LineTimeline, RoleTimeline
from predict.timeline.trace_works import WorkDescriptions

NANOSECONDS = 1e9
STAMP_NS = 1000
"""Nanoseconds of the microsecond that stamps are written in."""
_THREADS_A_RANK = 10
_BEFORE_END_NS = 500
"""How long before a task's end an arrow leaves it at most."""


class Process(NamedTuple):
    """A rank that is shown, and its role's times."""

    rank: int
    name: str
    role: RoleTimeline


class Stamps(NamedTuple):
    """Start and end of tasks in whole nanoseconds, which is what viewers count in.

    They round a start and a length each by itself, and Perfetto takes what then seems to overlap off its lane.
    """

    start: Ints
    end: Ints


def stamps_of(role: RoleTimeline) -> Stamps:
    """When a role's tasks start and end."""
    start, end = (np.rint(times_s * NANOSECONDS).astype(np.int64) for times_s in (role.start_s, role.end_s))
    return Stamps(start, np.maximum(start, end))


def thread_number(rank: int, stream: int) -> int:
    """Number of a rank's thread; no two ranks share one, since some viewers would take them for one thread."""
    return rank * _THREADS_A_RANK + stream + 1


class _Start(msgspec.Struct, tag_field="ph", tag="s"):
    name: str
    cat: str
    id: int
    pid: int
    tid: int
    ts: float


class _Step(_Start, tag_field="ph", tag="t"):
    pass


class _End(_Start, tag_field="ph", tag="f"):
    # Bound to the event that holds this moment, not to the next one.
    bp: str = "e"


class _Tasks:
    """Where arrows may leave and reach a rank's tasks.

    Attributes:
        seen: per task, whether it lasts long enough.
        blocking: per task, of what it waits for on other streams the one that ended last; the one before that on its
            stream where it is not seen; -1 where there is none.
        following: per task of the compute stream, itself or the next one on it that is seen; -1 where there is none.
    """

    def __init__(self, process: Process) -> None:
        role, plan = process.role, process.role.of_plan
        stamps = stamps_of(role)
        long_enough = stamps.end > stamps.start
        blocking = _blocking_last(plan, role.end_s)
        before = _last_seen(plan, long_enough)
        self.seen: list[bool] = long_enough.tolist()
        self.blocking: list[int] = np.where(blocking >= 0, before[blocking], -1).tolist()
        self.following: list[int] = _next_seen(plan, long_enough).tolist()
        self._rank = process.rank
        self._thread = [thread_number(process.rank, stream) for stream in process.role.threads.tolist()]
        before_end = np.clip((stamps.end - stamps.start) // 2, 1, _BEFORE_END_NS)
        self._leaving_us: list[float] = ((stamps.end - before_end) / STAMP_NS).tolist()
        self._arriving_us: list[float] = (stamps.start / STAMP_NS).tolist()

    def leaving(self, task: int) -> tuple[int, int, float]:
        """Process, thread and moment at which an arrow leaves a task."""
        return self._rank, self._thread[task], self._leaving_us[task]

    def arriving(self, task: int) -> tuple[int, int, float]:
        """Likewise where it arrives: at the task's start."""
        return self._rank, self._thread[task], self._arriving_us[task]


def _blocking_last(plan: Role, end_s: Floats) -> Ints:
    waiting = np.repeat(np.arange(plan.tasks), np.diff(plan.dependency_start))
    elsewhere = plan.stream[plan.dependencies] != plan.stream[waiting]
    waiting, blocking = waiting[elsewhere], plan.dependencies[elsewhere]
    order = np.lexsort((end_s[blocking], waiting))
    last = np.full(plan.tasks, -1, np.int64)
    # The last assignment of a task counts, and that is what ended last.
    last[waiting[order]] = blocking[order]
    return last


def _last_seen(plan: Role, seen: NDArray[np.bool_]) -> Ints:
    """Per task, itself or the last one before it on its stream that is seen; -1 where none is."""
    last = np.where(seen, np.arange(plan.tasks), -1)
    for stream in Stream:
        on_stream = plan.stream == stream
        last[on_stream] = np.maximum.accumulate(last[on_stream])
    return last


def _next_seen(plan: Role, seen: NDArray[np.bool_]) -> Ints:
    computing = np.flatnonzero(plan.stream == Stream.COMPUTE)
    chosen = computing[seen[computing]]
    following = np.full(plan.tasks, -1, np.int64)
    place = np.searchsorted(chosen, computing)
    following[computing[place < len(chosen)]] = chosen[place[place < len(chosen)]]
    return following


def arrows_of_collectives(
    line: Sequence[Process], described: WorkDescriptions, numbers: Iterator[int]
) -> Iterator[msgspec.Struct]:
    """From what a collective or halo exchange waited for to itself."""
    for process in line:
        plan = process.role.of_plan
        collective = (plan.stream == Stream.COMMUNICATION) & ~described.is_transfer[plan.work]
        if not collective.any():
            continue
        tasks = _Tasks(process)
        for task in np.flatnonzero(collective).tolist():
            source = tasks.blocking[task]
            if source < 0 or not tasks.seen[task]:
                continue
            number, category = next(numbers), described.named(int(plan.work[task]), int(plan.phase[task]))[1]
            yield _Start("waits for", category, number, *tasks.leaving(source))
            yield _End("waits for", category, number, *tasks.arriving(task))


def arrows_of_messages(
    line: Sequence[Process], simulated: LineTimeline, numbers: Iterator[int]
) -> Iterator[msgspec.Struct]:
    """From what a stage computed over its message to what the receiving stage computes next."""
    if not simulated.messages:
        return
    stages = [_Tasks(process) for process in line]
    forward = [(process.role.of_plan.phase == Phase.FW).tolist() for process in line]
    for (sender, send), (receiver, receive) in simulated.messages:
        source, target = stages[sender], stages[receiver]
        made, used = source.blocking[send], target.following[receive]
        stops = [source.leaving(task) for task, shown in ((made, made >= 0), (send, source.seen[send])) if shown]
        if not stops or used < 0:
            continue
        name, number = "activations" if forward[sender][send] else "gradients", next(numbers)
        yield _Start(name, "transfer", number, *stops[0])
        for stop in stops[1:]:
            yield _Step(name, "transfer", number, *stop)
        yield _End(name, "transfer", number, *target.arriving(used))
