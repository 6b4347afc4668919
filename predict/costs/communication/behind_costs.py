"""What compute before a collective adds to its time, from the profile."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from calibrate.fit.collectives.communication_spread import cholesky_columns
from calibrate.profile.collectives.behind import BehindCompute
from calibrate.profile.collectives.communication_residuals import SizeRatios
from calibrate.profile.profile import Profile
from predict.costs.sourced import Remark


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


def between_them(entry: BehindCompute, swept_s: Callable[[int, int], float]) -> SizeRatios:
    """What calls between those behind compute take of what a sweep finds, by size; the median over rank counts.

    The entry tells what compute adds to the former: the line through it is of pairs. A sweep's calls follow each other
    on the same buffers and on cores that nothing else was on: large ones find their data in the caches, which a run's
    do not, and where ranks share cores short ones hinder each other more. A size that its two neighbours agree against
    takes the nearer of theirs (a median of three): few pairs are behind each.

    Args:
        swept_s: of ranks and bytes, as they are predicted from the sweep.
    """
    ratios: dict[int, list[float]] = {}
    for point in entry.points:
        swept = swept_s(point.ranks, point.message_bytes)
        if swept > 0 and point.back_to_back_s > 0 and point.message_bytes > 0:
            ratios.setdefault(point.message_bytes, []).append(math.log(point.back_to_back_s / swept))
    sizes = sorted(ratios)
    raw = [median(ratios[size]) for size in sizes]
    inner = [median(raw[index - 1 : index + 2]) for index in range(1, len(raw) - 1)]
    return SizeRatios(
        tuple(math.log(size) for size in sorted(ratios)), (*raw[:1], *inner, *raw[max(1, len(raw) - 1) :])
    )
