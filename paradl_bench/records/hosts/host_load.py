"""What a host's cores did beside a measurement, stretch by stretch (file ``load.jsonl``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from paradl_bench.core.bounds import Cores, PositiveCount, PositiveSeconds
from paradl_bench.records.measurement import read_records

LOAD_FILE = "load.jsonl"
BUSY_SHARE = 0.05
"""Of the cores' time that other processes, a hypervisor or a limit take: from here on times are not of a quiet host."""
ON_BUSY_HOST = "measured on a busy host"
"""What every remark on such measurements begins with."""
_MOST_NAMED = 5


class HostLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stretch of time on the cores that a measurement was given, on the host of rank 0.

    Attributes:
        seconds: of the stretch. cores: that the measurement was given.
        other_cores: how many of them processes other than the measurement's kept busy, in the mean.
        stolen_cores: how many the hypervisor took for other machines, in the mean.
        throttled_cores: how many a limit of the control group kept from running, in the mean.
        while_measuring: false for the moment before.
    """

    seconds: PositiveSeconds
    cores: PositiveCount
    other_cores: Cores = 0.0
    stolen_cores: Cores = 0.0
    throttled_cores: Cores = 0.0
    while_measuring: bool = True

    @property
    def lost_share(self) -> float:
        """Of the cores' time, what the largest taker took."""
        return max(self.other_cores, self.stolen_cores, self.throttled_cores) / self.cores

    @property
    def is_busy(self) -> bool:
        """Whether enough of the cores' time went elsewhere to show in what is measured."""
        return self.lost_share >= BUSY_SHARE

    @property
    def words(self) -> str:
        """What took the cores, in words; nothing where little did."""
        least, of = BUSY_SHARE * self.cores, f"of {self.cores} cores" if self.cores > 1 else "of 1 core"
        taken = [
            (self.other_cores, f"other processes took {self.other_cores:.1f} {of}"),
            (self.stolen_cores, f"the hypervisor took {self.stolen_cores:.1f} {of}"),
            (self.throttled_cores, f"a limit of the control group kept back {self.throttled_cores:.1f} {of}"),
        ]
        return ", ".join(text for cores, text in taken if cores >= least)


def busy_lines(loads: Iterable[tuple[str, HostLoad | None]]) -> list[str]:
    """A line that names the measurements taken on a busy host, the busiest first; none where there are none.

    Args:
        loads: of measurements, each with its name; None where nobody looked.
    """
    busy = sorted(
        ((name, load) for name, load in loads if load is not None and load.is_busy), key=lambda of: -of[1].lost_share
    )
    if not busy:
        return []
    named = ", ".join(f"{name} ({load.words})" for name, load in busy[:_MOST_NAMED])
    more = f" and {len(busy) - _MOST_NAMED} more" if len(busy) > _MOST_NAMED else ""
    again = "them" if len(busy) > 1 else "it"
    return [f"{ON_BUSY_HOST}: {named}{more}; measure {again} again on a quiet host"]


def load_of(records: Iterable[HostLoad]) -> HostLoad | None:
    """The mean over the stretches in which something was measured; None where there are none."""
    stretches = [record for record in records if record.while_measuring]
    seconds = sum(record.seconds for record in stretches)
    if not stretches:
        return None

    def mean(field: str) -> float:
        return sum(float(getattr(record, field)) * record.seconds for record in stretches) / seconds

    return HostLoad(
        seconds=seconds,
        cores=max(record.cores for record in stretches),
        other_cores=mean("other_cores"),
        stolen_cores=mean("stolen_cores"),
        throttled_cores=mean("throttled_cores"),
    )


def read_load(directory: Path) -> HostLoad | None:
    """The mean load beside a measurement; None of directories that do not say.

    Raises:
        UserError: a record that is not valid.
    """
    return load_of(read_records(directory, LOAD_FILE, HostLoad))
