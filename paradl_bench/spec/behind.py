"""Collectives that follow compute, as a run's layers make them do: what one sweep of them holds.

Repeated back to back, a collective finds warm caches and threads that are awake. Behind a layer it finds neither, and
it starts when the last rank arrives.
"""

from __future__ import annotations

import msgspec

from paradl_bench.spec.checks import check_samples

BEHIND_FILE = "behind.jsonl"


class BehindComputeSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one collective behind compute and back to back, in turn, in one block (file ``behind.jsonl``).

    Lists are a list a rank that takes part, one value a repetition; index i is the same A-B pair on all of them.

    Attributes:
        message_bytes: as the operation defines it.
        kernel: the compute that ran before (``layers``).
        one_clock: whether ``start_s`` and ``end_s`` of all ranks are of one clock, with the earliest start of the
            repetition as 0; else each rank's are its own, and its start is 0.
        back_to_back_s: of a call behind a barrier, as in a sweep.
        compute_s: of the compute before the call.
        start_s, end_s: when a rank came to the call behind compute, and when it went on.
    """

    library: str
    operation: str
    level: str
    ranks: int
    message_bytes: int
    dtype: str
    block: int
    kernel: str
    one_clock: bool
    back_to_back_s: tuple[tuple[float, ...], ...]
    compute_s: tuple[tuple[float, ...], ...]
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        where = f"{self.operation} of {self.message_bytes} bytes behind compute"
        lists = (self.back_to_back_s, self.compute_s, self.start_s, self.end_s)
        if len({len(each) for each in lists}) != 1 or len({len(row) for each in lists for row in each}) != 1:
            raise ValueError(f"{where} has not as many samples on every rank and of every sort")
        check_samples([value for each in lists for row in each for value in row], where)
        starts = [value for row in self.start_s for value in row]
        ends = [value for row in self.end_s for value in row]
        if any(end < start for start, end in zip(starts, ends, strict=True)):
            raise ValueError(f"{where} ends before it starts")

    def after_last_arrival_s(self) -> tuple[float, ...]:
        """Seconds from the arrival of the last rank until all have gone on, one a repetition.

        On one clock that is read off it. Without one it is the shortest time that any rank spent in the call: the last
        one to arrive waited for nobody. What ranks differ by in going on is missing there.
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
        if not self.one_clock:
            return ()
        return tuple(max(each) - min(each) for each in zip(*self.start_s, strict=True))
