"""Time without waiting, for tests of what sleeps for ghost layers."""

from __future__ import annotations

import time

import pytest


class Clock:
    """A clock that sleeping moves, and a little more, and offering the core to others a microsecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
        self.now, self.late_s, self.sleeps = 0.0, late_s, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr("paradl_bench.emulation.sleeper.offer_core", self._offer)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps += 1
        self.now += seconds + self.late_s

    def _offer(self) -> None:
        self.now += 1e-6
