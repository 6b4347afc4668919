"""Tables of all commands: where a column runs from, and which are left out."""

from __future__ import annotations

from io import StringIO

from rich.text import Text

from paradl_bench.core.terminal.plain_console import PlainConsole
from paradl_bench.core.terminal.tables import table


def test_columns_of_numbers_run_from_the_right() -> None:
    rows = [
        ("conv1", "x8", "-3 ms", "±1%", "x/ 2"),
        (Text("fc", style="bold"), "x4d2", "not known", "2%", "-"),
        ("a", "x2", "1 s", "", "3"),
    ]
    found = table(("layer", "strategy", "time", "spread", "times"), rows)
    assert [column.justify for column in found.columns] == ["left", "left", "right", "right", "right"]


def test_a_column_empty_in_all_rows_is_left_out() -> None:
    found = table(("a", "b", "c"), [("1", "", Text("2")), ("3", "", Text("4"))])
    assert [column.header for column in found.columns] == ["a", "c"]
    assert [column.header for column in table(("a", "b"), []).columns] == ["a", "b"]


def test_each_part_repeats_all_columns_that_tell_rows_apart() -> None:
    rows = [("all_reduce", "", regime, *("x" * 8 for _ in range(6))) for regime in ("small", "large")]
    console = PlainConsole(file=StringIO(), width=50)
    console.print(table(("operation", "level", "regime", *(f"column {at}" for at in range(6))), rows))
    lines = console.file.getvalue().splitlines()
    parts = [line for line in lines if "operation" in line]
    assert len(parts) > 1
    assert all("regime" in line for line in parts)
    assert sum("small" in line for line in lines) == len(parts)


def test_a_column_of_words_breaks_though_cells_begin_with_numbers() -> None:
    rows = [("d6p64t8", "1f1b, 512 micro-batches, recompute all, cap 128 MiB", "37.1 s", "53%")]
    console = PlainConsole(file=StringIO(), width=60)
    found = table(("strategy", "settings", "iteration", "efficiency"), rows, words=("settings",))
    console.print(found)
    assert [column.justify for column in found.columns] == ["left", "left", "right", "right"]
    assert sum("d6p64t8" in line for line in console.file.getvalue().splitlines()) == 1
