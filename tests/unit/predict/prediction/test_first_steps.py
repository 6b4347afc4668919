"""predict init writes commands that the programs take, and that lead from what one has to an answer."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from calibrate.cli import group as calibrate
from paradl_bench.cli import group as bench
from paradl_bench.core.errors import UserError
from predict.cli import group as predict
from predict.prediction import first_steps

ROOT = Path(__file__).parents[4]
PROFILE = ROOT / "results" / "cpu-2core" / "2026-11-21-ffbe79c" / "accuracy" / "profile.json"
LOGS = ROOT / "tests" / "data" / "imports"
GROUPS: dict[str, click.Group] = {"paradl-bench": bench, "calibrate": calibrate, "predict": predict}
ASKED = ("--ranks", "2", "--batch", "8")


def init(*options: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(predict, ["init", *options], input=answers)


def commands(script: str) -> list[list[str]]:
    return [shlex.split(line) for line in script.splitlines() if not line.startswith("#")]


def parsed(words: list[str]) -> None:
    """Parse as the program would, without running anything."""
    group = GROUPS[words[0]]
    context = click.Context(group)
    found = group.get_command(context, words[1])
    if found is None:
        group.make_context(words[0], words[1:])
    else:
        found.make_context(words[1], words[2:], parent=context)


@pytest.mark.parametrize(
    "options",
    [
        ("--have", "nothing", "--model", "resnet50", "--ranks", "48", "--batch", "2048", "--device", "cuda"),
        ("--have", "nothing", "--model", "mine:build", "--ranks", "1", "--batch", "4"),
        ("--have", "logs", "--path", str(LOGS / "nccl-tests-2.4.log"), "--model", "vgg11", *ASKED),
    ],
)
def test_every_written_command_is_one(options: tuple[str, ...]) -> None:
    done = init(*options)
    assert done.exit_code == 0, done.output
    written = commands(done.output)
    assert len(written) >= 4
    for words in written:
        parsed(words)
    made = [words[words.index("-o") + 1] for words in written if "-o" in words and words[1] != "describe"]
    fit = next(words for words in written if words[:2] == ["calibrate", "fit"])
    assert fit[2 : fit.index("-o")] == made[:-1], "what was measured is what is fitted"
    measured = (words for words in written if words[0] == "predict" and "h100-sxm" not in words)
    assert all(made[-1] in words for words in measured)


def test_with_nothing_the_first_command_answers_at_once() -> None:
    done = init("--have", "nothing", "--model", "gpt2", "--ranks", "4", "--batch", "16")
    first = commands(done.output)[0]
    answer = CliRunner().invoke(GROUPS[first[0]], first[1:])
    assert answer.exit_code == 0, answer.output
    assert "d4" in answer.output


@pytest.mark.parametrize("model", ["resnet101", "mine:build", str(ROOT / "docs" / "how-to" / "config.json")])
def test_with_nothing_any_model_is_predicted_from_published(model: str) -> None:
    script = init("--have", "nothing", "--model", model, *ASKED).output
    first, second, *_ = commands(script)
    described = ["--network", "network.json"] if first[1] == "describe" else []
    assert bool(described) == (not model.endswith(".json"))
    search = second if described else first
    published = ["--from-profile", "h100-sxm", "--model", model, "--batch", "8", *described, "--ranks", "2"]
    assert search == ["predict", "search", *published]


def test_a_model_of_ones_own_is_described_and_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(150528, 10))"
    Path("ones_own.py").write_text(f"import torch\n\ndef build():\n    return {built}\n")
    for program, *words in commands(init("--have", "nothing", "--model", "ones_own:build", *ASKED).output)[:2]:
        answer = CliRunner().invoke(GROUPS[program], words)
        assert answer.exit_code == 0, answer.output


def test_without_torchvision_a_name_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> list[str]:
        raise UserError("torchvision is not installed")

    monkeypatch.setattr("paradl_bench.network.models.catalog.model_names", absent)
    done = init("--have", "nothing", "--model", "resnet101", *ASKED)
    assert "resnet101 cannot be checked" in done.stderr
    assert done.exit_code == 0


def test_commands_for_a_profile_answer() -> None:
    done = init("--have", "profile", "--path", str(PROFILE), "--model", "resnet18", *ASKED)
    assert done.exit_code == 0, done.output
    for program, *words in commands(done.output):
        answer = CliRunner().invoke(GROUPS[program], words)
        assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *(("nccl-tests-2.17.log", "nccl-tests"), ("nccl-tests-2.0-2017.log", "nccl-tests"), ("osu-7.4.log", "osu")),
        *(("imb-mpi1-2021.log", "imb"), ("rccl-tests.log", "rccl-tests")),
    ],
)
def test_a_log_is_known_by_how_it_begins(name: str, known: str) -> None:
    done = init("--have", "logs", "--path", str(LOGS / name), "--model", "vgg11", *ASKED)
    assert f"paradl-bench import {known} " in done.output


def test_answers_do_as_options_do(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["nothing", "resnet18", 2, 8])
    monkeypatch.setattr(first_steps, "_on_terminal", lambda: True)
    monkeypatch.setattr(first_steps, "_answer", lambda *_: next(said))
    assert init().output == init("--have", "nothing", "--model", "resnet18", *ASKED).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (),
            "predict init asks its questions on a terminal, and this is not one: give --have, --model, --ranks,"
            " --batch, as",
        ),
        (("--have", "logs", "--model", "x", *ASKED), "give --path, as"),
        (("--have", "profile", "--path", "no.json", "--model", "x", *ASKED), "no.json"),
        (("--have", "profile", "--path", str(PROFILE), "--model", "gpt9", *ASKED), "gpt9"),
        (("--have", "nothing", "--model", "a\nrm -r b", *ASKED), "on one line"),
        (("--have", "nothing", "--model", "gpt2-larg", *ASKED), "did you mean gpt2-large"),
        (("--have", "nothing", "--model", "mine:", *ASKED), "config.json or package.module:factory"),
        (("--have", "nothing", "--model", "none.json", *ASKED), "none.json"),
        (("--have", "logs", "--path", "none.log", "--model", "vgg11", *ASKED), "--path none.log: No such file"),
        (
            ("--have", "logs", "--path", str(LOGS / "cluster.plat"), "--model", "vgg11", *ASKED),
            "does not begin like a log of",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options: tuple[str, ...], message: str) -> None:
    done = init(*options)
    assert done.output == ""
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_script_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "commands.sh"
    options = ("--have", "nothing", "--model", "vgg11", *ASKED, "-o", str(target))
    assert init(*options).exit_code == 0
    assert target.read_text().startswith("# vgg11, ")
    assert "exists; give --force" in str(init(*options).exception)
    assert init(*options, "--force").exit_code == 0
