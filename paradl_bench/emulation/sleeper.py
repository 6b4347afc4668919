"""Sleeping in the place of compute: seconds are asked for, and slept where somebody would see that compute is over.

What is asked for runs one after the other, as on a device beside the host. The host goes on at once and dispatches what
follows; it settles, which is to wait until all that was asked for is over, before it communicates, before gradients
that have arrived are worked on, and where a turn at forward, backward or update ends. So the host's own time lies
beside compute and not between two pieces of it (the seconds of layers hold the framework's own already), and a rank
wakes up as often as it is seen. A rank offers its core with each layer that it dispatches. Else one whose call is over
would keep those that share the core from ending theirs, for as long as it dispatches: a device has a host of its own.

A sleep ends late, by 50 to 200 us on a virtual machine. It is asked to end as much earlier, and what is left passes in
offers of the core to whoever is ready there. Who is late none the less, because others have the core, catches up until
it waits for somebody: what it waits is taken off what it is late by, during which it would have waited, had it been in
time. So nothing ends earlier than it would with sleeps that end in time.

Where it is not known what a rank waits for, between two turns, what the host is known to take for a call is its own,
and the rest is waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from paradl_bench.emulation.draws import IterationDraws

Slept = Literal["FW", "BW", "WU"]

_EARLY_AT_FIRST_S, _EARLIEST_S = 1e-4, 3e-4
"""How long before compute is over the kernel is asked to end a sleep; it does so 50 to 200 us late."""
_STEP_S, _IN_TIME = 1e-5, 0.9
"""How far that moves with each sleep, so that nine of ten end in time."""
_TURNS = ("FW", "BW")
_SET_TIMER_SLACK = 29
_LIBC = ctypes.CDLL(None)


class Sleeper:
    """What stands for the compute of one rank.

    Args:
        dilate: how many times as long as asked.

    Attributes:
        asked_s: by phase, dilated seconds that were asked for since :meth:`take_asked`, before anything is drawn.
            calls: by phase, how often.
        host_s: by phase, what the host takes for one call at most as a turn begins, where it is not known what the rank
            waits for; nothing until measured.
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
        self._early_s = _EARLY_AT_FIRST_S
        self._due = self._left = self._seen = time.perf_counter()
        self._in_turn = False
        self._works_since: float | None = None
        self._communicates_since = 0.0
        self._awake = False
        self._gaps: dict[Slept, list[float]] | None = None

    def ask(self, phase: Slept, seconds: float, own_relative_sd: float = 0.0) -> None:
        """Compute for ``seconds``, dilated, behind what was asked for before; :meth:`settle` waits for the end of it.

        Args:
            own_relative_sd: how the event spreads by itself, where sleeps are drawn.
        """
        asked = seconds * self.dilate
        self.asked_s[phase] = self.asked_s.get(phase, 0.0) + asked
        self.calls[phase] = self.calls.get(phase, 0) + 1
        now = time.perf_counter()
        if self._gaps is not None:
            self._gaps.setdefault(phase, []).append(now - self._seen)
        self._seen = now
        if self._awake:
            return
        if self.draws is not None:
            asked *= self.draws.factor(own_relative_sd)
        self._end_work(now)
        if not self._in_turn:
            dispatch_s = min(now - self._left, self.host_s.get(phase, 0.0))
            self._wait_was(self._left, now - dispatch_s)
            self._in_turn = True
        self._due += asked
        # A rank that dispatches has time, while its compute lasts. One that communicates has none.
        offer_core()

    def settle(self) -> None:
        """Wait until what was asked for is over: somebody is about to see that it is."""
        if self._awake:
            return
        begin = time.perf_counter()
        self._end_work(begin)
        if begin >= self._due:
            return
        wake = self._due - self._early_s
        if wake > begin:
            time.sleep(wake - begin)
            late = time.perf_counter() > self._due
            self._early_s += _STEP_S * (_IN_TIME if late else _IN_TIME - 1)
            self._early_s = min(max(self._early_s, 0.0), _EARLIEST_S)
        while time.perf_counter() < self._due:
            offer_core()
        self._seen = time.perf_counter()

    @property
    def due(self) -> float:
        """When what was asked for is over, by ``time.perf_counter``."""
        return self._due

    def begin_anew(self) -> None:
        """Owe nothing, from now on."""
        self._due, self._in_turn, self._works_since = time.perf_counter(), True, None

    def begin_turn(self) -> None:
        """What was asked for is over; from here until more is asked for, it is not known what the rank waits for."""
        self.settle()
        if self._in_turn:
            self._left, self._in_turn = time.perf_counter(), False

    def work(self) -> None:
        """A gradient has arrived: what is done with it is real, and follows what was asked for."""
        if self._works_since is None and not self._awake:
            self.settle()
            self._works_since = time.perf_counter()

    def worked(self) -> None:
        """What follows is counted as work until more is asked for."""

    def span_began(self, what: str) -> None:
        """Layer-wise communication begins, or a pipeline's turn."""
        if what in _TURNS:
            self.begin_turn()
        else:
            self.settle()
            self._communicates_since = time.perf_counter()

    def span_ended(self, what: str) -> None:
        """What began last has ended."""
        if what in _TURNS:
            self.begin_turn()
        else:
            self._wait_was(self._communicates_since, time.perf_counter())

    def _end_work(self, now: float) -> None:
        if self._works_since is not None:
            self._due += now - self._works_since
            self._works_since = None

    def _wait_was(self, begin: float, end: float) -> None:
        """Who was late as a wait began is late by what the wait did not take: in time it would have waited longer."""
        late_s = max(0.0, begin - self._due)
        self._due = end - max(0.0, late_s - (end - begin))

    def take_asked(self) -> dict[str, float]:
        """What was asked for since the last call of this, by phase; calls are counted anew from here as well."""
        asked, self.asked_s = self.asked_s, {}
        self.calls = {}
        return {str(phase): seconds for phase, seconds in asked.items()}

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, nothing is slept: what is left is what the host needs. Afterwards nobody is late because of it."""
        self._awake = True
        try:
            yield
        finally:
            self._awake = False
            self._due = self._left = time.perf_counter()
            self._in_turn, self._works_since = False, None

    @contextlib.contextmanager
    def watched(self) -> Iterator[Mapping[Slept, Sequence[float]]]:
        """Inside, what passes from a sleep to the next is kept, by the phase of the latter; of who is awake as well."""
        gaps: dict[Slept, list[float]] = {}
        self._gaps = gaps
        try:
            yield gaps
        finally:
            self._gaps = None


def offer_core() -> None:
    """Let whoever is ready on this core run first; unlike os.sched_yield of Python 3.11 other threads run meanwhile."""
    _LIBC.sched_yield()


def wake_in_time() -> None:
    """Have the kernel end this thread's sleeps when they are over, and not up to 50 us later (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
