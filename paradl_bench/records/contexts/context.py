"""A collective in a context: what one sweep holds of its calls idle and in the context, in turn.

Repeated back to back behind a barrier, a collective finds warm caches, free links and threads that are awake. In a run
something surrounds it: compute before it, compute or an all-reduce beside it, other groups on the same links. A context
is measured in pairs, so that a slow spell of the machine falls on both halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import msgspec

from paradl_bench.core.bounds import (
    Bytes,
    ClockSeconds,
    Index,
    PositiveCount,
    RankIndex,
    Ranks,
    RanksOrUnknown,
    Samples,
    Seconds,
)
from paradl_bench.records.hosts.host_clocks import HostClocks

CONTEXTS_FILE = "contexts.jsonl"

OfGroup = Literal["after-compute", "with-compute", "with-all-reduce"]
"""Contexts of the calls of one group of ranks."""
OF_GROUP: tuple[OfGroup, ...] = get_args(OfGroup)
Context = OfGroup | Literal["groups"]

Rows = tuple[Samples, ...]
Flags = tuple[tuple[bool, ...], ...]
T = TypeVar("T")


class ContextSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one operation idle and in a context, in one block (file ``contexts.jsonl``).

    A repetition is ``calls`` calls idle, and as many in the context. Lists are a list a rank that takes part, one value
    a call; index i is the same call on all of them.

    Attributes:
        message_bytes: as the operation defines it.
        groups: how many call at once, of the context ``groups``; idle, each calls in its turn while the others wait.
        ranks_per_node: the most ranks of the group that share a host; 0 where nobody said.
        neighbour: what surrounds the calls: the kernel that computes (``layers``, ``ghosts``, ``conv2d``, ...).
        neighbour_bytes, neighbour_level: of the all-reduce in flight; the level that it spans where it goes over more
            ranks than the calls, else empty.
        one_clock: whether starts and ends of all ranks are of one clock, with the earliest start of the call as 0; else
            each rank's are its own, and its start is 0.
        idle_end_s: empty where no such call ran idle. idle_start_s, start_s: when a rank came to a call; empty where it
            stands right behind a barrier, as in a sweep.
        end_s: when it went on. Of compute beside, a call's mean over a window.
        neighbour_s: a value a repetition: seconds of the compute before, of a call of the kernel beside, or of the
            all-reduce with all that is in it. neighbour_idle_s: of a call of the kernel without the collective.
        begun, outlived: whether the all-reduce was in flight on that rank as the call began, and still as it ended.
        host_start_s: without one clock, when each rank came on its host's monotonic clock; empty where it has none (on
            GPUs), and where some ranks take no part.
        attempt: at the measurement, as ``hosts.jsonl`` counts them.
        first_rank: of all ranks, the first one here.
        verified: whether results were those expected; of others than groups the sweep's say it.
        clock_error_s: None as measured; of what :meth:`aligned` returns, most that an arrival may be wrong by.
    """

    library: str
    operation: str
    level: str
    ranks: Ranks
    message_bytes: Bytes
    dtype: str
    block: Index
    context: Context
    groups: Ranks = 1
    ranks_per_node: RanksOrUnknown = 0
    neighbour: str = ""
    one_clock: bool = False
    idle_end_s: Rows
    start_s: Rows = ()
    end_s: Rows
    neighbour_s: Rows = ()
    neighbour_idle_s: Rows = ()
    idle_start_s: Rows = ()
    begun: Flags = ()
    outlived: Flags = ()
    calls: PositiveCount = 1
    neighbour_bytes: Bytes = 0
    neighbour_level: str = ""
    host_start_s: tuple[tuple[ClockSeconds, ...], ...] = ()
    attempt: Index = 0
    first_rank: RankIndex = 0
    verified: bool = True
    clock_error_s: Seconds | None = None

    def __post_init__(self) -> None:
        where = f"{self.operation} of {self.message_bytes} bytes {self.context}"
        if (self.groups > 1) != (self.context == "groups"):
            raise ValueError(f"groups of {where} has to be 1, or of the context 'groups' at least 2, not {self.groups}")
        surrounded = (self.end_s, self.start_s, self.begun, self.outlived, self.host_start_s)
        idle, beside = (self.idle_end_s, self.idle_start_s), (self.neighbour_s, self.neighbour_idle_s)
        # In older sweeps of groups each was idle as often as it had a turn.
        alike = (surrounded, idle) if self.groups > 1 else ((*surrounded, *idle),)
        counts = [{len(row) for rows in lists for row in rows} for lists in alike]
        ranks = {len(self.end_s), *(len(rows) for rows in (*surrounded, *idle, *beside) if rows)}
        lacking = not self.end_s or bool(self.neighbour_s) != (self.groups == 1) or (self.groups > 1 and any(beside))
        if lacking or len(ranks) != 1 or max(map(len, counts)) > 1:
            raise ValueError(f"{where} has not as many samples on every rank and of every sort")
        repetitions = {len(row) * self.calls for rows in beside for row in rows}
        if repetitions and repetitions != counts[0]:
            raise ValueError(f"{where} has not {self.calls} calls a repetition")
        for starts, ends in ((self.idle_start_s, self.idle_end_s), (self.start_s, self.end_s)):
            if any(
                e < s
                for begun, done in zip(starts, ends, strict=bool(starts))
                for s, e in zip(begun, done, strict=True)
            ):
                raise ValueError(f"{where} ends before it starts")

    def idle_s(self, call_seconds: Callable[[Rows], T]) -> T | tuple[float, ...]:
        """Mean seconds of an idle call, one a repetition; from the last rank's arrival where arrivals are known.

        Args:
            call_seconds: of the operation, from seconds of its ranks behind a barrier.
        """
        if not self.idle_start_s:
            return call_seconds(self.idle_end_s) if self.idle_end_s else ()
        return tuple(_mean(row) for row in self._repetitions(self._spans(self.idle_start_s, self.idle_end_s)))

    def in_context_s(self, call_seconds: Callable[[Rows], T]) -> T | tuple[float, ...]:
        """Mean seconds of calls that began in the context on every rank, one a repetition that has any.

        The mean, since a run's calls add up, and a few that wait long count.

        Args:
            call_seconds: as of :meth:`idle_s`.
        """
        if not self.start_s:
            return call_seconds(self.end_s)
        spans = self._spans(self.start_s, self.end_s)
        rows = self._repetitions([span if flag else None for span, flag in zip(spans, self._begun, strict=True)])
        counted = ([span for span in row if span is not None] for row in rows)
        return tuple(_mean(row) for row in counted if row)

    def queued(self) -> tuple[int, int]:
        """(calls that began beside the all-reduce and ended after it on some rank, calls that began in the context)."""
        outlived = [all(call) for call in zip(*self.outlived, strict=True)] or self._begun
        return sum(b and not o for b, o in zip(self._begun, outlived, strict=True)), sum(self._begun)

    @property
    def arrivals_s(self) -> tuple[tuple[float, ...], ...]:
        """When each rank came to a call in the context, on one clock, a list a rank; empty without one."""
        if self.one_clock:
            return self.start_s
        return self.host_start_s if self.clock_error_s is not None else ()

    def lags_s(self) -> tuple[float, ...]:
        """Seconds between the first and the last rank's arrival, one a call; empty without one clock."""
        return tuple(max(call) - min(call) for call in zip(*self.arrivals_s, strict=True))

    def aligned(self, clocks: HostClocks) -> ContextSamples:
        """The same with ``host_start_s`` on rank 0's clock, as far as offsets of all ranks' hosts are known."""
        if not self.host_start_s or self.clock_error_s is not None:
            return self
        by_rank = enumerate(self.host_start_s, self.first_rank)
        known = [
            stamps for rank, row in by_rank if (stamps := clocks.on_one_clock(self.attempt, rank, row)) is not None
        ]
        if len(known) < len(self.host_start_s):
            return self
        return msgspec.structs.replace(
            self,
            host_start_s=tuple(tuple(stamps.stamps_s.tolist()) for stamps in known),
            clock_error_s=float(max(stamps.error_s.max() for stamps in known)),
        )

    @property
    def _begun(self) -> list[bool]:
        """Per call, whether it began in the context on every rank."""
        return [all(call) for call in zip(*self.begun, strict=True)] or [True] * len(self.end_s[0])

    def _spans(self, starts: Rows, ends: Rows) -> list[float]:
        """Per call, seconds from the arrival of the last rank until all have gone on.

        On one clock that is read off it. Between hosts it is the shortest time that any rank spent in the call, which
        no error of a clock reaches: the last one to arrive waited for nobody. What ranks differ by in going on is
        missing there.
        """
        calls = zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True)
        if self.one_clock:
            return [max(own_ends) - max(own_starts) for own_starts, own_ends in calls]
        return [min(e - s for s, e in zip(*call, strict=True)) for call in calls]

    def _repetitions(self, values: list[T]) -> list[list[T]]:
        return [values[at : at + self.calls] for at in range(0, len(values), self.calls)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
