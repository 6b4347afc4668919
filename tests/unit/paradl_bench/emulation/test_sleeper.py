"""The sleeper: what is slept adds up to what was asked for, whatever ends late or passes between sleeps."""

from __future__ import annotations

import pytest
from ghost_clock import Clock

from paradl_bench.emulation.sleeper import Sleeper


def turn(sleeper: Sleeper) -> None:
    """Begin a forward or backward, and its first layer, which takes nothing."""
    sleeper.begin_turn()
    sleeper.ask("FW", 0.0)


def test_nobody_sleeps_until_somebody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper(dilate=3.0)
    turn(sleeper)
    for _ in range(100):
        # The host dispatches ahead of what it dispatches.
        clock.now += 1e-4
        sleeper.ask("FW", 1e-3)
    # Each offer of the core takes the clock a microsecond.
    assert (clock.now, clock.sleeps) == (pytest.approx(0.01 + 101e-6), 0)
    sleeper.settle()
    assert (clock.now, clock.sleeps) == (pytest.approx(0.3, abs=2e-6), 1)
    assert sleeper.take_asked() == pytest.approx({"FW": 0.3})
    assert sleeper.take_asked() == {}
    sleeper.settle()
    assert clock.sleeps == 1


def test_a_rank_offers_its_core_with_each_layer_it_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper, offered = Clock(monkeypatch, late_s=0.0), Sleeper(), []
    monkeypatch.setattr("paradl_bench.emulation.sleeper.offer_core", lambda: offered.append(clock.now))
    turn(sleeper)
    for _ in range(5):
        clock.now += 1e-4
        sleeper.ask("FW", 1e-3)
    assert offered == pytest.approx([0.0, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4])


@pytest.mark.parametrize("each_s", [1e-5, 2e-4, 3e-3])
def test_sleeps_that_end_late_add_up_to_what_was_asked(each_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=1.5e-4), Sleeper(dilate=3.0)
    turn(sleeper)
    late = []
    for count in range(1, 1001):
        sleeper.ask("FW", each_s)
        sleeper.settle()
        late.append(clock.now - 3 * count * each_s)
    # The kernel is asked for earlier ends once it is known to be late; what one took too long the next are shorter by.
    assert max(late) <= clock.late_s
    assert max(late[-100:]) <= 2e-6
    assert min(late) >= -1e-12


def test_a_kernel_late_by_milliseconds_causes_no_busy_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=5e-3), Sleeper()
    turn(sleeper)
    for _ in range(200):
        sleeper.ask("FW", 0.1)
        sleeper.settle()
    clock.late_s, before = 0.0, clock.sleeps
    at, offered = clock.now, []
    monkeypatch.setattr(
        "paradl_bench.emulation.sleeper.offer_core", lambda: (offered.append(clock.now), clock._offer())
    )
    sleeper.ask("FW", 0.2)
    sleeper.settle()
    assert clock.sleeps == before + 1
    assert clock.now > at
    assert len(offered) <= 301


def test_a_delayed_rank_catches_up_until_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.5), Sleeper()
    turn(sleeper)
    sleeper.ask("BW", 1.0)
    sleeper.settle()
    late_s = clock.now - 1.0
    assert late_s == pytest.approx(0.5, abs=1e-3)
    clock.late_s = 0.0
    # A message, for which it would have waited longer had it been in time: it is late by what is left.
    sleeper.span_began("halo")
    clock.now += 0.3
    sleeper.span_ended("halo")
    sleeper.ask("BW", 1.0)
    sleeper.settle()
    assert clock.now == pytest.approx(1.0 + late_s + 0.3 + 1.0 - (late_s - 0.3), abs=1e-5)
    clock.late_s, before = 0.5, clock.now
    sleeper.ask("BW", 1.0)
    sleeper.settle()
    clock.late_s, late_s = 0.0, clock.now - before - 1.0
    sleeper.span_began("halo")
    clock.now += 0.7
    sleeper.span_ended("halo")
    sleeper.ask("BW", 1.0)
    sleeper.settle()
    # Never earlier than with sleeps that end in time.
    assert clock.now == pytest.approx(before + 1.0 + late_s + 0.7 + 1.0, abs=1e-5)


def test_work_on_gradients_is_real_and_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    turn(sleeper)
    sleeper.ask("BW", 1.0)
    clock.now += 0.25
    # The layer is over when its gradients arrive; two of them are copied.
    sleeper.work()
    assert clock.now == pytest.approx(1.0, abs=2e-6)
    clock.now += 0.5
    sleeper.work()
    clock.now += 0.25
    sleeper.ask("BW", 2.0)
    clock.now += 0.125
    sleeper.settle()
    assert clock.now == pytest.approx(1.0 + 0.75 + 2.0, abs=4e-6)


@pytest.mark.parametrize("host_s", [0.0, 0.02])
def test_a_turn_after_waiting_takes_as_long_as_any(host_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    sleeper.host_s = {"FW": host_s}
    sleeper.begin_turn()
    sleeper.ask("WU", 0.1)
    sleeper.begin_turn()
    for _ in range(3):
        # A stage waits for what it is sent, and then has its micro-batch.
        clock.now += 0.5
        sleeper.span_began("FW")
        begin = clock.now
        for _ in range(2):
            clock.now += host_s
            sleeper.ask("FW", 0.1)
        sleeper.span_ended("FW")
        # Of what passes until a turn's first layer, the host's own time is known as far as it was measured.
        assert clock.now - begin == pytest.approx(0.2, abs=4e-6)


def test_who_is_awake_asks_and_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    with sleeper.awake():
        sleeper.ask("WU", 1.0)
        sleeper.work()
        sleeper.settle()
    assert (clock.sleeps, sleeper.take_asked()) == (0, {"WU": 1.0})
    # Nor is what was done with gradients meanwhile anything to come behind.
    clock.now += 0.25
    sleeper.settle()
    assert sleeper.due == 0
    turn(sleeper)
    sleeper.ask("WU", 1.0)
    sleeper.settle()
    assert clock.now == pytest.approx(1.25, abs=2e-6)
    assert sleeper.calls == {"FW": 1, "WU": 1}


def test_time_awake_shortens_no_sleep_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    turn(sleeper)
    sleeper.ask("WU", 1.0)
    sleeper.settle()
    # On a busy host it takes long until a warm-up begins.
    clock.now += 8.0
    with sleeper.awake():
        turn(sleeper)
        sleeper.begin_turn()
    clock.now += 0.5
    for _ in range(2):
        begin = clock.now
        turn(sleeper)
        sleeper.ask("FW", 1.0)
        sleeper.begin_turn()
        assert clock.now - begin == pytest.approx(1.0, abs=4e-6)


def test_host_time_between_sleeps_is_kept_by_phase_when_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    sleeper.ask("FW", 1.0)
    with sleeper.watched() as gaps:
        for phase, host_s in (("FW", 0.25), ("FW", 0.5), ("BW", 2.0)):
            clock.now += host_s
            sleeper.ask(phase, 1.0)
            if phase == "FW":
                sleeper.settle()
    clock.now += 8.0
    sleeper.ask("BW", 1.0)
    assert gaps == {"FW": pytest.approx([0.25, 0.5], abs=2e-6), "BW": pytest.approx([2.0], abs=2e-6)}


def test_an_awake_sleeper_keeps_host_time_between_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    with sleeper.awake(), sleeper.watched() as gaps:
        for phase, host_s in (("FW", 0.25), ("FW", 0.5), ("BW", 2.0)):
            clock.now += host_s
            sleeper.ask(phase, 1.0)
            sleeper.settle()
    assert gaps == {"FW": pytest.approx([0.25, 0.5], abs=2e-6), "BW": pytest.approx([2.0], abs=2e-6)}
    assert clock.sleeps == 0


@pytest.mark.parametrize("dilate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_dilation_is_positive(dilate: float) -> None:
    with pytest.raises(ValueError, match="dilate"):
        Sleeper(dilate)
