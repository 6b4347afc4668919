"""The ledger of a simulated iteration: every task by itself, and what it takes beyond its price.

That is what the slowest rank is late by, what a slow rank adds, and what is lost while something else of the rank is
under way. A role waits for a mini-batch before its first task and behind its last, and for other stages or ranks in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.tasks import Role, Stream
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.strategies.passes.input_tasks import INPUT_PHASES
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats
from predict.ledger.ledger import (
    BESIDE_ALL_REDUCE,
    BESIDE_COMMUNICATION,
    SLOW_RANK,
    SLOWEST_RANK,
    WAIT_FOR_INPUT,
    WAIT_FOR_RANKS,
    WAIT_FOR_STAGES,
    LedgerEntry,
    PricedWorks,
    RoleLedger,
    most_exposed_first,
    waiting_entry,
)
from predict.simulation.exposure import StreamTimes
from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation, lines_of_stages
from predict.simulation.role_simulation import meeting_roles, role_alone
from predict.simulation.role_straggler import straggler_of_works, straggler_tasks, straggler_tasks_of
from predict.simulation.simulator import BLOCKING

_OWN_WORK = (Stream.COMPUTE, BLOCKING, Stream.COMMUNICATION, Stream.COPY)
"""Lanes by what a moment belongs to first."""
_INPUT = (Stream.COPY_ENGINE, Stream.INPUT)


class _Played(NamedTuple):
    """Tasks of a role as simulated; arrays of one length.

    Attributes:
        lane: stream, or that of calls beside what is in flight. late_s: seconds of the slowest rank's tasks.
        alone_s: the same where this rank computes slower than measured; while nothing else is under way.
    """

    name: str
    ranks: int
    role: Role
    lane: NDArray[np.integer]
    start_s: Floats
    end_s: Floats
    late_s: Floats
    alone_s: Floats


class _Span(NamedTuple):
    """Seconds from one moment to another, and what a role waits for in them."""

    begin_s: float
    end_s: float
    waits_for: str


def simulated_ledger(priced: PricedPlan, slow: SlowRank | None) -> tuple[RoleLedger, ...]:
    """What each role of a plan, priced with the slow rank, spends the iteration with."""
    pipelined = degree_of(priced.plan.strategy, Trait.STAGES) > 1
    together = _lines(priced, slow) if pipelined else _roles(priced, slow)
    iteration_s = max(_ends_s(group) for group in together)
    works = PricedWorks.of_plan(priced)
    inside = WAIT_FOR_STAGES if pipelined else WAIT_FOR_RANKS
    return tuple(
        RoleLedger(role=played.name, ranks=played.ranks, entries=_entries(played, works, spans))
        for group in together
        for spans in (_spans(group, iteration_s, inside, first_reads=pipelined),)
        for played in group
    )


def _lines(priced: PricedPlan, slow: SlowRank | None) -> list[list[_Played]]:
    """The stages of each line of a pipeline."""
    plan, costs = priced.plan, priced.costs
    simulation = PipelineSimulation.of_priced(priced, straggler_of_works(priced), merge=False)
    late, stages = straggler_tasks(priced), []
    lines = simulation.timelines(costs.seconds, costs.compute_slowdown, costs.communication_slowdown)
    for number, (roles, line) in enumerate(zip(lines_of_stages(plan), lines, strict=True)):
        borders = np.cumsum([plan.roles[index].tasks for index in roles])[:-1]
        of_stages = zip(
            roles,
            np.split(line.start_s, borders),
            np.split(line.end_s, borders),
            np.split(simulation.lines[number].task_seconds(costs.seconds), borders),
            strict=True,
        )
        stages.append(
            [
                _played(priced, index, (starts, ends), (late[index], alone), _slow(priced, index, slow))
                for index, starts, ends, alone in of_stages
            ]
        )
    return stages


def _slow(priced: PricedPlan, index: int, slow: SlowRank | None) -> SlowRank | None:
    """The slow rank where it plays the role."""
    return slow if priced.slower and priced.slower[index] > 1 else None


def _roles(priced: PricedPlan, slow: SlowRank | None) -> list[list[_Played]]:
    """Roles without stages: all together, or each by itself beside a slow rank."""
    late, roles = straggler_tasks(priced), priced.plan.roles
    if not any(by > 1 for by in priced.slower):
        together = enumerate(zip(meeting_roles(priced, late), late, strict=True))
        return [[_played(priced, index, times, (late_s, late_s)) for index, (times, late_s) in together]]
    groups = []
    for index, (role, late_s, by) in enumerate(zip(roles, late, priced.slower, strict=True)):
        others = role.multiplicity - (by > 1)
        if others:
            times = role_alone(priced, role, late_s)
            groups.append([_played(priced, index, times, (late_s, late_s))._replace(ranks=others)])
        if by > 1:
            alone_s = straggler_tasks_of(priced, role, by)
            times = role_alone(priced, role, alone_s)
            groups.append([_played(priced, index, times, (late_s, alone_s), slow)._replace(ranks=1)])
    return groups


def _played(
    priced: PricedPlan,
    index: int,
    times: tuple[Floats, Floats],
    seconds: tuple[Floats, Floats],
    slow: SlowRank | None = None,
) -> _Played:
    """The tasks of a role: when they start and end, their seconds late and alone, and of which slow rank."""
    role = priced.plan.roles[index]
    return _Played(
        role.name if slow is None else f"{role.name}, slow rank {slow.rank}",
        role.multiplicity,
        role,
        np.where(priced.blocking_tasks(role), np.int32(BLOCKING), role.stream),
        *times,
        *seconds,
    )


def _ends_s(group: Sequence[_Played]) -> float:
    return max(float(played.end_s.max(initial=0.0)) for played in group)


def _spans(group: Sequence[_Played], iteration_s: float, inside: str, *, first_reads: bool) -> tuple[_Span, ...]:
    """What roles simulated together (the first of which reads what is fetched, or all) wait for when."""
    fetches = [np.isin(played.role.phase, INPUT_PHASES) for played in group]
    ends_s, begin_s, end_s = _ends_s(group), 0.0, _ends_s(group)
    if any(fetched.any() for fetched in fetches):
        reading = group[:1] if first_reads else group
        begin_s = min(float(played.start_s[~fetched].min()) for played, fetched in zip(reading, fetches, strict=False))
        end_s = max(float(played.end_s[~fetched].max()) for played, fetched in zip(group, fetches, strict=True))
    return (
        _Span(0.0, begin_s, WAIT_FOR_INPUT),
        _Span(begin_s, end_s, inside),
        _Span(end_s, ends_s, WAIT_FOR_INPUT),
        _Span(ends_s, iteration_s, WAIT_FOR_RANKS),
    )


def _entries(played: _Played, works: PricedWorks, spans: Sequence[_Span]) -> tuple[LedgerEntry, ...]:
    """All entries of a role, the most exposed first."""
    exposed_s, busy = _exposed(played, spans)
    role, lost_s = played.role, played.end_s - played.start_s - played.alone_s
    added_s = {
        SLOWEST_RANK: played.late_s - works.costs.seconds[role.work],
        SLOW_RANK: played.alone_s - played.late_s,
        BESIDE_COMMUNICATION: np.where(played.lane == Stream.COMPUTE, lost_s, 0.0),
        BESIDE_ALL_REDUCE: np.where(played.lane == BLOCKING, lost_s, 0.0),
        "beside compute": np.where(np.isin(played.lane, (Stream.COMPUTE, BLOCKING)), 0.0, lost_s),
    }
    of_tasks = works.entries_of_tasks(role.work, role.phase, exposed_s, added_s)
    return most_exposed_first([*of_tasks, *_waits(busy, spans)])


def _exposed(played: _Played, spans: Sequence[_Span]) -> tuple[Floats, StreamTimes]:
    """Per task the seconds that belong to it, and when any moment belongs to one."""
    start_s, end_s, exposed = played.start_s, played.end_s, np.zeros(len(played.start_s))

    def claim(lanes: Sequence[int], busy: StreamTimes) -> StreamTimes:
        for lane in lanes:
            tasks = np.flatnonzero(played.lane == lane)
            taken = busy.busy_until(end_s[tasks]) - busy.busy_until(start_s[tasks])
            exposed[tasks] = end_s[tasks] - start_s[tasks] - taken
            busy = _union(busy, StreamTimes(start_s[tasks], end_s[tasks]))
        return busy

    busy = claim(_OWN_WORK, StreamTimes(np.zeros(0), np.zeros(0)))
    begin_s, ends_s = spans[1].begin_s, spans[1].end_s
    between = StreamTimes(np.array([begin_s]), np.array([ends_s]))
    fetching = claim(_INPUT, _union(busy, between))
    # Of fetching the moments outside alone.
    before = StreamTimes(np.minimum(fetching.start_s, begin_s), np.minimum(fetching.end_s, begin_s))
    behind = StreamTimes(np.maximum(fetching.start_s, ends_s), np.maximum(fetching.end_s, ends_s))
    return exposed, _union(_union(busy, before), behind)


def _union(one: StreamTimes, other: StreamTimes) -> StreamTimes:
    start_s, end_s = (np.concatenate(pair) for pair in zip(one, other, strict=True))
    return StreamTimes.union(start_s, end_s)


def _waits(busy: StreamTimes, spans: Sequence[_Span]) -> list[LedgerEntry]:
    """What belongs to no task."""
    iteration_s = spans[-1].end_s
    starts, ends = np.append(0.0, busy.end_s), np.append(busy.start_s, iteration_s)
    waited: dict[str, tuple[float, int]] = {}
    for begin_s, end_s, waits_for in spans:
        seconds = np.maximum(np.minimum(ends, end_s) - np.maximum(starts, begin_s), 0.0)
        total_s, count = waited.get(waits_for, (0.0, 0))
        waited[waits_for] = total_s + float(seconds.sum()), count + int((seconds > 1e-12 * iteration_s).sum())
    return [waiting_entry(name, seconds, count) for name, (seconds, count) in waited.items() if count]
