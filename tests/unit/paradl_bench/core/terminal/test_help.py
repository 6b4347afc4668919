"""Help in groups names every option once; shells complete what it names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from calibrate.cli import group as calibrate
from paradl_bench.cli import group as bench
from predict.cli import group as predict

ROOT = Path(__file__).parents[5]
PROGRAMS = {"paradl-bench": bench, "calibrate": calibrate, "predict": predict}
LONG = [
    ("predict", ""),
    ("predict", "what-if"),
    ("paradl-bench", "train"),
    ("paradl-bench", "layers"),
    ("paradl-bench", "collectives"),
]


def help_of(program: str, command: str, flag: str) -> str:
    words = [command] if command else []
    done = CliRunner().invoke(PROGRAMS[program], [*words, flag], prog_name=program, terminal_width=80)
    assert done.exit_code == 0, done.output
    return done.output


def run(program: str, *words: str) -> str:
    """What a process prints in a terminal of 80 columns; click leaves two of them free."""
    started = [sys.executable, "-m", program.replace("-", "_"), *words]
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    return subprocess.run(started, env=environment, capture_output=True, text=True, check=True).stdout


def flags(program: str, command: str) -> list[str]:
    group = PROGRAMS[program]
    found: click.Command | None = group.get_command(click.Context(group), command) if command else group
    assert found is not None
    return [each.opts[-1] for each in found.params if isinstance(each, click.Option) and not each.hidden]


@pytest.mark.parametrize(("program", "command"), LONG)
def test_short_help_fits_two_screens_and_names_all(program: str, command: str) -> None:
    shown = run(program, *command.split(), "--help")
    assert len(shown.splitlines()) <= 100, "two screens of 50 lines"
    assert max(map(len, shown.splitlines())) > 70, "as wide as in a terminal of 80 columns"
    assert [flag for flag in flags(program, command) if flag not in shown] == []
    assert "More options (explained by --help-all):" in shown


@pytest.mark.parametrize(("program", "command"), LONG)
def test_full_help_explains_every_option(program: str, command: str) -> None:
    lines = help_of(program, command, "--help-all").splitlines()
    explained = {word for line in lines if line.startswith("  -") for word in line.replace(",", " ").split()}
    assert [flag for flag in flags(program, command) if flag not in explained] == []


def test_few_options_are_all_explained_in_groups() -> None:
    shown = help_of("predict", "devices", "--help")
    assert "Output:" in shown
    assert "--help-all" not in shown
    assert help_of("predict", "devices", "--help-all") == shown


def installed(tmp_path: Path, program: str) -> dict[str, str]:
    """An environment in which the program is found by its name."""
    script = tmp_path / program
    module = program.replace("-", "_")
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m {module} "$@"\n')
    script.chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("program", "words", "found"),
    [
        ("predict", "--knee --ran", {"--ranks", "--ranks-per-node"}),
        ("paradl-bench", "layers --ranks", {"--ranks-on-host"}),
    ],
)
def test_bash_completes_an_option(tmp_path: Path, program: str, words: str, found: set[str]) -> None:
    function = f"_{program.replace('-', '_')}_completion"
    asked = [program, *words.split()]
    script = (
        f'eval "$({program} --show-completion bash)"; COMP_WORDS=({" ".join(asked)}); COMP_CWORD={len(asked) - 1};'
        f' {function} {program}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    command = ["bash", "-c", script]
    done = subprocess.run(command, env=installed(tmp_path, program), capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == found, done.stderr


@pytest.mark.parametrize(("shell", "answer"), [("zsh", "plain\n--knee\n"), ("fish", "plain,--knee")])
def test_other_shells_get_the_same_answers(tmp_path: Path, shell: str, answer: str) -> None:
    environment = installed(tmp_path, "predict")
    script = help_of("predict", "", f"--show-completion={shell}")
    assert f"_PREDICT_COMPLETE={shell}_complete" in script
    asked = {
        "_PREDICT_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "predict --kn" if shell == "zsh" else "predict",
        "COMP_CWORD": "1" if shell == "zsh" else "--kn",
    }
    done = subprocess.run(["predict"], env=environment | asked, capture_output=True, text=True, check=False)
    assert answer in done.stdout, done.stderr
