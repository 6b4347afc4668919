"""Where ranks run, and how far the clocks of their hosts are apart, at the beginning, in between and at the end.

The offset of a host's clock is measured as NTP does (Mills, RFC 5905, section 8): a message goes there and back, and
the stamp in the middle belongs halfway between those at the ends; of many round trips the shortest is believed, since
what delays a message delays one way more than the other.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from paradl_bench.ranks.clocks import CpuClock
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.emulated_nodes.cluster import nodes_of_rank
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.rank_place import NO_BACKEND, node_name
from paradl_bench.records.hosts.host_record import HOSTS_FILE, RankHost

ROUND_TRIPS = 40


class HostNotes:
    """Every rank's host, and its clock as often as asked, in an attempt at a measurement; a collective.

    Attributes:
        places: of every rank, as at the beginning of this attempt.
        speaking: the first rank of each host.
    """

    def __init__(self, context: RankContext, directory: MeasurementDirectory | None) -> None:
        self._context, self._directory = context, directory
        before = [] if directory is None else directory.records(HOSTS_FILE, RankHost)
        self.attempt: int = context.share(1 + max((record.attempt for record in before), default=0), int)
        self.places = hosts_of_ranks(context, attempt=self.attempt)
        self._append(self.places)
        self.speaking = frozenset({record.host: record.rank for record in reversed(self.places)}.values())

    def again(self) -> None:
        """Measure the clocks of several hosts once more; a collective. On one host there is nothing to measure."""
        if len(self.speaking) > 1:
            records = hosts_of_ranks(self._context, attempt=self.attempt)
            self._append(tuple(record for record in records if record.rank in self.speaking))

    def _append(self, records: tuple[RankHost, ...]) -> None:
        if self._directory is not None:
            self._directory.append(HOSTS_FILE, records)


class _Offsets(NamedTuple):
    """Of a host's clocks: monotonic and calendar seconds ahead of rank 0's, the error of both, rank 0's time."""

    monotonic_s: float = 0.0
    wall_s: float = 0.0
    error_s: float = 0.0
    at_s: float = 0.0


def hosts_of_ranks(context: RankContext, *, attempt: int = 1) -> tuple[RankHost, ...]:
    """Every rank's host and the offset of its clock, on every rank; a collective."""
    hosts = context.gather(node_name(), str)
    # One rank a host answers for all of them: they share its clock, as emulated nodes do that of their one host.
    clocks = hosts if nodes_of_rank() is None else [hosts[0]] * len(hosts)
    first = {name: clocks.index(name) for name in dict.fromkeys(clocks)}
    measured = {hosts[0]: _Offsets(at_s=CpuClock.stamp())}
    for name, rank in first.items():
        if rank:
            measured[name] = _offsets(context, rank)
    of_hosts = context.share(measured, dict[str, _Offsets])
    offsets = [of_hosts[clock] for clock in clocks]
    cores = context.gather(context.core, int | None)
    return tuple(
        RankHost(
            rank=rank,
            host=host,
            core=core,
            clock_offset_s=offset.monotonic_s,
            clock_error_s=offset.error_s,
            wall_offset_s=offset.wall_s,
            clock_at_s=offset.at_s,
            attempt=attempt,
        )
        for rank, (host, core, offset) in enumerate(zip(hosts, cores, offsets, strict=True))
    )


def _offsets(context: RankContext, other: int) -> _Offsets:
    """On rank 0, how far the clocks of rank ``other`` are ahead, and most that this may be off; zeros elsewhere."""
    context.barrier()
    if context.backend == NO_BACKEND or context.rank not in (0, other):
        return _Offsets()
    box = torch.zeros(2, dtype=torch.float64, device=context.device)
    best = _Offsets(error_s=float("inf"))
    for _ in range(ROUND_TRIPS):
        if context.rank == other:
            dist.recv(box, src=0)
            box.copy_(torch.tensor([CpuClock.stamp(), time.time()], dtype=torch.float64))
            dist.send(box, dst=0)
            continue
        wall_begin_s, begin_s = time.time(), CpuClock.stamp()
        dist.send(box, dst=other)
        dist.recv(box, src=other)
        there_s, there_wall_s = box.tolist()
        end_s, wall_end_s = CpuClock.stamp(), time.time()
        middle_s, wall_middle_s = (begin_s + end_s) / 2, (wall_begin_s + wall_end_s) / 2
        error_s = max(end_s - begin_s, wall_end_s - wall_begin_s) / 2
        if error_s < best.error_s:
            best = _Offsets(there_s - middle_s, there_wall_s - wall_middle_s, error_s, middle_s)
    return best
