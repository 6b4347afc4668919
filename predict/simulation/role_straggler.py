"""What waiting for the last rank adds to a role's compute, task by task.

A rank that waits for a collective is level with its group up to where it called it: what it computed before that counts
no more, what it computed since still does. One that is over before compute comes to wait for it levels nobody. A
collective along outer axes levels all ranks that the axes inside span, so it adds wait(outer) - wait(inner) over what
was computed since the last outer one. What the last stretch was late by goes on in the next iteration.

A run of compute tasks is late by what its end is late by, less what its beginning was; so the simulation of the slowest
rank has each collective start when the last rank is expected to arrive.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Communication, Plan, Role, Sort, Stream
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats
from predict.costs.spread.stragglers import RankSpread
from predict.simulation.simulator import simulate, task_graph


class _Meeting(NamedTuple):
    """Where groups of one size are level: after how many compute tasks, per task and at the end; or -1."""

    ranks: int
    since: NDArray[np.integer]
    at_end: int


class RoleStraggler:
    """Seconds of a role's tasks with what the last rank is late, for any seconds of its tasks.

    Args:
        own_relative_sd: per work of the plan, how an event spreads by itself.
        end_s: per task of the role, when it ends where nobody is late.
        slower: how many times longer the simulated rank computes, and, with ``slow_copies``, copies.
    """

    def __init__(
        self,
        plan: Plan,
        role: Role,
        spread: RankSpread,
        own_relative_sd: Floats,
        end_s: Floats,
        *,
        slower: float = 1.0,
        slow_copies: bool = True,
    ) -> None:
        self._slower = slower
        self._computing = np.flatnonzero(role.stream == Stream.COMPUTE)
        stretched = slower != 1.0 and slow_copies
        copies = plan.of_sort(Sort.COPY)[role.work]
        beside = (role.stream != Stream.COMPUTE) & copies & stretched
        self._copying = np.flatnonzero(beside)
        self._longer = np.full(len(self._computing), slower)
        if slower != 1.0 and not slow_copies:
            self._longer[copies[self._computing]] = 1.0
        self._own = math.sqrt(spread.own_weight) * own_relative_sd[role.work[self._computing]]
        self._tied = spread.common_variance
        meetings = _meetings(plan, role, self._computing, end_s) if spread.wait(plan.strategy.ranks, slower) else []
        waits = np.diff([0.0, *(spread.wait(meeting.ranks, slower) for meeting in meetings)])
        self._meetings = list(zip(waits.tolist(), meetings, strict=True))

    def of_tasks(self, seconds: Floats) -> Floats:
        """Seconds of the role's tasks, late ones included, from those of a rank in the middle: one row or several."""
        if not self._meetings and self._slower == 1.0:
            return seconds
        computed = seconds.take(self._computing, axis=-1)
        done, squares = _sums_before(computed), _sums_before((computed * self._own) ** 2)
        late = np.zeros(computed.shape)
        for wait, meeting in self._meetings:
            late += wait * self._late_by(done, squares, meeting)
        stretched = seconds.copy()
        stretched[..., self._computing] = self._longer * computed + late
        stretched[..., self._copying] *= self._slower
        return stretched

    def _late_by(self, done: Floats, squares: Floats, meeting: _Meeting) -> Floats:
        """What each task adds to the lateness since the last meeting, over wait(p)."""

        def since(ends: Floats, sums: Floats) -> Floats:
            # What an iteration begins with goes on from where the one before was last level.
            carried = np.where(meeting.since < 0, sums[..., -1:] - sums[..., meeting.at_end, None], 0.0)
            return np.asarray(ends - sums.take(np.maximum(meeting.since, 0), axis=-1) + carried)

        after = self._tied * since(done[..., 1:], done) ** 2 + since(squares[..., 1:], squares)
        before = self._tied * since(done[..., :-1], done) ** 2 + since(squares[..., :-1], squares)
        # Differences of sums may come out a rounding below nothing.
        return np.asarray(np.sqrt(np.maximum(after, 0.0)) - np.sqrt(np.maximum(before, 0.0)))


def _sums_before(values: Floats) -> Floats:
    """The sums of none, the first, the first two, ... of the values, in each row."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def ranks_level(strategy: Strategy, axes: tuple[int, ...]) -> int:
    """Ranks that a collective along axes levels: those that its axes and the axes inside span, stages apart."""
    return math.prod(axis.degree for axis in strategy.axes[min(axes) :] if not axis.has(Trait.STAGES))


def _meetings(plan: Plan, role: Role, computing: NDArray[np.integer], end_s: Floats) -> list[_Meeting]:
    """By size of group, the smallest first."""
    place = np.full(role.tasks, -1)
    place[computing] = np.arange(len(computing))
    called = _called_after(role, place)
    begins: dict[int, NDArray[np.integer]] = {}
    ends: dict[int, int] = {}
    blocking = dict.fromkeys(np.flatnonzero(role.stream == Stream.COMMUNICATION).tolist(), -1)
    for task, source in zip(*_waits_for_communication(role), strict=True):
        blocking[source] = place[task] if blocking[source] < 0 else min(blocking[source], place[task])
    for source, by in blocking.items():
        work = plan.works[role.work[source]]
        if not (isinstance(work, Communication) and work.meets):
            continue
        size = ranks_level(plan.strategy, work.axes)
        if size not in begins:
            begins[size] = np.full(len(computing), -1)
        row = begins[size]
        if by > 0 and end_s[source] < end_s[computing[by - 1]]:
            continue
        if by >= 0:
            row[by] = max(row[by], called[source])
        else:
            # Nothing waits for it in this iteration, so the next one does.
            ends[size] = max(ends.get(size, 0), called[source])
    sizes = sorted(size for size in begins if size > 1)
    by_size = []
    for size in sizes:
        # Those who are level with a larger group are level with the smaller ones inside it.
        wider = [other for other in sizes if other >= size]
        since = np.maximum.accumulate(np.max([begins[other] for other in wider], axis=0))
        at_end = max(0, int(since[-1]), *(ends.get(other, 0) for other in wider))
        by_size.append(_Meeting(size, since, at_end))
    return by_size


def _called_after(role: Role, place: NDArray[np.integer]) -> list[int]:
    """Per task, how many compute tasks are done at the latest when it starts, as its own dependencies tell."""
    computed = [0] * role.tasks
    last = [0] * len(Stream)
    starts, blocking = role.dependency_start.tolist(), role.dependencies.tolist()
    streams, places = role.stream.tolist(), place.tolist()
    for task, stream in enumerate(streams):
        if stream == Stream.COMPUTE:
            computed[task] = places[task] + 1
            continue
        waited_for = (computed[other] for other in blocking[starts[task] : starts[task + 1]])
        computed[task] = last[stream] = max(last[stream], *waited_for, 0)
    return computed


def _waits_for_communication(role: Role) -> tuple[list[int], list[int]]:
    """(compute task, communication that it waits for)."""
    task = np.repeat(np.arange(role.tasks), np.diff(role.dependency_start))
    chosen = (role.stream[task] == Stream.COMPUTE) & (role.stream[role.dependencies] == Stream.COMMUNICATION)
    return task[chosen].tolist(), role.dependencies[chosen].tolist()


def straggler_tasks(priced: PricedPlan) -> list[Floats]:
    """Per role, seconds of its tasks as the last rank is expected to take for them."""
    plan, seconds = priced.plan, priced.costs.seconds
    if degree_of(plan.strategy, Trait.STAGES) > 1:
        late = seconds * straggler_of_works(priced)
        return [late[role.work] for role in plan.roles]
    return [straggler_tasks_of(priced, role) for role in plan.roles]


def straggler_tasks_of(priced: PricedPlan, role: Role, slower: float = 1.0) -> Floats:
    """Seconds of a role's tasks as the last rank is expected to take for them, which is so many times slower or not."""
    return role_straggler(priced, role, slower).of_tasks(priced.costs.seconds[role.work])


def straggler_of(priced: PricedPlan) -> Floats:
    """Per work, how much longer the slowest rank takes, in the mean over the tasks of all roles."""
    plan = priced.plan
    late, alone = np.zeros(len(plan.works)), np.zeros(len(plan.works))
    for role, seconds in zip(plan.roles, straggler_tasks(priced), strict=True):
        late += np.bincount(role.work, weights=seconds, minlength=len(late))
        alone += np.bincount(role.work, weights=priced.costs.seconds[role.work], minlength=len(late))
    return np.divide(late, alone, out=np.ones(len(late)), where=alone > 0)


def straggler_of_works(priced: PricedPlan) -> Floats:
    """Of a pipeline, per work: what computes is late."""
    punctual = priced.costs.is_communication | priced.plan.of_sort(Sort.INPUT)
    return np.where(punctual, 1.0, priced.straggler)


def role_straggler(priced: PricedPlan, role: Role, slower: float = 1.0) -> RoleStraggler:
    """What the last rank of a role is late by, where its tasks end as they do when nobody is."""
    plan, spread, costs = priced.plan, priced.rank_spread, priced.costs
    end_s = np.zeros(role.tasks)
    if spread.wait(plan.strategy.ranks, slower):
        of_works = costs.seconds, costs.compute_slowdown, costs.communication_slowdown
        graph = task_graph(role, blocking=priced.blocking_tasks(role))
        end_s = simulate(graph, *(of_work[role.work] for of_work in of_works)).end_s
    copies = priced.slow_copies
    return RoleStraggler(plan, role, spread, priced.own_relative_sd, end_s, slower=slower, slow_copies=copies)
