"""Pipelines on real ranks: losses and parameter gradients are the serial model's, what is sent is the plan's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paradl_bench.measure.launcher import launch_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[1] / "pipeline_program.py"
NETWORKS = ("Chain", "Residual", "Branching", "Normed")

CASES = {
    2: [
        f"{name}:p2:{schedule}:{count}"
        for name in NETWORKS
        for schedule in ("gpipe", "1f1b", "interleaved")
        for count in (2, 4)
    ]
    + ["Chain:p2:gpipe:1", "Chain:p2:1f1b:3:features.3", "Residual:p2:gpipe:2:convs.3"],
    4: [
        f"{name}:{text}:{schedule}:4"
        for name in NETWORKS
        for text, schedule in (("p4", "gpipe"), ("p4", "1f1b"), ("d2p2", "gpipe"), ("d2p2", "1f1b"))
    ]
    + ["Chain:p2d2:1f1b:3", "Residual:d2p2:interleaved:4", "Normed:d2p2:interleaved:2", "Branching:p4:1f1b:6"],
}

# An axis that shares layers inside of a pipeline, or outside; and eight stages on four ranks.
NESTED = {
    4: [f"{name}:p2{axis}:gpipe:2" for name in NETWORKS for axis in ("f2", "c2", "s2")]
    + ["Rereading:p2f2:gpipe:2", "Rereading:p2c2:1f1b:3", "Rereading:p2s2:gpipe:2", "Rereading:p2s1x2:1f1b:3"]
    + [f"Rereading:p2s2:gpipe:2:{cut}" for cut in ("early", "two", "late", "three", "fc")]
    + ["Residual:p2f2:1f1b:4", "Chain:p2c2:interleaved:2", "Normed:p2s2:interleaved:4", "Residual:p2s2:interleaved:2"]
    + [f"transformer_networks.{name}:p2t2:gpipe:2" for name in ("Own", "Split", "gpt2", "t5")]
    + [f"transformer_networks.Split:p2t2:1f1b:3:{cut}" for cut in ("q", "transpose#6", "up")]
    + ["Chain:f2p2:1f1b:2", "Normed:s2p2:gpipe:2", "Branching:c2p2:interleaved:4"]
    + ["Normed:p4:interleaved:4", "Residual:p4:interleaved:8"]
    + ["Chain:p2f2:gpipe:2:scatter", "Residual:f2p2:1f1b:2:scatter", "Rereading:p2f2:interleaved:2:scatter"],
}

# Three deep, each in another order of axes and under another schedule.
DEEP = {
    8: ["Chain:d2p2f2:gpipe:2", "Residual:d2p2c2:1f1b:2", "Normed:d2p2s2:interleaved:2", "Rereading:p2s2d2:1f1b:3"],
}


def run(ranks: int, cases: list[str]) -> None:
    launch_ranks([sys.executable, str(PROGRAM), *cases], ranks=ranks, device="cpu", timeout_s=300)


@pytest.mark.parametrize("ranks", CASES)
def test_stages_are_serial(ranks: int) -> None:
    run(ranks, CASES[ranks])


@pytest.mark.parametrize("ranks", NESTED)
def test_stages_that_share_their_layers_are_serial(ranks: int) -> None:
    run(ranks, NESTED[ranks])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", DEEP)
def test_three_deep_is_serial(ranks: int) -> None:
    run(ranks, DEEP[ranks])
