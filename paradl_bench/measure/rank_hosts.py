"""Where ranks run, and how far the clocks of their hosts are apart.

The offset of a host's clock is measured as NTP does (Mills, RFC 5905, section 8): a message goes there and back, and
the stamp in the middle belongs halfway between those at the ends; of many round trips the shortest is believed, since
what delays a message delays one way more than the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from paradl_bench.measure.directory import MeasurementDirectory
from paradl_bench.measure.process_groups import RankContext
from paradl_bench.measure.rank_place import NO_BACKEND, node_name
from paradl_bench.spec.host_record import HOSTS_FILE, RankHost

ROUND_TRIPS = 40


def note_hosts(context: RankContext, directory: MeasurementDirectory | None) -> None:
    """Append every rank's host and clock; a collective. Rank 0 alone has a directory."""
    found = hosts_of_ranks(context)
    if directory is not None:
        directory.append(HOSTS_FILE, found)


def hosts_of_ranks(
    context: RankContext, *, host: str | None = None, clock: Callable[[], float] = time.perf_counter
) -> tuple[RankHost, ...]:
    """Every rank's host and the offset of its clock, on every rank; a collective.

    Args:
        host: of this rank; None for the node's name. clock: of this host, in seconds.
    """
    hosts = context.gather(node_name() if host is None else host)
    # One rank a host answers for all of them: they share its clock.
    first = {name: hosts.index(name) for name in dict.fromkeys(hosts)}
    measured = {}
    for name, rank in first.items():
        if rank:
            measured[name] = _offset(context, rank, clock)
    offsets = context.share(measured)
    places = context.gather(msgspec.to_builtins(_place(context, hosts[context.rank], offsets)))
    return tuple(msgspec.convert(place, RankHost) for place in places)


def _place(context: RankContext, host: str, offsets: dict[str, tuple[float, float]]) -> RankHost:
    offset_s, error_s = offsets.get(host, (0.0, 0.0))
    return RankHost(rank=context.rank, host=host, core=context.core, clock_offset_s=offset_s, clock_error_s=error_s)


def _offset(context: RankContext, other: int, clock: Callable[[], float]) -> tuple[float, float]:
    """On rank 0, by how much the clock of rank ``other`` is ahead, and most that this may be off; zeros elsewhere."""
    context.barrier()
    if context.backend == NO_BACKEND or context.rank not in (0, other):
        return 0.0, 0.0
    box = torch.zeros(1, dtype=torch.float64, device=context.device)
    best = (0.0, float("inf"))
    for _ in range(ROUND_TRIPS):
        if context.rank == other:
            dist.recv(box, src=0)
            box.fill_(clock())
            dist.send(box, dst=0)
            continue
        begin = clock()
        dist.send(box, dst=other)
        dist.recv(box, src=other)
        there = float(box.item())
        end = clock()
        best = min(best, (there - (begin + end) / 2, (end - begin) / 2), key=lambda pair: pair[1])
    return best
