"""No module of the working directory runs unasked; a user's ``package.module:factory`` is found there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paradl_bench.core.errors import UserError
from paradl_bench.core.working_directory import importing_from_working_directory
from paradl_bench.network.models.catalog import load_model

# Names that libraries look for and that need not be there, and names of what is there.
PLANTED = (
    *("org", "cuda", "dill", "pynvml", "triton", "cupy", "sitecustomize", "usercustomize", "opt_einsum"),
    *("numpy", "click", "rich", "msgspec", "torch", "predict", "calibrate", "secrets", "pickle", "json"),
)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'a').write({name!r} + '\\n')\n")
    return tmp_path


def run(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, timeout=240, check=False)


TRAIN = ("train", "squeezenet1_0", "--strategy", "d2", "--batch", "4", "--input-shape", "3x64x64", "--iterations", "2")


@pytest.mark.parametrize(
    "words",
    [
        # Training loads and describes a model too.
        *(pytest.param(words, marks=pytest.mark.slow) for words in (("models",), ("describe", "alexnet"))),
        pytest.param((*TRAIN, "-o", "out"), marks=pytest.mark.distributed),
    ],
    ids=lambda words: words[0],
)
def test_planted_modules_do_not_run(planted: Path, words: tuple[str, ...]) -> None:
    program = Path(sys.executable).parent / "paradl-bench"
    result = run(planted, str(program), *words)
    assert result.returncode == 0, result.stderr
    assert not (planted / "marker").exists(), (planted / "marker").read_text()


@pytest.mark.parametrize("package", ["paradl_bench", "calibrate", "predict"])
def test_nor_where_python_puts_the_directory_first(tmp_path: Path, package: str) -> None:
    for name in ("click", "rich", "msgspec", "org", "dill"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'a').write({name!r} + '\\n')\n")
    result = run(tmp_path, sys.executable, "-m", package, "--help")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "marker").exists(), (tmp_path / "marker").read_text()


def test_a_local_factory_is_found_and_the_search_path_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_of_test.py").write_text(
        "import torch\ndef build():\n    import late_of_test\n    return torch.nn.Linear(late_of_test.WIDTH, 2)\n"
    )
    (tmp_path / "late_of_test.py").write_text("WIDTH = 3\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert load_model("mine_of_test:build", (3,)).module.in_features == 3
    assert sys.path == before
    with pytest.raises(UserError, match="cannot import 'no_such_of_test'"):
        load_model("no_such_of_test:build")
    assert sys.path == before


def test_a_directory_that_was_named_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with importing_from_working_directory():
        assert sys.path.count(str(tmp_path)) == 1
    assert sys.path.count(str(tmp_path)) == 1
