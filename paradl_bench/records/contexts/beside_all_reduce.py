"""Calls that a rank waits for while an all-reduce is in flight: what one sweep of them holds.

In backward a shared layer's halos and collectives go out while gradients are reduced. Repeated alone, or right behind
compute, they find the links and the communication library's threads free; here they do not.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from paradl_bench.core.bounds import Bytes, Index, PositiveBytes, PositiveCount, Ranks, Samples

BESIDE_ALL_REDUCE_FILE = "beside_all_reduce.jsonl"

T = TypeVar("T")


class BesideAllReduceSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one operation with and without an all-reduce in flight, in turn, in one block.

    A repetition is ``calls`` calls, compute before each, first apart from the all-reduce and then while one goes on
    that was issued before them. Lists are a list a rank that takes part, one value a call; index i is the same call on
    all of them.

    Attributes:
        message_bytes: as the operation defines it; exchange_bytes: of the all-reduce.
        exchange_level: that the all-reduce spans, which goes over all ranks while several groups like this one call;
            empty where it goes over the group of the calls.
        kernel: the compute before each call (``layers``, or ``ghosts`` on emulated nodes,
            and ``sleep`` there in older sweeps).
        one_clock: whether starts and ends of all ranks are of one clock, with the earliest start of the call as 0; else
            each rank's are its own, and its start is 0.
        apart_start_s, apart_end_s: when a rank came to a call, and when it went on, with nothing else in flight.
        start_s, end_s: likewise beside the all-reduce.
        begun, outlived: whether the all-reduce was in flight on that rank as the call began, and still as it ended.
        exchange_s: a value a repetition: from when a rank issued the all-reduce to when it was done, calls and compute
            included where those took longer.
    """

    library: str
    operation: str
    level: str
    ranks: Ranks
    message_bytes: Bytes
    exchange_bytes: PositiveBytes
    dtype: str
    block: Index
    kernel: str
    calls: PositiveCount
    one_clock: bool
    apart_start_s: tuple[Samples, ...]
    apart_end_s: tuple[Samples, ...]
    start_s: tuple[Samples, ...]
    end_s: tuple[Samples, ...]
    begun: tuple[tuple[bool, ...], ...]
    outlived: tuple[tuple[bool, ...], ...]
    exchange_s: tuple[Samples, ...]
    exchange_level: str = ""

    def __post_init__(self) -> None:
        where = f"{self.operation} of {self.message_bytes} bytes beside an all-reduce"
        times = (self.apart_start_s, self.apart_end_s, self.start_s, self.end_s)
        lists = (*times, self.begun, self.outlived)
        counts = {len(row) for each in lists for row in each}
        if len({len(each) for each in (*lists, self.exchange_s)}) != 1 or len(counts) != 1:
            raise ValueError(f"{where} has not as many samples on every rank and of every sort")
        repetitions = {len(row) for row in self.exchange_s}
        if {count * self.calls for count in repetitions} != counts:
            raise ValueError(f"{where} has not {self.calls} calls a repetition")
        for starts, ends in ((self.apart_start_s, self.apart_end_s), (self.start_s, self.end_s)):
            if any(e < s for own, done in zip(starts, ends, strict=True) for s, e in zip(own, done, strict=True)):
                raise ValueError(f"{where} ends before it starts")

    def apart_s(self) -> tuple[float, ...]:
        """Mean seconds a call with nothing else in flight, one a repetition, from the last rank's arrival."""
        return tuple(_mean(row) for row in self._repetitions(self._spans(self.apart_start_s, self.apart_end_s)))

    def beside_s(self) -> tuple[float | None, ...]:
        """Mean seconds of calls that began beside the all-reduce on every rank, one a repetition; None without any.

        Likewise from the last rank's arrival. The mean, since a run's calls add up, and a few that wait long count.
        """
        begun = [all(each) for each in zip(*self.begun, strict=True)]
        spans = self._spans(self.start_s, self.end_s)
        counted = self._repetitions([span if flag else None for span, flag in zip(spans, begun, strict=True)])
        rows = [[span for span in row if span is not None] for row in counted]
        return tuple(_mean(row) if row else None for row in rows)

    def queued(self) -> tuple[int, int]:
        """(calls that began beside the all-reduce and ended after it on some rank, calls that began beside it)."""
        begun = [all(each) for each in zip(*self.begun, strict=True)]
        outlived = [all(each) for each in zip(*self.outlived, strict=True)]
        return sum(b and not o for b, o in zip(begun, outlived, strict=True)), sum(begun)

    def _spans(self, starts: tuple[tuple[float, ...], ...], ends: tuple[tuple[float, ...], ...]) -> list[float]:
        """Per call, seconds from the last arrival until all have gone on; without one clock the shortest stay."""
        calls = zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True)
        if self.one_clock:
            return [max(own_ends) - max(own_starts) for own_starts, own_ends in calls]
        return [min(e - s for s, e in zip(*each, strict=True)) for each in calls]

    def _repetitions(self, values: list[T]) -> list[list[T]]:
        return [values[at : at + self.calls] for at in range(0, len(values), self.calls)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
