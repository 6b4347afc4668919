"""What the three commands share at the terminal: exit codes, one-line errors, output files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.terminal.command_line import refuse_overwrite, run_command, write_output


def run(act: object, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    @click.command()
    @click.option("--count", type=int)
    def command(count: int | None) -> None:
        if isinstance(act, BaseException):
            raise act

    monkeypatch.setattr(sys, "argv", ["prog", *arguments])
    with pytest.raises(SystemExit) as caught:
        run_command(command, "prog")
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("act", "code", "line"),
    [
        (None, 0, ""),
        (UserError("no model\n 'x'"), 2, "prog: error: no model 'x'\n"),
        (WorkError("rank 1 died"), 3, "prog: error: rank 1 died\n"),
        (KeyboardInterrupt(), 3, "prog: error: interrupted; "),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 3, "prog: error: torch is not installed, "),
    ],
)
def test_exit_codes_and_lines(
    act: BaseException | None, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(act, monkeypatch) == code
    printed = capsys.readouterr().err
    assert printed.lstrip("\n").startswith(line)  # click ends the line that ^C stands in
    assert printed.strip("\n").count("\n") == 0


def test_a_wrong_option_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(None, monkeypatch, "--count", "many") == 2
    assert (
        capsys.readouterr().err
        == "prog: error: Invalid value for '--count': 'many' is no whole number: write --count INTEGER\n"
    )


def test_a_traceback_is_for_those_who_ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(UserError("no model"), monkeypatch, "--debug") == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.endswith("prog: error: no model\n")


def test_our_own_error_is_not_reported_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError, match="nonsense"):
        run_and_raise(ModuleNotFoundError("No module named 'nonsense'", name="nonsense"), monkeypatch)


def run_and_raise(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["prog"])
    run_command(command, "prog")


def test_a_file_is_replaced_only_when_asked_to(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    write_output(str(target), b"old")
    with pytest.raises(UserError, match=r"out\.json exists; give --force"):
        write_output(str(target), b"new")
    assert target.read_bytes() == b"old"
    write_output(str(target), b"new", force=True)
    assert target.read_bytes() == b"new"


def test_what_cannot_be_written_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a path through a file, and a folder that is another's, whether or not a file may be replaced."""
    with pytest.raises(UserError, match="is a folder; give a file name"):
        refuse_overwrite(str(tmp_path), force=True)
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UserError, match="is a device or a pipe; give a file name"):
            refuse_overwrite(str(target), force=True)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot write .*/page\.html: .*/file is a file, not a folder"):
        refuse_overwrite(str(tmp_path / "file" / "deeper" / "page.html"), force=False)
    refuse_overwrite(str(tmp_path / "new" / "deeper" / "page.html"), force=False)
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)  # root may write anywhere
    with pytest.raises(UserError, match="you may not write in"):
        refuse_overwrite(str(tmp_path / "page.html"), force=False)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # what an import of a package that is not installed meets
sys.argv = ["paradl-bench", *sys.argv[1:]]
from paradl_bench.cli import main
main()
"""


@pytest.mark.parametrize("arguments", [["models"], ["describe", "resnet18", "-o", "-"]], ids=lambda words: words[0])
def test_without_torch_a_command_names_the_extra_that_brings_it(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr == (
        "paradl-bench: error: torch is not installed, and this command needs it: pip install 'paradl[bench]'\n"
    )
