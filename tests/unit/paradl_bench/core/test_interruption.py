"""SIGTERM and SIGINT: they unwind a command, and wait for what must not be broken off."""

from __future__ import annotations

import os
import signal
import sys

import click
import pytest

from paradl_bench.core.interruption import Terminated, signals_raise, uninterrupted
from paradl_bench.core.terminal.command_line import run_command


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_unwinds_after_the_current_write(number: signal.Signals, error: type[BaseException]) -> None:
    done = []

    @signals_raise()
    def write() -> None:
        with uninterrupted():
            os.kill(os.getpid(), number)
            with uninterrupted():
                done.append("inside")
            done.append("written")
        done.append("never")

    with pytest.raises(error):
        write()
    assert done == ["inside", "written"]


def test_a_second_sigterm_does_not_interrupt_cleanup_of_the_first() -> None:
    cleaned = []

    @signals_raise()
    def clean() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)

    with pytest.raises(Terminated):
        clean()
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_somebody_else_handles_stays_as_it_is() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with signals_raise():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("program", "kept"),
    [("paradl-bench", "what was measured is kept"), ("calibrate", "no file is left half written")],
)
def test_a_command_that_is_ended_says_how_to_go_on(
    program: str, kept: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    @click.argument("name")
    def command(name: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "argv", [program, "a b"])
    with pytest.raises(SystemExit) as caught:
        run_command(command, program)
    assert caught.value.code == 3
    printed = capsys.readouterr().err.strip()
    assert printed == (
        f"{program}: error: ended by SIGTERM (time limit?); {kept}: run the same command again to go on:"
        f" {program} 'a b'"
    )
