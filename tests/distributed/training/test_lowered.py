"""Tensor and pipeline parallelism in bf16: as exact as serial training in it, and what is sent is the plan's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paradl_bench.ranks.launcher import launch_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[2] / "on_ranks" / "lowered_program.py"
PATHS = os.pathsep.join(map(str, (PROGRAM.parent, PROGRAM.parents[2])))
CASES = {
    2: (
        *("Own:t2:gpipe:1", "Split:t2:gpipe:1", "gpt2:t2:gpipe:1", "bert:t2:gpipe:1"),
        *("Own:p2:gpipe:2", "Split:p2:1f1b:4", "Own:p2:interleaved:4", "Own:p2:zb:4", "gpt2:p2:1f1b:4"),
    ),
    4: ("Own:d2t2:gpipe:1", "Split:p2t2:1f1b:2:up", "Own:p2t2:zb:3"),
}
MORE = ("Split:p2t2:gpipe:2", "Split:t2p2:1f1b:3:q", "gpt2:d2p2:1f1b:2", "bert:p4:interleaved:4", "Own:t4:gpipe:1")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, CASES[2], marks=pytest.mark.slow),
        (4, CASES[4]),
        pytest.param(4, MORE, marks=pytest.mark.slow),
    ],
)
def test_gradients_in_bf16_are_as_exact_as_serial_ones(ranks: int, cases: tuple[str, ...]) -> None:
    command = [sys.executable, str(PROGRAM), *(f"transformer_networks.{case}" for case in cases)]
    launch_ranks(command, ranks=ranks, device="cpu", timeout_s=600, environment={"PYTHONPATH": PATHS})
