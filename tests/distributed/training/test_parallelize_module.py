"""Tensor parallelism beside torch's own: the same gradients, and the same all-reduces to the byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paradl_bench.ranks.launcher import launch_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers")

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[2] / "on_ranks" / "parallelize_program.py"


def test_torch_issues_the_planned_all_reduces_for_a_shared_input(tmp_path: Path) -> None:
    """Two layers of BERT: two all-reduces forward and two backward each; four backward where inputs are not shared."""
    launch_ranks([sys.executable, str(PROGRAM), str(tmp_path / "result.json")], ranks=2, device="cpu", timeout_s=200)
    assert json.loads((tmp_path / "result.json").read_text()) == [8, 12]
