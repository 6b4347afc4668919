"""What other programs print and how they end, as it is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.core.terminal.printed import ending, plain, plain_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m\x07", "red"),
        ("\x1b]0;a title\x07text\x1b]8;;http://x\x1b\\link", "textlink"),
        ("\x1b[?25l\x1b(Bplain\x1b[2K\x1b[38:5:1m\x1bM", "plain"),
        ("a\tb\x00\x9b31mc", "a\tb31mc"),
        ("torn \x1b[3", "torn [3"),
        ("Größe 5 µs", "Größe 5 µs"),
    ],
)
def test_escapes_and_control_characters_are_left_out(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(st.text(st.sampled_from("\x1b[]\x07\x9b;0m\\ab\r\n\t"), max_size=40))
def test_nothing_that_a_terminal_would_obey_is_left(text: str) -> None:
    assert not {c for line in plain_lines(text) for c in line if c < " " or "\x7f" <= c <= "\x9f"} - {"\t"}


def test_lines_overwritten_by_a_progress_bar_are_kept_apart() -> None:
    assert plain_lines("10%\r20%\r\n\n  done  \n") == ["10%", "20%", "  done"]


def test_an_ending_names_the_signal() -> None:
    assert [ending(code) for code in (7, -9, -15, -99)] == [
        "exit code 7",
        "killed by signal 9 (SIGKILL)",
        "killed by signal 15 (SIGTERM)",
        "killed by signal 99 (unknown)",
    ]
