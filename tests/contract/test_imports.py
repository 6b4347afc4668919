"""What a whole prediction loads, lazy imports and discovery included: numpy, and nothing that is slow to start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from profile_factory import make_network, make_profile, write_training_run

from calibrate.profile.profile import write_profile

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "torchvision", "pandas", "scipy", "matplotlib", "yaml"}

_RUN = """
import atexit, json, sys

def tell():
    print("loaded", json.dumps(sorted({name.split(".")[0] for name in sys.modules})), file=sys.stderr)

atexit.register(tell)
from predict.cli import main
main()
"""


def loaded_by(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.strip().splitlines()[-1].removeprefix("loaded ")))


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    write_profile(path, make_profile())
    return str(path)


@pytest.mark.parametrize("evaluator", ["simulate", "paradl", "dag"])
def test_a_prediction_loads_numpy_and_nothing_heavy(profile: str, evaluator: str) -> None:
    options = ("--strategy", "serial,data", "--ranks", "2:8:x2", "--batch", "8", "--evaluator", evaluator)
    loaded = loaded_by("--from-profile", profile, "--model", "chain", *options)
    assert "numpy" in loaded
    assert not loaded & {"difflib", "zipfile"}
    assert not loaded & HEAVY


def test_json_is_written_without_loading_what_draws_tables(profile: str) -> None:
    loaded = loaded_by("--from-profile", profile, "--model", "chain", "--strategy", "d2", "--batch", "8", "--json")
    assert not loaded & (HEAVY | {"rich"})


def test_a_validation_loads_nothing_heavy(profile: str, tmp_path: Path) -> None:
    run = write_training_run(tmp_path / "run", make_network(), phases_s=[[(1e-3, 2e-3, 1e-3, 1e-4)] * 6] * 2)
    loaded = loaded_by("validate", "--from-profile", profile, str(run), "-o", str(tmp_path / "report"))
    assert not loaded & HEAVY
