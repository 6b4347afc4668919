"""``--format`` of ``predict``: one set of columns in Python, CSV and Parquet, whatever is predicted."""

from __future__ import annotations

import builtins
import csv
import io
from pathlib import Path
from typing import Any

import pandas
import pytest
from predict_caller import Caller

from predict import load_profile


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path, monkeypatch, capfd)


def test_columns_of_csv_and_parquet_are_those_of_the_frame(predict: Caller) -> None:
    asked = ("--strategy", "d2", "--batch", "8")
    frame = load_profile(predict.profile).predict("chain", "d2", batch=8).to_frame()
    other = predict("--strategy", "serial", "--batch", "8", "--dataset-samples", "64", "--csv")
    header, row = csv.reader(io.StringIO(predict(*asked, "--csv").out))
    assert header == list(frame.columns) == next(csv.reader(io.StringIO(other.out)))
    assert float(row[header.index("iteration_s")]) == frame.iteration_s[0]
    target = predict.folder / "found.parquet"
    assert predict(*asked, "-o", str(target)).out.startswith("chain"), "the name's end says the form; a table is shown"
    pandas.testing.assert_frame_equal(pandas.read_parquet(target), frame, check_dtype=False)


def test_markdown_has_the_tables_for_a_person(predict: Caller) -> None:
    lines = predict("--strategy", "serial,d2", "--batch", "8", "--format", "markdown").out.splitlines()
    head = lines.index("| strategy | ranks | batch | iteration | 90% | samples/s | efficiency | memory |")
    assert lines[head + 1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert [line.split(" | ")[0] for line in lines[head + 2 : head + 4]] == ["| serial", "| d2"]
    refused = predict("--strategy", "serial", "--batch", "8", "--format", "markdown", "-o", "found.md")
    assert refused.code == 2
    assert "leave -o out, and redirect standard output" in refused.err


def test_words_for_a_form_exclude_each_other(predict: Caller) -> None:
    asked = ("--strategy", "serial", "--batch", "8")
    assert predict(*asked, "--format", "json", "--json").json()[0]["strategy"] == "serial"
    said = predict(*asked, "--format", "csv", "--json").err
    assert said == "predict: error: --json and --format csv exclude each other: give one\n"
    assert "give options after the command what-if, not before it" in predict.bare("--json", "what-if").err


def test_without_pyarrow_one_line_says_what_to_install(predict: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any) -> Any:
        if name == "pyarrow":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", absent)
    result = predict("--strategy", "serial", "--batch", "8", "-o", "found.parquet")
    assert (result.code, result.err) == (2, "predict: error: Parquet needs pyarrow: pip install 'paradl[parquet]'\n")


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        (("search", "--ranks", "2"), ("place", "strategy", "iteration_s", "interval_low_s", "memory_bytes")),
        (("timeline", "--strategy", "d2"), ("role", "stream", "start_s", "end_s")),
        (("what-if", "--strategy", "d2"), ("varied", "iteration_s", "speedup_over_base")),
        (("buckets", "--strategy", "d2"), ("grouping", "iteration_s", "gain_interval_low", "best")),
        (("diagnose", "--strategy", "d2"), ("limitation", "share_interval_high", "state", "remedy_gain")),
    ],
)
def test_other_commands_print_their_frames(predict: Caller, command: tuple[str, ...], columns: tuple[str, ...]) -> None:
    first, *more = command
    arguments = ("--from-profile", str(predict.profile), "--model", "chain", "--batch", "8", *more)
    found = pandas.read_csv(io.StringIO(predict.bare(first, *arguments, "--format", "csv").out))
    assert set(columns) <= set(found.columns)
    assert len(found)
    table = predict.bare(first, *arguments, "--format", "markdown").out
    assert "| --- |" in table
