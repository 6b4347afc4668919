"""Stamps of several hosts on one clock: offsets that were measured more than once, with what lies between.

A host's monotonic clock counts from its start, and some millionths faster or slower than another's: over a sweep that
is more than a small collective takes. So an offset is measured at the beginning of a measurement, while it goes on and
at its end. Between two of them the clock is taken to have kept one pace; what it may be wrong by is what the two may be
wrong by, in between in proportion. Beyond the last one, as in a measurement that was cut short, it is taken to keep the
last pace that is known, and the error grows by what that may be wrong by; where no pace is known, by 15 millionths,
which NTP takes a clock's frequency to be off by (Mills, RFC 5905, PHI in figure 27).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.units import format_seconds
from paradl_bench.records.hosts.host_record import RankHost

Floats = NDArray[np.float64]

UNKNOWN_PACE = 15e-6
"""Seconds a second that clocks of unknown pace may part by."""


class HostDrift(msgspec.Struct, frozen=True, kw_only=True):
    """What a host's clock did against rank 0's during one attempt at a measurement.

    Attributes:
        host, against: whose clock, and rank 0's host.
        gained_s: from the first offset that was measured to the last, after ``over_s`` seconds.
        error_s: most that this may be wrong by.
        bent_s: how far an offset in between is off the straight line between its neighbours, beyond what all three
            may be wrong by; 0 where they explain it, or where there are fewer than three.
    """

    host: str
    against: str
    gained_s: float
    over_s: float
    error_s: float
    bent_s: float = 0.0

    @property
    def drifted(self) -> bool:
        """Whether the clock went by another pace, beyond what the round trips explain."""
        return abs(self.gained_s) > self.error_s


class OnOneClock(NamedTuple):
    """Stamps on rank 0's clock, and most that each may be wrong by."""

    stamps_s: Floats
    error_s: Floats


class HostClocks:
    """The clocks of a measurement's hosts, by attempt.

    Args:
        records: as ``hosts.jsonl`` holds them, in the order in which they were written.
    """

    def __init__(self, records: Iterable[RankHost]) -> None:
        self._host: dict[tuple[int, int], str] = {}
        measured: dict[tuple[int, str], dict[float, RankHost]] = defaultdict(dict)
        for record in records:
            # Without the moment, or in files of before, nothing tells when the offset held.
            if record.clock_at_s is not None and record.attempt:
                self._host[record.attempt, record.rank] = record.host
                measured[record.attempt, record.host].setdefault(record.clock_at_s, record)
        self._series = {
            key: _Series([by_moment[at] for at in sorted(by_moment)]) for key, by_moment in measured.items()
        }

    def on_one_clock(self, attempt: int, rank: int, stamps_s: Sequence[float] | Floats) -> OnOneClock | None:
        """Stamps of a rank's monotonic clock on rank 0's; None where no offset of that attempt is known.

        Args:
            attempt: at the measurement, in which the stamps were taken.
        """
        host = self._host.get((attempt, rank))
        return None if host is None else self._series[attempt, host].on_one_clock(np.asarray(stamps_s, float))

    def drifts(self) -> tuple[HostDrift, ...]:
        """What each clock did against rank 0's, where it was measured more than once."""
        drifts = []
        for (attempt, host), series in self._series.items():
            against = self._host.get((attempt, 0), "")
            if len(series.at_s) > 1 and host != against:
                drifts.append(series.drift(host, against))
        return tuple(drifts)


class _Series:
    """Offsets of one host's clock in one attempt, in the order of time."""

    def __init__(self, records: Sequence[RankHost]) -> None:
        self.at_s = np.array([record.clock_at_s for record in records], float)
        self.offset_s = np.array([record.clock_offset_s for record in records])
        self.error_s = np.array([record.clock_error_s for record in records])

    def on_one_clock(self, stamps_s: Floats) -> OnOneClock:
        # Stamps are of the host's own clock, so moments have to be as well.
        own_s = np.maximum.accumulate(self.at_s + self.offset_s)
        offset = np.interp(stamps_s, own_s, self.offset_s)
        error = np.interp(stamps_s, own_s, self.error_s)
        beyond = stamps_s - np.clip(stamps_s, own_s[0], own_s[-1])
        if not self.error_s.any():
            # Rank 0's own host.
            return OnOneClock(stamps_s - offset, error)
        pace, unknown = 0.0, UNKNOWN_PACE
        span_s, wrong_s = float(own_s[-1] - own_s[0]), float(self.error_s[0] + self.error_s[-1])
        if wrong_s < UNKNOWN_PACE * span_s:
            pace, unknown = float(self.offset_s[-1] - self.offset_s[0]) / span_s, wrong_s / span_s
        return OnOneClock(stamps_s - offset - pace * beyond, error + unknown * np.abs(beyond))

    def drift(self, host: str, against: str) -> HostDrift:
        return HostDrift(
            host=host,
            against=against,
            gained_s=float(self.offset_s[-1] - self.offset_s[0]),
            over_s=float(self.at_s[-1] - self.at_s[0]),
            error_s=float(self.error_s[0] + self.error_s[-1]),
            bent_s=self._bent_s(),
        )

    def _bent_s(self) -> float:
        worst = 0.0
        for before, here in enumerate(range(1, len(self.at_s) - 1)):
            sides = [before, here + 1]
            straight = float(np.interp(self.at_s[here], self.at_s[sides], self.offset_s[sides]))
            explained = float(self.error_s[here] + self.error_s[sides].max())
            worst = max(worst, abs(float(self.offset_s[here]) - straight) - explained)
        return worst


def drift_lines(drifts: Sequence[HostDrift]) -> list[str]:
    """What is worth saying of clocks, one line each; empty where round trips explain all that they did."""
    drifted = [drift for drift in drifts if drift.drifted]
    lines = []
    if drifted:
        worst = max(drifted, key=lambda drift: abs(drift.gained_s) / drift.over_s)
        pace = abs(worst.gained_s) / worst.over_s * 1e6
        fast = "gained" if worst.gained_s > 0 else "lost"
        others = f", and those of {len(drifted) - 1} more hosts by less" if len(drifted) > 1 else ""
        lines.append(
            f"the clock of {worst.host} {fast} {format_seconds(abs(worst.gained_s))} on that of {worst.against} in"
            f" {format_seconds(worst.over_s)} ({pace:.1f} millionths, known within {format_seconds(worst.error_s)})"
            f"{others}: taken off before ranks are compared"
        )
    bent = max((drift for drift in drifts if drift.bent_s), key=lambda drift: drift.bent_s, default=None)
    if bent is not None:
        lines.append(
            f"the clock of {bent.host} did not keep a constant pace against {bent.against}'s: in between it"
            f" was off by {format_seconds(bent.bent_s)} more than round trips explain; arrivals may be wrong by that"
        )
    return lines
