"""Which ranks come late to where all of them meet, by stamps on one clock; torch-free.

Stamps of several hosts are brought to rank 0's clock (:mod:`paradl_bench.records.hosts.host_clocks`). What that may be
wrong by is no lateness: a rank is late in a call where it comes later than the others, in the median, by more than the
clocks may be off and by more than a tenth of what was computed before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.units import format_seconds
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import RankHost
from paradl_bench.records.training.training_record import TrainingIterations

Floats = NDArray[np.float64]

LATE = 0.10
"""Of what was computed before: by how much later than the others a rank has to come to be called late."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """When one rank comes to where it meets others that have as much to do.

    Attributes:
        late_s: median over calls of its arrival less the median of the others'; below 0 for one that waits.
        error_s: most that clocks may be wrong by, median over calls; 0 on one host.
    """

    rank: int
    host: str
    late_s: float
    error_s: float
    late_share: float
    calls: int

    @property
    def late(self) -> bool:
        """Whether it is late in most calls."""
        return self.late_share > 0.5

    def line(self, where: str, before: str) -> str:
        """What to say of a late rank: where the ranks meet, and what is computed before, which the tenth is of."""
        on = f" on {self.host}" if self.host else ""
        clocks = f", clocks aligned within {format_seconds(self.error_s)}" if self.error_s else ""
        return (
            f"rank {self.rank}{on} comes to {where} {format_seconds(self.late_s)} after the others (median{clocks}),"
            f" later by over a tenth of {before} in {self.late_share:.0%} of them"
        )


class Meetings(NamedTuple):
    """Calls in which the same ranks meet: (ranks, calls) arrivals on one clock and most that each may be wrong by.

    ``before_s`` of each call is what is computed before.
    """

    arrivals_s: Floats
    error_s: Floats
    before_s: Floats


def arrivals_after_compute(records: Iterable[ContextSamples], hosts: Mapping[int, RankHost]) -> tuple[Arrival, ...]:
    """The ranks of a sweep as they come to collectives after equal compute.

    Args:
        records: aligned; those without a clock of all ranks, and those in which some take no part, are left out.
    """
    groups: dict[int, list[Meetings]] = defaultdict(list)
    for record in records:
        if record.context == "after-compute" and len(record.arrivals_s) == record.ranks > 1:
            arrivals = np.array(record.arrivals_s)
            error = np.full(arrivals.shape, record.clock_error_s or 0.0)
            groups[record.first_rank].append(Meetings(arrivals, error, np.median(record.neighbour_s, axis=0)))
    arrivals_of_ranks = []
    for first, meetings in sorted(groups.items()):
        ranks = max(len(meeting.arrivals_s) for meeting in meetings)
        of_all = [meeting for meeting in meetings if len(meeting.arrivals_s) == ranks]
        for row in range(ranks):
            others = [other for other in range(ranks) if other != row]
            arrivals_of_ranks.append(_arrival(first + row, row, others, of_all, hosts))
    return tuple(arrivals_of_ranks)


def arrivals_in_training(
    records: Iterable[TrainingIterations],
    peers: Mapping[int, Sequence[int]],
    clocks: HostClocks,
    hosts: Mapping[int, RankHost],
) -> tuple[Arrival, ...]:
    """The ranks of a run as they come to the end of backward, where the last of the gradients' exchange begins.

    Args:
        peers: of each rank, those that do like work. Ranks without stamps, or without offsets, are left out.
    """
    chunks: dict[tuple[int, int], dict[int, TrainingIterations]] = defaultdict(dict)
    for record in records:
        if record.host_begin_s:
            chunks[record.attempt, record.first_iteration][record.rank] = record
    of_chunks = [_of_chunk(chunks[key], sorted(peers), clocks) for key in sorted(chunks)]
    meetings = [meeting for meeting in of_chunks if meeting is not None]
    place = {rank: index for index, rank in enumerate(sorted(peers))}
    return tuple(
        _arrival(rank, place[rank], [place[other] for other in others], meetings, hosts)
        for rank, others in sorted(peers.items())
        if others and meetings
    )


def _of_chunk(chunk: Mapping[int, TrainingIterations], ranks: Sequence[int], clocks: HostClocks) -> Meetings | None:
    if any(rank not in chunk for rank in ranks):
        return None
    arrivals, errors, computed = [], [], []
    count = min(len(chunk[rank].iteration_s) for rank in ranks)
    for rank in ranks:
        record = chunk[rank]
        before = np.add(record.fw_s, record.bw_s)[:count]
        aligned = clocks.on_one_clock(record.attempt, rank, np.array(record.host_begin_s)[:count] + before)
        if aligned is None:
            return None
        arrivals.append(aligned.stamps_s)
        errors.append(aligned.error_s)
        computed.append(before)
    return Meetings(np.array(arrivals), np.array(errors), np.median(computed, axis=0))


def _arrival(
    rank: int, row: int, others: Sequence[int], meetings: Sequence[Meetings], hosts: Mapping[int, RankHost]
) -> Arrival:
    """Compare the row of a rank with those of others."""
    arrivals_s, error_s = (np.concatenate(part, axis=1) for part in list(zip(*meetings, strict=True))[:2])
    late_s = arrivals_s[row] - np.median(arrivals_s[others], axis=0)
    wrong_s = error_s[row] + np.max(error_s[others], axis=0)
    before_s = np.concatenate([meeting.before_s for meeting in meetings])
    return Arrival(
        rank=rank,
        host=host_of(rank, hosts),
        late_s=float(np.median(late_s)),
        error_s=float(np.median(wrong_s)),
        late_share=float(np.mean(late_s > np.maximum(wrong_s, LATE * before_s))),
        calls=len(late_s),
    )


def host_of(rank: int, hosts: Mapping[int, RankHost]) -> str:
    """The host of a rank; empty where nobody noted it."""
    return hosts[rank].host if rank in hosts else ""
