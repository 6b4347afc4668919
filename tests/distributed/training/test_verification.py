"""A strategy that trains otherwise than serial training does is caught before anything is timed, and named rightly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.training.training_record import read_run
from paradl_bench.records.training.verification import read_verified_shards

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from in_process import run_in_process

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[2] / "on_ranks" / "verification_program.py"

WRONG = {
    "Chain:s2:dropped-halo": "the output of one",
    "Chain:s2:unscaled-blocks": "the gradient of the output of relu#2",
    "Chain:d2:no-exchange": "the gradient of down.bias",
    "Chain:d2:no-exchange:accumulate=2": "the gradient of down.bias",
    "Chain:d2:unsent-messages:fusion=none": "the gradient of down.bias",
    "Chain:f2:swapped-slices": "the output of one",
    "Chain:f2:no-gradient-sum": "the gradient of the output of relu#3",
    "Chain:c2:no-sum": "the output of one",
    "Chain:t2:no-shared-input": "the gradient of the output of mean",
    "Chain:z3d2:unreduced-shards": "the gradient of down.bias",
    "Chain:p2:whole-loss:schedule=1f1b": "the gradient of the output of down",
    "Chain:z1d2:other-rate": "parameter down.bias after the weight update",
}
"""What is made wrong, and what differs first then."""
_SORTED = "transformer_networks.Sorted"
WRONG_WITH_EXPERTS = {
    f"{_SORTED}:e2t2:no-sum-of-rows": "the output of _grouped_mm#3",
    f"{_SORTED}:t2e2:unordered-rows": "the output of _grouped_mm#3",
    f"{_SORTED}:e2t2:unscaled-rows": "the gradient of down",
}
"""Likewise on four ranks, of which two have the same rows and two the same experts."""
RIGHT = (
    *("Chain:s2:right", "Chain:f2:right", "Chain:c2:right", "Chain:t2:right", "Chain:d2:right:accumulate=3"),
    *("Chain:z1d2:right", "Chain:z2d2:right", "Chain:z3d2:right", "Chain:p2:right:schedule=zb"),
    *("Chain:p2:right:schedule=interleaved:micro_batches=4", "Normed:d2:right", "Normed:d2:right:batch_norm=sync"),
    *("Normed:s2:right", "Normed:s2:right:batch_norm=sync", "Normed:d2:right:accumulate=2", "Normed:z3d2:right"),
    *("Normed:p2:right", "Normed:f2:right", "Normed:d2:right:recompute=inner", "InPlace:d2:right"),
    *("Chain:d2:right:fusion=none", "Normed:d2:right:fusion=buffer:accumulate=2"),
    *("Normed:z1d2:right:batch_norm=sync:optimizer=adamw", "Chain:z3d2:right:optimizer=adam"),
    *("Returning:s2:right", "Returning:d2:right", "Returning:p2:right"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    others = ["Mixing:d2:right", "Counting:p2:right", "Counting:d2:right", "Mixing:f2:right", "Narrow:f2:right"]
    others += ["Drawing:d2:right", "Mixing:d2:no-exchange"]
    return answers(tmp_path_factory.mktemp("verification"), 2, [*WRONG, *RIGHT, *others])


def answers(where: Path, ranks: int, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What proofs say of cases, on real ranks."""
    command = [sys.executable, str(PROGRAM), str(where / "result.json"), *cases]
    beside = {"PYTHONPATH": str(PROGRAM.parents[2])}
    launch_ranks(command, ranks=ranks, device="cpu", timeout_s=600, environment=beside)
    said: dict[str, dict[str, Any]] = json.loads((where / "result.json").read_text())
    return said


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_named(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["first"] == WRONG[case]
    assert found[case]["relative"] > 1e-3


def test_wrong_rules_of_nested_axes_are_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="products of experts in double precision are transformers' own")
    said = answers(tmp_path, 4, WRONG_WITH_EXPERTS)
    assert {case: one["first"] for case, one in said.items()} == WRONG_WITH_EXPERTS
    assert all(one["relative"] > 1e-3 for one in said.values())


@pytest.mark.parametrize("case", RIGHT)
def test_right_rules_are_verified(found: dict[str, dict[str, Any]], case: str) -> None:
    said = found[case]
    assert (said["first"], said.get("why_not", ""), said.get("mixes_samples", "")) == (None, "", "")
    assert said["dtype"] == "fp64"
    assert said.get("largest_difference", 0.0) < 1e-10


def test_layers_that_mix_samples_are_named(found: dict[str, dict[str, Any]]) -> None:
    mixing = {case: found[case].get("mixes_samples", "") for case in found if case.endswith("right")}
    assert {case: layer for case, layer in mixing.items() if layer} == {
        "Mixing:d2:right": "mean",
        "Counting:d2:right": "div",
        "Counting:p2:right": "div",
    }
    # As a serial model that is applied to the same parts they are right, and with all samples on each rank too.
    assert all(found[case]["first"] is None for case in mixing)
    assert found["Mixing:d2:no-exchange"]["first"] == "the gradient of down.bias"


def test_what_computes_in_fp32_is_compared_as_such(found: dict[str, dict[str, Any]]) -> None:
    assert found["Narrow:f2:right"]["dtype"] == "fp32"
    assert found["Narrow:f2:right"]["first"] is None


def test_what_draws_unseen_is_not_called_wrong(found: dict[str, dict[str, Any]]) -> None:
    assert found["Drawing:d2:right"]["first"] is None
    assert found["Drawing:d2:right"]["why_not"] == "the serial model itself gives different results each time"


MODELS = """
import torch
from torch import nn
from paradl_bench.strategies.filter import module as filters

right = filters.gather

class Swapped(nn.Module):
    "Whoever loads it puts filters in a wrong order."
    input_shape = (3, 8, 8)
    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 10)
        filters.gather = lambda part, slices, *rest: right(part, tuple(reversed(slices)), *rest)
    def forward(self, x):
        return self.head(torch.relu(self.one(x)).mean((2, 3)))

class Mixing(nn.Module):
    input_shape = (3, 8, 8)
    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 10)
    def forward(self, x):
        x = torch.relu(self.one(x))
        return self.head((x - x.mean(0)).mean((2, 3)))
"""


def _run(where: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(where, *command)


def _train(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(where, "train", "--verify", *arguments, "--batch", "4", "--iterations", "2")


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "networks.py").write_text(MODELS)
    return tmp_path


def test_a_wrong_strategy_ends_before_anything_is_written(workplace: Path) -> None:
    result = _train(workplace, "networks:Swapped", "--strategy", "f2", "-o", "run")
    assert result.returncode == 3
    assert (
        "error: does not train as serial training does: networks:Swapped as f2; first the output of one"
        in result.stderr
    )
    assert not (workplace / "run").exists()
    timed = _train(workplace, "networks:Swapped", "--strategy", "f2", "-o", "run", "--no-verify")
    assert timed.returncode == 0, timed.stderr
    assert "not verified against serial training: --no-verify" in timed.stdout
    verified = read_run(workplace / "run").verified
    assert verified is not None
    assert verified.why_not == "--no-verify"


def test_what_mixes_samples_is_warned_of_and_recorded(workplace: Path) -> None:
    result = _train(workplace, "networks:Mixing", "--strategy", "d2", "-o", "run")
    assert result.returncode == 0, result.stderr
    assert "mean mixes the samples that it is given: d2 trains networks:Mixing otherwise" in result.stderr
    verified = read_run(workplace / "run").verified
    assert verified is not None
    assert (verified.why_not, verified.mixes_samples, verified.dtype, verified.samples) == ("", "mean", "fp64", 4)
    again = _train(workplace, "networks:Mixing", "--strategy", "d2", "-o", "run")
    assert "mixes" not in again.stderr
    assert read_run(workplace / "run").verified == verified


def test_serial_training_has_nothing_to_prove(workplace: Path) -> None:
    result = _train(workplace, "networks:Mixing", "--strategy", "serial", "-o", "run")
    assert result.returncode == 0, result.stderr
    assert "verified" not in result.stdout
    assert read_run(workplace / "run").verified is None


def test_shards_that_fail_verification_are_not_measured(workplace: Path) -> None:
    settings = ("--batch", "2", "--blocks", "2", "--iterations", "2", "--isolated", "none")
    wrong = _run(workplace, "layers", "networks:Swapped", *settings, "--shards", "f2", "--verify", "-o", "wrong")
    assert wrong.returncode == 3
    assert "does not train as serial training does: networks:Swapped as f2; first the output of one" in wrong.stderr
    assert not (workplace / "wrong").exists()
    shards = ("--shards", "d2f2,c2,s2", "--verify")
    result = _run(workplace, "layers", "networks:Mixing", *settings, *shards, "-o", "right")
    assert result.returncode == 0, result.stderr
    said = {item.shards: item.verified for item in read_verified_shards(workplace / "right")}
    assert list(said) == ["f2", "c2", "s2"]
    assert all(verified.dtype == "fp64" and not verified.why_not for verified in said.values())
    assert "networks:Mixing as f2: verified against serial training on 2 samples in fp64" in result.stdout
    assert _run(workplace, "layers", "networks:Mixing", *settings, *shards[:2], "-o", "right").returncode == 0
