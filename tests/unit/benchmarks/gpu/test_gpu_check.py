"""What the check of a machine with a GPU runs, and that it says so where there is none."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "gpu"))

import click
import gpu_check

from paradl_bench.cli import group


def asked(device: str, ranks: int = 1, models: str = "resnet50,vgg16", shape: str | None = None) -> list[list[str]]:
    options = Namespace(device=device, models=models, batch=4, input_shape=shape)
    return [arguments for arguments, _ in gpu_check.commands(options, ranks, Path("out"), 0)]


@pytest.mark.parametrize(("device", "ranks"), [("cuda", 1), ("cuda", 4), ("cpu", 1)])
def test_every_command_is_one_that_paradl_bench_knows(device: str, ranks: int) -> None:
    for name, *arguments in asked(device, ranks, shape="3x64x64"):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        # Options are read, and nothing is run.
        command.make_context(name, [*arguments, "-o", "x"])


def test_every_precision_is_profiled_and_trained_in_turn() -> None:
    found = [arguments for arguments in asked("cuda", 2) if arguments[0] in ("layers", "train")]
    assert [arguments[0] for arguments in found] == ["layers", "train", "train"] * 8
    for option, precisions in (("--tf32", 1), ("bf16", 2), ("--channels-last", 1)):
        assert sum(option in arguments for arguments in found) == 2 * 3 * precisions
    replicated = [arguments for arguments in found if "d2" in arguments]
    assert all(arguments[arguments.index("--batch") + 1] == "8" for arguments in replicated)
    assert len(replicated) == 8


def test_directories_are_of_one_command_each() -> None:
    options = Namespace(device="cuda", models="resnet50,vgg16", batch=4, input_shape=None)
    found = [place for repetition in range(2) for _, place in gpu_check.commands(options, 2, Path("out"), repetition)]
    assert len(set(found)) == len(found)


@contextmanager
def called(*arguments: str) -> Iterator[None]:
    with mock.patch.object(sys, "argv", ["gpu_check.py", *arguments]):
        yield


def test_a_missing_gpu_ends_the_check_with_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with called("-o", str(tmp_path / "out")), mock.patch.object(gpu_check, "devices", return_value=0):
        assert gpu_check.main() == 3
    assert capsys.readouterr().err.splitlines() == [
        "gpu-check: torch sees no GPU here; --device cpu rehearses the calibration"
    ]
    assert not (tmp_path / "out").exists()


def test_failing_tests_end_it_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "test_that_fails.py").write_text("def test_it() -> None:\n    assert False\n")
    with (
        called("-o", str(tmp_path / "out")),
        mock.patch.object(gpu_check, "devices", return_value=1),
        mock.patch.object(gpu_check, "TESTS", tmp_path),
        mock.patch.object(gpu_check, "validate") as measured,
    ):
        assert gpu_check.main() == 1
    measured.assert_not_called()
