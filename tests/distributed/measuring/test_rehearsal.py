"""Parts of a network that two ranks rehearse: real messages, as many as planned, in no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paradl_bench.ranks.launcher import launch_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[2] / "on_ranks" / "rehearsal_program.py"
NAMES = {"all_gather": "all_gather_into", "reduce_scatter": "reduce_scatter_into", "halo": "batch_isend_irecv"}


def test_ranks_that_rehearse_together_send_what_is_planned(tmp_path: Path) -> None:
    launch_ranks([sys.executable, str(PROGRAM), str(tmp_path / "result.json")], ranks=2, device="cpu", timeout_s=200)
    for strategy, found in json.loads((tmp_path / "result.json").read_text()).items():
        assert found["alone"] == {}, strategy
        expected = {NAMES.get(name, name): count for name, count in found["planned"].items() if count}
        if strategy == "s2":
            # Gradients of whole parameters are exchanged as in data parallelism, and not by layers.
            expected["all_reduce"] = found["answered"].get("all_reduce", 0)
        assert found["answered"] == {name: count for name, count in expected.items() if count}, strategy
        # The other rank came half a second late.
        assert found["seconds"] < 0.4, strategy
        assert found["finite"], strategy
