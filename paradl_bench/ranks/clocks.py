"""Clocks: a monotonic one on a CPU, events on a GPU, behind one interface.

A stamp marks a point in the stream of work; the seconds between two stamps are read after :meth:`synchronise`, so that
a GPU is never stopped to be timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Stamps and the seconds between them."""

    def stamp(self) -> Any:
        """Mark this point of the work."""

    def hold(self) -> None:
        """Keep a device beside the host from starting on what follows, until the host has dispatched an operation."""

    def start(self) -> Any:
        """As :meth:`stamp`, where one operation of many begins: behind a hold."""

    def take_held(self) -> Sequence[tuple[Any, Any]]:
        """Stamps before and after the device was held at each start since this was last asked."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one stamp to another."""

    def synchronise(self) -> None:
        """Wait until all stamps have come to pass."""


class CpuClock:
    """``time.perf_counter``; CPU work is done when the call returns."""

    stamp = start = staticmethod(time.perf_counter)

    def hold(self) -> None:
        """A CPU is its own host, and is never held."""

    def take_held(self) -> Sequence[tuple[float, float]]:
        """Nothing."""
        return ()

    def seconds(self, start: float, end: float) -> float:
        """Seconds from start to end."""
        return end - start

    def synchronise(self) -> None:
        """Nothing to wait for."""


class ThreadClock(CpuClock):
    """Time that the calling thread had a core (``time.thread_time``): what others took of it meanwhile is left out.

    For kernels of one thread. Waiting, sleeping and work of other threads count nothing.
    """

    stamp = start = staticmethod(time.thread_time)


HELD_S = 250e-6
"""How long a GPU is held before an operation: longer than a host takes to dispatch one with its probes."""
_TRIED_CYCLES = 20_000_000


class CudaClock:
    """CUDA events on the current stream."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._cycles = 0

    def stamp(self) -> torch.cuda.Event:
        """Record an event now."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def hold(self) -> None:
        """Let the GPU idle while the host dispatches what follows.

        Else a GPU that is faster than its host would wait between the kernels of an operation, and longer with probes.
        """
        if not self._cycles:
            self._cycles = self._cycles_of(HELD_S)
        torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]

    def start(self) -> torch.cuda.Event:
        """Record an event behind a hold, and remember how long that was."""
        before = self.stamp()
        self.hold()
        after = self.stamp()
        self._held.append((before, after))
        return after

    def _cycles_of(self, seconds: float) -> int:
        """Cycles that the GPU idles for so long, timed by its own events."""
        torch.cuda._sleep(_TRIED_CYCLES)  # type: ignore[no-untyped-call]
        begin = self.stamp()
        torch.cuda._sleep(_TRIED_CYCLES)  # type: ignore[no-untyped-call]
        end = self.stamp()
        torch.cuda.synchronize()
        return round(_TRIED_CYCLES * seconds / self.seconds(begin, end))

    def take_held(self) -> Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Events round all holds since this was last asked."""
        held, self._held = self._held, []
        return held

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds of GPU time between two events that have completed."""
        return float(start.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        """Wait until all events have completed."""
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
