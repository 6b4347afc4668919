"""Sleeping for seconds that add up: what one sleep took too long, the next ones are shorter by.

A sleep ends late, by 50 to 200 us on a virtual machine, and a layer may take less than that. What is owed is therefore
kept in an account, in which a sleep books what the clock says it took: over an iteration the error is that of the last
sleep, not their sum. Nothing is spun for: ranks of an emulated cluster share cores, and one would spin on what another
needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Iterator
from typing import Literal

Slept = Literal["FW", "BW", "WU"]

SHORTEST_S = 5e-5
"""What is owed below that waits for the next sleep: asking the kernel takes about as long."""
MOST_PAID_BACK_S = 1e-3
"""Of what sleeps took too long. A rank that overslept by more was kept from its core, as a device would not have been,
but what waited for it has waited, and is not undone by what follows."""
_SET_TIMER_SLACK = 29


class Sleeper:
    """Sleeps of one rank.

    Args:
        dilate: how many times as long as asked.

    Attributes:
        asked_s: by phase, dilated seconds that were asked for since :meth:`take_asked`.
    """

    def __init__(self, dilate: float = 1.0) -> None:
        if not 0 < dilate < math.inf:
            raise ValueError(f"dilate has to be finite and more than 0, not {dilate}")
        self.dilate = dilate
        self.asked_s: dict[Slept, float] = {}
        self._owed_s = 0.0
        self._awake = False

    def sleep(self, phase: Slept, seconds: float) -> None:
        """Sleep for ``seconds``, dilated, less what sleeps before took too long."""
        asked = seconds * self.dilate
        self.asked_s[phase] = self.asked_s.get(phase, 0.0) + asked
        if self._awake:
            return
        self._owed_s += asked
        if self._owed_s < SHORTEST_S:
            return
        begin = time.perf_counter()
        time.sleep(self._owed_s)
        self._owed_s = max(self._owed_s - (time.perf_counter() - begin), -MOST_PAID_BACK_S)

    def take_asked(self) -> dict[str, float]:
        """What was asked for since the last call, by phase."""
        asked, self.asked_s = self.asked_s, {}
        return {str(phase): seconds for phase, seconds in asked.items()}

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, nothing is slept: what is left is what the host needs."""
        self._awake = True
        try:
            yield
        finally:
            self._awake = False


def wake_in_time() -> None:
    """Have the kernel end this thread's sleeps when they are over, and not up to 50 us later (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
