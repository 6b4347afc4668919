"""What compute before a collective adds to its time, from the profile."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from calibrate.behind import BehindCompute
from calibrate.communication_spread import cholesky_columns
from calibrate.profile import Profile
from predict.costs import Remark


class Added(NamedTuple):
    """Seconds that compute before a collective adds; modes as of a cost: what one standard deviation of each adds."""

    seconds: float
    modes: tuple[tuple[str, float], ...]


class BehindCosts:
    """Seconds that compute before a collective adds to it, through one library."""

    def __init__(self, profile: Profile, backend: str) -> None:
        self._entries = [entry for entry in profile.behind_compute if entry.library == backend]

    def entry(self, operation: str, level: str) -> tuple[BehindCompute | None, tuple[Remark, ...]]:
        """What was measured of an operation at a level, else of the most alike; None where nothing was."""
        if not self._entries:
            text = (
                "collectives that wait for compute: what it adds to them was not measured: paradl-bench collectives"
                " --behind-compute"
            )
            return None, (Remark(text, True),)
        entry = min(self._entries, key=lambda each: (each.operation != operation, each.level != level))
        if (entry.operation, entry.level) == (operation, level):
            return entry, ()
        text = f"{operation} behind compute at level {level!r}: as {entry.operation} at level {entry.level!r}"
        return entry, (Remark(text, True),)

    def added(self, entry: BehindCompute, back_to_back_s: float) -> Added:
        """Seconds added to one that takes ``back_to_back_s`` of at most the entry's largest size.

        Beyond that size what was added at it stays: caches that compute has emptied are filled once.

        Args:
            back_to_back_s: as it is between calls behind compute (:func:`between_them`).
        """
        where = f"{entry.operation} behind compute at {entry.level}"
        return Added(
            entry.extra_s(back_to_back_s),
            tuple(
                (f"{where}, {number}", first + second * back_to_back_s)
                for number, (first, second) in enumerate(cholesky_columns(entry.covariance), start=1)
            ),
        )


def between_them(entry: BehindCompute, swept_s: Callable[[int, int], float]) -> float:
    """What calls back to back between those behind compute take, of what a sweep that does nothing else finds.

    The entry tells what is added to the former: the line through it is of pairs. A sweep's calls follow each other on
    warm caches and on cores that nothing else was on, and may be shorter. The median over sizes and rank counts; 1
    where the entry has none.

    Args:
        swept_s: of ranks and bytes, as they are predicted from the sweep.
    """
    ratios = [
        point.back_to_back_s / swept
        for point in entry.points
        if (swept := swept_s(point.ranks, point.message_bytes)) > 0 and point.back_to_back_s > 0
    ]
    return median(ratios) if ratios else 1.0
