"""Simulation of a pipeline: all of its roles together, since a stage waits for what its neighbours send.

A receive ends when the matching send does; a send takes the time of its messages (alpha + m beta each) on the sender's
communication stream, beside compute. ParaDL's closed form assumes otherwise: stages run in lock-step and nothing is
computed while a transfer is under way. ``overlapped=False`` puts in the second assumption; with equal stages both then
agree.

Replicas of a stage are one role: what slows the slowest of them is in the lag, as without a pipeline.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from paradl_bench.spec.plan import Phase, Plan, Role, Stream, Transfer
from predict.costs import Floats
from predict.simulator import Timeline, condense, couple, simulate
from predict.workload import Timing


class PipelineSimulation:
    """The roles of a pipeline's plan, condensed and joined once, to be run under many costs of their works.

    Args:
        lag: per work, how much longer the slowest rank takes.
        overlapped: false lets a rank compute nothing while it sends.
    """

    def __init__(self, plan: Plan, lag: Floats, *, overlapped: bool = True) -> None:
        roles = [role if overlapped else _with_blocking_sends(plan, role) for role in plan.roles]
        ends = [_ends_of_transfers(plan, role) for role in roles]
        condensed = [
            condense(role, alone={task for tasks in own.values() for task in tasks})
            for role, own in zip(roles, ends, strict=True)
        ]
        sends = {
            key[1:]: [(index, int(condensed[index].segment[task])) for task in tasks]
            for index, own in enumerate(ends)
            for key, tasks in own.items()
            if key[0] == "send"
        }
        edges = [
            (sent, (index, int(condensed[index].segment[task])))
            for index, own in enumerate(ends)
            for key, tasks in own.items()
            if key[0] == "receive"
            for sent, task in zip(sends[key[1:]], tasks, strict=True)
        ]
        self._graph = couple([each.graph for each in condensed], edges)
        self._condensed = condensed
        self._work = [role.work for role in roles]
        self._lag = [lag[role.work] for role in roles]
        first = [np.unique(each.segment, return_index=True)[1] for each in condensed]
        self._segment_work = np.concatenate([role.work[tasks] for role, tasks in zip(roles, first, strict=True)])
        self._role = np.repeat(np.arange(len(roles)), [len(tasks) for tasks in first])
        self._phase = np.concatenate([each.phase for each in condensed])
        self._on_compute = (
            np.concatenate([r.stream[tasks] for r, tasks in zip(roles, first, strict=True)]) == Stream.COMPUTE
        )

    def run(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timeline:
        """The timeline of all roles' segments under costs per work."""
        of_segments = [
            each.sum_seconds(seconds[work] * lag)
            for each, work, lag in zip(self._condensed, self._work, self._lag, strict=True)
        ]
        return simulate(
            self._graph,
            np.concatenate(of_segments),
            compute_slowdown[self._segment_work],
            communication_slowdown[self._segment_work],
        )

    def timing(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timing:
        """Phases of the rank that ends last: forward, backward and exchange as it was busy with them, then idle time.

        ``bw_s`` and ``ge_s`` follow the last forward in no fixed order: what a rank waits for is ``idle_s``.
        """
        line = self.run(seconds, compute_slowdown, communication_slowdown)
        own = self._role == self._role[int(np.argmax(line.end_s))]
        busy = line.end_s - line.start_s

        def computed(phase: Phase) -> float:
            return float(busy[own & self._on_compute & (self._phase == phase)].sum())

        forward, backward, update = computed(Phase.FW), computed(Phase.BW), computed(Phase.WU)
        exchange = self._exposed_exchange(line, own) + computed(Phase.GE)
        return Timing(
            fw_s=forward,
            bw_s=backward,
            ge_s=exchange,
            wu_s=update,
            exposed_communication_s=line.exposed_communication_s,
            overlap_s=line.overlap_s,
            idle_s=line.iteration_s - forward - backward - exchange - update,
        )

    def _exposed_exchange(self, line: Timeline, own: NDArray[np.bool_]) -> float:
        """Exchange after the last backward, less the copies out of buckets, which compute."""
        exchanging = own & ~self._on_compute & (self._phase == Phase.GE)
        if not exchanging.any():
            return 0.0
        last = line.end_s[own & self._on_compute & (self._phase == Phase.BW)].max()
        after = line.end_s[exchanging].max()
        copying = own & self._on_compute & (self._phase == Phase.GE) & (line.start_s >= last) & (line.end_s <= after)
        return max(0.0, float(after - last - (line.end_s - line.start_s)[copying].sum()))

    def iteration_s(self, *costs: Floats) -> float:
        """When the last role ends."""
        return self.run(*costs).iteration_s


def _with_blocking_sends(plan: Plan, role: Role) -> Role:
    sends = np.array([_is(plan, work, "send") for work in role.work])
    return dataclasses.replace(role, stream=np.where(sends, np.int32(Stream.COMPUTE), role.stream).astype(np.int32))


def _is(plan: Plan, work: int, direction: str) -> bool:
    found = plan.works[work]
    return isinstance(found, Transfer) and found.direction == direction


def _ends_of_transfers(plan: Plan, role: Role) -> dict[tuple[str, str, int], list[int]]:
    """Tasks of a role that send and receive, in order, by (direction, phase, cut)."""
    found: dict[tuple[str, str, int], list[int]] = {}
    for task, work in enumerate(role.work.tolist()):
        transfer = plan.works[work]
        if isinstance(transfer, Transfer):
            found.setdefault((transfer.direction, transfer.phase, transfer.cut), []).append(task)
    return found
