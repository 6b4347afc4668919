"""How much longer a call takes that is waited for while an all-reduce is in flight, from the profile."""

from __future__ import annotations

import math
from typing import NamedTuple

from calibrate.profile.collectives.beside_all_reduce import BesideAllReduce
from calibrate.profile.profile import Profile
from predict.costs.sourced import Remark


class Beside(NamedTuple):
    """How many times longer, with its standard deviation; None where it queues behind the all-reduce."""

    factor: float | None
    factor_sd: float
    remarks: tuple[Remark, ...]


class BesideCosts:
    """Slow-downs of calls beside all-reduces in flight, through one library."""

    def __init__(self, profile: Profile, backend: str) -> None:
        self._entries = [entry for entry in profile.beside_all_reduce if entry.library == backend]

    def slowdown(self, operation: str, level: str, spanned: str, seconds: float) -> Beside:
        """Of a call without an all-reduce; what was measured at its level beside all-reduces at theirs, else the most
        alike.

        What was not measured queues behind the all-reduce, and that is said.

        Args:
            spanned: level of the all-reduces. seconds: of the call, above 0.
        """
        if not self._entries:
            text = (
                "calls that are waited for beside all-reduces were not measured, they queue behind them: paradl-bench"
                " collectives --beside-all-reduce"
            )
            return Beside(None, 0.0, (Remark(text, True),))
        wanted = operation, level, spanned
        entry = min(self._entries, key=lambda each: [a != b for a, b in zip(_about(each), wanted, strict=True)])
        remarks: tuple[Remark, ...] = ()
        if _about(entry) != wanted:
            # Calls inside of groups whose gradients go over more ranks are swept by an option of its own.
            how = (
                ""
                if spanned == level
                else "; measure it: paradl-bench collectives --side-by-side R --beside-all-reduce"
            )
            remarks = (Remark(f"{_in_words(wanted)}: as {_in_words(_about(entry))}{how}", True),)
        if entry.queues:
            return Beside(None, 0.0, remarks)
        (added, both), (_, slope) = entry.covariance
        variance = added / seconds**2 + 2 * both / seconds + slope
        return Beside(entry.slowdown(seconds), math.sqrt(max(variance, 0.0)), remarks)


def _about(entry: BesideAllReduce) -> tuple[str, str, str]:
    return entry.operation, entry.level, entry.spanned


def _in_words(about: tuple[str, str, str]) -> str:
    operation, level, spanned = about
    return f"{operation} at level {level!r} beside an all-reduce at level {spanned!r}"
