"""On which host each rank of a measurement ran, and how far that host's clock was off (file ``hosts.jsonl``)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paradl_bench.spec.checks import check_counts, check_finite, check_not_negative
from paradl_bench.spec.measurement import read_records

HOSTS_FILE = "hosts.jsonl"


class RankHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one rank ran; an interrupted measurement that goes on adds a record a rank.

    Attributes:
        core: that the rank was pinned to; None on a GPU.
        clock_offset_s: what to take off a stamp of this host's monotonic clock to get rank 0's, as it was when the
            measurement began; 0 on rank 0's host.
        clock_error_s: most that the offset may be wrong by: half the shortest round trip.
    """

    rank: int
    host: str
    core: int | None = None
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, "clock_offset_s", "clock_error_s")
        check_not_negative(self, "clock_error_s")
        check_counts(self, "rank", least=0)


def read_hosts(directory: Path) -> dict[int, RankHost]:
    """The last record of every rank; empty for measurements that noted none.

    Raises:
        UserError: a record that is not valid.
    """
    return {record.rank: record for record in read_records(directory, HOSTS_FILE, RankHost)}
