"""How long a rank's thread keeps a core that others wait for, while emulated nodes are up.

Ranks of emulated nodes run under ``SCHED_RR``, whose time slice is 100 ms. A rank and gloo's thread share a core. While
the rank computes, gloo's thread waits for the end of the slice, and what it has to send or to receive waits with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from paradl_bench.records.emulation import LINUX_TIME_SLICE_MS

SHORT_MS = 4
"""The shortest that every kernel has: a tick of the slowest usual clock, 250 a second."""
_SYSCTL = Path("/proc/sys/kernel/sched_rr_timeslice_ms")


@contextlib.contextmanager
def short_time_slices() -> Iterator[int]:
    """Shorten the host's time slice under ``SCHED_RR`` for as long as the body lasts.

    A container may forbid it. Returns the milliseconds that hold.
    """
    before_ms = _read_ms()
    if before_ms <= SHORT_MS:
        # Who made it short takes it back, as other emulated nodes that are up.
        yield before_ms
        return
    _write_ms(SHORT_MS)
    try:
        yield _read_ms()
    finally:
        _write_ms(before_ms)


def _read_ms() -> int:
    try:
        return int(_SYSCTL.read_text())
    except (OSError, ValueError):
        return LINUX_TIME_SLICE_MS


def _write_ms(milliseconds: int) -> None:
    with contextlib.suppress(OSError):
        _SYSCTL.write_text(str(milliseconds))
