"""Collectives that follow compute, as a run's layers make them do: what one sweep of them holds.

Repeated back to back, a collective finds warm caches and threads that are awake. Behind a layer it finds neither, and
it starts when the last rank arrives.
"""

from __future__ import annotations

import msgspec

from paradl_bench.core.bounds import Bytes, ClockSeconds, Index, RankIndex, Ranks, Samples, Seconds
from paradl_bench.records.hosts.host_clocks import HostClocks

BEHIND_FILE = "behind.jsonl"


class BehindComputeSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one collective behind compute and back to back, in turn, in one block (file ``behind.jsonl``).

    Lists are a list a rank that takes part, one value a repetition; index i is the same A-B pair on all of them.

    Attributes:
        message_bytes: as the operation defines it.
        kernel: the compute that ran before (``layers``, or ``ghosts`` on emulated nodes,
            and ``sleep`` there in older sweeps).
        one_clock: whether ``start_s`` and ``end_s`` of all ranks are of one clock, with the earliest start of the
            repetition as 0; else each rank's are its own, and its start is 0.
        back_to_back_s: of a call behind a barrier, as in a sweep.
        compute_s: of the compute before the call.
        start_s, end_s: when a rank came to the call behind compute, and when it went on.
        host_start_s: without one clock, when each rank came on its host's monotonic clock; empty where it has none (on
            GPUs), where some ranks take no part, and in files of before.
        attempt: at the measurement, as ``hosts.jsonl`` counts them.
        first_rank: of all ranks, the first of a group of ranks side by side, all of which call at once.
        clock_error_s: None as measured; of what :meth:`aligned` returns, most that an arrival may be wrong by.
    """

    library: str
    operation: str
    level: str
    ranks: Ranks
    message_bytes: Bytes
    dtype: str
    block: Index
    kernel: str
    one_clock: bool
    back_to_back_s: tuple[Samples, ...]
    compute_s: tuple[Samples, ...]
    start_s: tuple[Samples, ...]
    end_s: tuple[Samples, ...]
    host_start_s: tuple[tuple[ClockSeconds, ...], ...] = ()
    attempt: Index = 0
    first_rank: RankIndex = 0
    clock_error_s: Seconds | None = None

    def __post_init__(self) -> None:
        where = f"{self.operation} of {self.message_bytes} bytes behind compute"
        lists = (self.back_to_back_s, self.compute_s, self.start_s, self.end_s)
        if len({len(each) for each in lists}) != 1 or len({len(row) for each in lists for row in each}) != 1:
            raise ValueError(f"{where} has not as many samples on every rank and of every sort")
        starts = [value for row in self.start_s for value in row]
        ends = [value for row in self.end_s for value in row]
        if any(end < start for start, end in zip(starts, ends, strict=True)):
            raise ValueError(f"{where} ends before it starts")
        if self.host_start_s and [len(row) for row in self.host_start_s] != [len(row) for row in self.start_s]:
            raise ValueError(f"{where} has not as many arrivals on hosts' clocks as samples")

    def aligned(self, clocks: HostClocks) -> BehindComputeSamples:
        """The same with ``host_start_s`` on rank 0's clock, as far as offsets of all ranks' hosts are known."""
        if not self.host_start_s or self.clock_error_s is not None:
            return self
        by_rank = enumerate(self.host_start_s, self.first_rank)
        found = [clocks.on_one_clock(self.attempt, rank, row) for rank, row in by_rank]
        if any(each is None for each in found):
            return self
        known = [each for each in found if each is not None]
        return msgspec.structs.replace(
            self,
            host_start_s=tuple(tuple(each.stamps_s.tolist()) for each in known),
            clock_error_s=float(max(each.error_s.max() for each in known)),
        )

    @property
    def arrivals_s(self) -> tuple[tuple[float, ...], ...]:
        """When each rank came, on one clock, a list a rank; empty without one."""
        if self.one_clock:
            return self.start_s
        return self.host_start_s if self.clock_error_s is not None else ()

    def after_last_arrival_s(self) -> tuple[float, ...]:
        """Seconds from the arrival of the last rank until all have gone on, one a repetition.

        On one clock that is read off it. Between hosts it is the shortest time that any rank spent in the call, which
        no error of a clock reaches: the last one to arrive waited for nobody. What ranks differ by in going on is
        missing there.
        """
        if not self.one_clock:
            spans = [
                [end - start for start, end in zip(starts, ends, strict=True)]
                for starts, ends in zip(self.start_s, self.end_s, strict=True)
            ]
            return tuple(min(each) for each in zip(*spans, strict=True))
        last_starts = (max(each) for each in zip(*self.start_s, strict=True))
        last_ends = (max(each) for each in zip(*self.end_s, strict=True))
        return tuple(end - start for start, end in zip(last_starts, last_ends, strict=True))

    def lags_s(self) -> tuple[float, ...]:
        """Seconds between the first and the last rank's arrival, one a repetition; empty without one clock."""
        return tuple(max(each) - min(each) for each in zip(*self.arrivals_s, strict=True))
