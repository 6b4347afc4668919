"""On which host each rank of a measurement ran, and how far that host's clock was off (file ``hosts.jsonl``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from paradl_bench.core.bounds import ClockSeconds, Index, RankIndex, Seconds
from paradl_bench.records.measurement import read_records

HOSTS_FILE = "hosts.jsonl"


class RankHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one rank ran, and its host's clock at one moment.

    Every attempt at a measurement begins with a record a rank. Where there are several hosts, one rank of each adds
    records while it goes on and at its end, since clocks do not keep pace
    (:mod:`paradl_bench.records.hosts.host_clocks`).

    Attributes:
        core: that the rank was pinned to; None on a GPU.
        clock_offset_s: what to take off a stamp of this host's monotonic clock to get rank 0's; 0 on rank 0's host.
        clock_error_s: most that the offset may be wrong by: half the shortest round trip.
        wall_offset_s: by how much this host's calendar clock is ahead of rank 0's, as wrong at most.
        clock_at_s: rank 0's monotonic clock when the offset was measured; None in files of before.
        attempt: at the measurement, counted from 1; an interrupted one takes several. 0 in files of before.
    """

    rank: RankIndex
    host: str
    core: Index | None = None
    clock_offset_s: ClockSeconds = 0.0
    clock_error_s: Seconds = 0.0
    wall_offset_s: ClockSeconds = 0.0
    clock_at_s: ClockSeconds | None = None
    attempt: Index = 0


def read_host_records(directory: Path) -> list[RankHost]:
    """All records, in the order in which they were written; none for measurements that noted none.

    Raises:
        UserError: a record that is not valid.
    """
    return read_records(directory, HOSTS_FILE, RankHost)


def last_of_each(records: Iterable[RankHost]) -> dict[int, RankHost]:
    """The last record of every rank."""
    return {record.rank: record for record in records}
