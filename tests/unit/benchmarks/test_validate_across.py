"""The last step of benchmarks/accuracy/strategies.py: intervals held against networks that they count no errors of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ACCURACY = Path(__file__).parents[3] / "benchmarks" / "accuracy"


def across(repeated: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that it runs, where each report holds these configurations."""
    monkeypatch.syspath_prepend(str(ACCURACY))
    import repetitions  # type: ignore[import-not-found]

    commands: list[list[str]] = []

    def run(module: str, arguments: list[str], *, shown: bool = False) -> None:
        commands.append([module, *arguments])
        report = Path(arguments[arguments.index("-o") + 1])
        report.mkdir()
        (report / "report.json").write_text(json.dumps({"repeated": repeated}))

    monkeypatch.setattr(repetitions, "run", run)
    repetitions.validate_across(tmp_path, (["one"], ["two"]))
    return commands


def test_each_half_is_held_against_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [{"strategy": "d2", "by_evaluator": {"simulate": {"covered": covered}}} for covered in (True, False)]
    commands = across(found, tmp_path, monkeypatch)
    assert [("one" in command, "--profile-out" in command) for command in commands] == [
        (True, True),
        (False, False),
        (False, True),
        (True, False),
    ]
    assert "all      2 of 4, 50.0%" in capsys.readouterr().out


def test_runs_that_nobody_repeated_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    across([], tmp_path, monkeypatch)
    assert capsys.readouterr().out == "No configuration was run twice: intervals are held against none.\n"
