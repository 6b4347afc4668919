"""Calls of collectives on this rank: made of one pool of buffers, verified, and timed."""

from __future__ import annotations

import resource
import statistics
from typing import Any

import torch

from paradl_bench.measure.collectives.request import CollectivesRequest
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.ranks.clocks import clock_for
from paradl_bench.ranks.groups.agreement import everyones, largest
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.groups.teams import Team

MOST_WARM = 12
FEW_FAULTS = 16
"""Pages of a call that are new, up to which it counts as warm."""


class Calls:
    """Calls routines within this rank's team; buffers are made once, as large as the largest needs, and reused."""

    def __init__(self, request: CollectivesRequest, context: RankContext, team: Team) -> None:
        self.context = context
        self.team = team
        self.clock = clock_for(context.device)
        inputs, outputs = request.pool_elements()
        self._pool = Buffers(torch.zeros(inputs, device=context.device), torch.zeros(outputs, device=context.device))

    def buffers(self, routine: Routine, size: int) -> Buffers:
        """This rank's buffers for a message of ``size`` bytes."""
        return routine.buffers(self._pool, size, self.team.ranks)

    def meet(self) -> None:
        """Wait for all ranks of all teams, and for what this rank's device has to do."""
        self.clock.synchronise()
        self.context.barrier()

    def stamped(self, routine: Routine, buffers: Buffers) -> tuple[Any, Any]:
        """Stamps round one call."""
        start = self.clock.stamp()
        work = routine.call(buffers, self.team.rank, self.team.ranks, self.team.process_group)
        if work is not None:
            work.wait()
        return start, self.clock.stamp()

    def seconds(self, routine: Routine, buffers: Buffers) -> float:
        """Seconds of one call on this rank, behind a barrier of all ranks."""
        self.meet()
        start, end = self.stamped(routine, buffers)
        self.clock.synchronise()
        return self.clock.seconds(start, end)

    def in_turn(self, routine: Routine, buffers: Buffers) -> float:
        """Seconds of one call on this rank, while the other teams wait for their turn."""
        seconds = 0.0
        for index in range(self.team.count):
            if index == self.team.index:
                seconds = self.seconds(routine, buffers)
            else:
                self.meet()
        return seconds

    def about(self, operation: str, size: int, block: int, members: range) -> dict[str, Any]:
        """What any record says of a team's calls."""
        return {
            "library": self.context.backend,
            "operation": operation,
            "level": self.team.level,
            "ranks": self.team.ranks,
            "message_bytes": size,
            "dtype": "fp32",
            "block": block,
            "first_rank": self.team.first_rank(members),
        }

    def warm(self, routine: Routine, buffers: Buffers, least: int) -> float:
        """Call until that needs no new memory, at least ``least`` times; median seconds of those calls on this rank.

        What a library copies lies in memory that the kernel has yet to give, page by page: a large reduce-scatter takes
        twice to five times as long until its copies have their place, which can take a dozen calls.
        """
        times: list[float] = []
        while len(times) < max(least, MOST_WARM):
            before = _page_faults()
            times.append(self.seconds(routine, buffers))
            if len(times) >= least and largest(self.context, _page_faults() - before) <= FEW_FAULTS:
                break
        return statistics.median(times)

    def verify(self, routine: Routine, buffers: Buffers) -> tuple[bool, ...]:
        """Per team, whether all of its ranks ended with what the operation promises; leaves zeros."""
        buffers.clear()
        routine.fill(buffers, self.team.rank)
        self.seconds(routine, buffers)
        right = routine.correct(buffers, self.team.rank, self.team.ranks)
        buffers.clear()
        right_on = [bool(told[0]) for told in everyones(self.context, [float(right)])]
        return tuple(all(right_on[rank] for rank in members) for members in self.team.groups)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
