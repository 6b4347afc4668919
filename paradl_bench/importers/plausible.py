"""What no machine does: rows of other tools' files that hold it are dropped."""

from __future__ import annotations

from paradl_bench.core.bounds import MOST_BYTES, MOST_RANKS

LONGEST_CALL_S = 86400.0
"""A day: no call of a collective and no layer takes longer."""
FASTEST_BYTES_PER_S = 1e18
"""A message's bytes over its time. A lone rank's call in place moves nothing, and seems to reach 1e15."""


def implausible_time(seconds: float) -> str | None:
    """Why a call or a layer can't take so long; None where it can."""
    return "no call takes that long" if seconds > LONGEST_CALL_S else None


def implausible_call(ranks: int, message_bytes: int, seconds: float) -> str | None:
    """Why no collective can have been so; None where one can."""
    if ranks > MOST_RANKS:
        return f"{ranks} ranks: no more than {MOST_RANKS} are taken"
    if message_bytes > MOST_BYTES:
        return f"{message_bytes} bytes: no message is that large"
    if seconds > 0 and message_bytes / seconds > FASTEST_BYTES_PER_S:
        return f"{message_bytes} bytes in {seconds:g} s: no link is that fast"
    return implausible_time(seconds)
