"""Sleeping for seconds that add up: what one sleep took too long, the next ones are shorter by.

A sleep ends late, by 50 to 200 us on a virtual machine, or by milliseconds where others have the core, and a layer may
take less than that. What is owed is therefore kept in an account, in which a sleep books what the clock says it took:
over an iteration the error is that of the last sleep, not their sum. Nothing is spun for: ranks of an emulated cluster
share cores, and one would spin on what another needs.

A rank that is late catches up until it waits for somebody: between two ghosts, time beyond what dispatching a layer
takes is communication, during which it would have waited, had it been in time. What it waits is taken off what it is
late by, so that nothing ends earlier than it would with sleeps that end in time.

What the host takes to dispatch a layer stands in for a part of its sleep: a layer's seconds hold the framework's own
(the share of the time between operations), which a rank that slept them whole would take twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from paradl_bench.emulate.draws import IterationDraws

Slept = Literal["FW", "BW", "WU"]

SHORTEST_S = 5e-5
"""What is owed below that waits for the next sleep: asking the kernel takes about as long."""
_SET_TIMER_SLACK = 29


class Sleeper:
    """Sleeps of one rank.

    Args:
        dilate: how many times as long as asked.

    Attributes:
        asked_s: by phase, dilated seconds that were asked for since :meth:`take_asked`, before anything is drawn.
            calls: by phase, how often.
        host_s: by phase, what the host takes for one call, which is taken off what is slept as far as it was taken;
            nothing until measured.
        draws: of the iteration that runs; None where sleeps take what is asked for.
    """

    def __init__(self, dilate: float = 1.0) -> None:
        if not 0 < dilate < math.inf:
            raise ValueError(f"dilate has to be finite and more than 0, not {dilate}")
        self.dilate = dilate
        self.asked_s: dict[Slept, float] = {}
        self.calls: dict[Slept, int] = {}
        self.host_s: Mapping[str, float] = {}
        self.draws: IterationDraws | None = None
        self._owed_s = 0.0
        self._ended = time.perf_counter()
        self._awake = False
        self._gaps: dict[Slept, list[float]] | None = None

    def sleep(self, phase: Slept, seconds: float, own_relative_sd: float = 0.0) -> None:
        """Sleep for ``seconds``, dilated, less what the host took for it and what sleeps before took too long.

        Args:
            own_relative_sd: how the event spreads by itself, where sleeps are drawn.
        """
        asked = seconds * self.dilate
        self.asked_s[phase] = self.asked_s.get(phase, 0.0) + asked
        self.calls[phase] = self.calls.get(phase, 0) + 1
        if self._awake:
            return
        if self.draws is not None:
            asked *= self.draws.factor(own_relative_sd)
        begin = time.perf_counter()
        since_s = begin - self._ended
        if self._gaps is not None:
            self._gaps.setdefault(phase, []).append(since_s)
        dispatch_s = min(since_s, self.host_s.get(phase, 0.0))
        if self._owed_s < 0:
            self._owed_s = min(0.0, self._owed_s + since_s - dispatch_s)
        self._owed_s += asked - dispatch_s
        self._ended = begin
        if self._owed_s < SHORTEST_S:
            return
        time.sleep(self._owed_s)
        self._ended = time.perf_counter()
        self._owed_s -= self._ended - begin

    def take_asked(self) -> dict[str, float]:
        """What was asked for since the last call of this, by phase; calls are counted anew from here as well."""
        asked, self.asked_s = self.asked_s, {}
        self.calls = {}
        return {str(phase): seconds for phase, seconds in asked.items()}

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, nothing is slept: what is left is what the host needs."""
        self._awake = True
        try:
            yield
        finally:
            self._awake = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[Mapping[Slept, Sequence[float]]]:
        """Inside, what passes from a sleep to the next is kept, by the phase of the latter."""
        gaps: dict[Slept, list[float]] = {}
        self._gaps = gaps
        try:
            yield gaps
        finally:
            self._gaps = None


def wake_in_time() -> None:
    """Have the kernel end this thread's sleeps when they are over, and not up to 50 us later (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
