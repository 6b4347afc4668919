"""Records of contexts as a sweep's directory holds them, and those of older sweeps, which had a file a context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from paradl_bench.core.bounds import Bytes, ClockSeconds, Index, PositiveCount, RankIndex, Ranks, Seconds
from paradl_bench.core.errors import UserError
from paradl_bench.records.contexts.context import CONTEXTS_FILE, ContextSamples, Flags, Rows
from paradl_bench.records.measurement import read_records


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    """What all of them say of a call."""

    library: str
    operation: str
    level: str
    ranks: Ranks
    message_bytes: Bytes
    block: Index
    kernel: str
    dtype: str = "fp32"

    def _about(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in _Call.__struct_fields__ if name != "kernel"}
        return {**fields, "neighbour": self.kernel}


class _Behind(_Call, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of ``behind.jsonl``."""

    one_clock: bool
    back_to_back_s: Rows
    compute_s: Rows
    start_s: Rows
    end_s: Rows
    host_start_s: tuple[tuple[ClockSeconds, ...], ...] = ()
    attempt: Index = 0
    first_rank: RankIndex = 0
    clock_error_s: Seconds | None = None

    def fields(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("one_clock", "start_s", "end_s", "host_start_s", "attempt")}
        return {
            **self._about(),
            **same,
            "context": "after-compute",
            "idle_end_s": self.back_to_back_s,
            "neighbour_s": self.compute_s,
            "first_rank": self.first_rank,
        }


class _Beside(_Call, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of ``beside_all_reduce.jsonl``."""

    exchange_bytes: Bytes
    calls: PositiveCount
    one_clock: bool
    apart_start_s: Rows
    apart_end_s: Rows
    start_s: Rows
    end_s: Rows
    begun: Flags
    outlived: Flags
    exchange_s: Rows
    exchange_level: str = ""

    def fields(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("calls", "one_clock", "start_s", "end_s", "begun", "outlived")}
        return {
            **self._about(),
            **same,
            "context": "with-all-reduce",
            "idle_start_s": self.apart_start_s,
            "idle_end_s": self.apart_end_s,
            "neighbour_s": self.exchange_s,
            "neighbour_bytes": self.exchange_bytes,
            "neighbour_level": self.exchange_level,
        }


class _Interference(_Call, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of ``interference.jsonl``, which is of one rank."""

    rank: RankIndex
    compute_alone_s: tuple[Seconds, ...]
    compute_beside_s: tuple[Seconds, ...]
    communication_alone_s: tuple[Seconds, ...]
    communication_beside_s: tuple[Seconds, ...]

    def fields(self) -> dict[str, Any]:
        return {
            **self._about(),
            "context": "with-compute",
            "idle_end_s": (self.communication_alone_s,),
            "end_s": (self.communication_beside_s,),
            "neighbour_s": (self.compute_beside_s,),
            "neighbour_idle_s": (self.compute_alone_s,),
            "first_rank": self.rank,
        }


OLDER: dict[str, type[_Behind | _Beside | _Interference]] = {
    "behind.jsonl": _Behind,
    "interference.jsonl": _Interference,
    "beside_all_reduce.jsonl": _Beside,
}
"""By file, what its rows hold."""


def read_contexts(directory: Path) -> list[ContextSamples]:
    """All records of contexts of a measurement directory, of this version and of older ones.

    Raises:
        UserError: a whole line is no valid record; the message names file, line and field.
    """
    records = read_records(directory, CONTEXTS_FILE, ContextSamples)
    for name, row_type in OLDER.items():
        for number, row in enumerate(read_records(directory, name, row_type), start=1):
            try:
                records.append(ContextSamples(**row.fields()))
            except ValueError as error:
                raise UserError(f"{directory / name} line {number}: {error}") from None
    return records
