"""Work that copies of a process do a part of."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
from network_factory import small_cnn
from search_cases import found, profile_of

from calibrate.profile.profile import write_profile
from predict.search.candidates import parts
from predict.search.processes import find_each


class Found(msgspec.Struct, frozen=True):
    """What is found of a number."""

    square: int
    by: int


@pytest.fixture(autouse=True)
def _two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on three cores, beside whatever threads the tests run in."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def slowly(number: int) -> Found:
    time.sleep(0.02)
    return Found(number**2, os.getpid())


def test_answers_of_all_processes_come_in_order() -> None:
    answers = find_each(slowly, range(300, 400), Found)
    assert [answer.square for answer in answers] == [number**2 for number in range(300, 400)]
    assert len({answer.by for answer in answers}) == 3


def test_other_threads_leave_all_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert {answer.by for answer in find_each(slowly, range(9), Found)} == {os.getpid()}


def test_what_an_ended_copy_had_is_found_again() -> None:
    first = os.getpid()

    def find(number: int) -> Found:
        if os.getpid() != first:
            os.kill(os.getpid(), signal.SIGKILL)
        return slowly(number)

    assert [answer.square for answer in find_each(find, range(9), Found)] == [number**2 for number in range(9)]


def test_an_items_error_is_raised_and_no_copy_stays(capfd: pytest.CaptureFixture[str]) -> None:
    def find(number: int) -> Found:
        if number == 5:
            raise ValueError("five")
        return slowly(number)

    with pytest.raises(ValueError, match="five"):
        find_each(find, range(9), Found)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert capfd.readouterr().err == ""


def test_a_search_in_several_processes_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(tmp_path / "p.json", profile_of(small_cnn(6, 2)))
    asked = tmp_path / "p.json", "--ranks", "8", "--batch", "16", "--memory", "200kB"
    alone = found(*asked, model="small")
    assert alone["searched"][0]["too_large"] > 100
    monkeypatch.setattr(parts, "_MANY", 0)
    called: list[int] = []

    def counted(*arguments: object) -> object:
        called.append(1)
        return find_each(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(parts, "find_each", counted)
    assert found(*asked, model="small") == alone
    assert called
