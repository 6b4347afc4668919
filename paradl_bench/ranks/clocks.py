"""Clocks: a monotonic one on a CPU, events on a GPU, behind one interface.

A stamp marks a point in the stream of work; the seconds between two stamps are read after :meth:`synchronise`, so that
a GPU is never stopped to be timed.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Stamps and the seconds between them."""

    def stamp(self) -> Any:
        """Mark this point of the work."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one stamp to another."""

    def synchronise(self) -> None:
        """Wait until all stamps have come to pass."""


class CpuClock:
    """``time.perf_counter``; CPU work is done when the call returns."""

    stamp = staticmethod(time.perf_counter)

    def seconds(self, start: float, end: float) -> float:
        """Seconds from start to end."""
        return end - start

    def synchronise(self) -> None:
        """Nothing to wait for."""


class ThreadClock(CpuClock):
    """Time that the calling thread had a core (``time.thread_time``): what others took of it meanwhile is left out.

    For kernels of one thread. Waiting, sleeping and work of other threads count nothing.
    """

    stamp = staticmethod(time.thread_time)


class CudaClock:
    """CUDA events on the current stream."""

    def stamp(self) -> torch.cuda.Event:
        """Record an event now."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds of GPU time between two events that have completed."""
        return float(start.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        """Wait until all events have completed."""
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
