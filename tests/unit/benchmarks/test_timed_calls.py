"""Runs whose calls were timed one by one: what is measured for their pictures, and that all are drawn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "figures"))

from call_figures import draw_calls, transfers_by_size
from timed_calls import Samples, TimedRun, commands, layers_by_kind, uplink_commands

from paradl_bench.records.training.call_times import RankSpent
from paradl_bench.records.training.training_record import CallTiming
from predict.ledger.ledger import Ledger, LedgerEntry, RoleLedger


def run_of(name: str) -> TimedRun:
    spent = {"waiting_s": 0.001, "transferring_s": 0.02, "filling_s": 0.01, "copying_s": 0.002, "rest_s": 0.05}
    return TimedRun(
        name=name,
        model=name.split("-")[1],
        strategy=name.split("-")[2],
        batch=8,
        fused_by="none, 2 messages" if name.endswith("none") else "",
        iteration_s=0.083,
        compute_s=0.05,
        copies_s=0.004,
        layers_s={"conv2d": 0.03, "linear": 0.01},
        timing=CallTiming(timed=3, others=3, disturbance=0.0, spread=0.1),
        spent=tuple(RankSpent(rank=rank, **spent) for rank in range(2)),
        calls=(
            Samples(operation="all_reduce", message_bytes=8, ranks=(0, 1), wait_s=0.0, transfers_us=(1000, 1000, 4000)),
        ),
    )


def test_every_picture_of_calls_is_drawn(tmp_path: Path) -> None:
    every = (*commands(tmp_path, 0), *uplink_commands(tmp_path, 0))
    names = [path.name for arguments, path in every if arguments[0] == "train"]
    draw_calls([run_of(name) for name in names], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "figure-6-congestion.png",
        "figure-6-outliers.png",
        "figure-8-split-and-concatenation.png",
        "osf-figure-5-ranks.png",
        "osf-figure-7-fusion.png",
    ]


def test_outliers_are_far_from_their_sizes_median() -> None:
    ((size, median_s, near, far),) = transfers_by_size(run_of("train-resnet18-d2-none"))
    assert (size, median_s) == (8, pytest.approx(1e-3))
    assert list(near) == pytest.approx([1e-3, 1e-3])
    assert list(far) == pytest.approx([4e-3])


def test_layers_are_parted_by_what_they_do() -> None:
    def entry(operation: str, base_s: float, **details: str) -> LedgerEntry:
        seconds = {"base_s": base_s, "total_s": base_s, "exposed_s": base_s, "hidden_s": 0.0}
        about = {"operation": operation, **details}
        return LedgerEntry(name="l", phase="BW", source="measured", details=about, count=1, **seconds)

    roles = (
        RoleLedger(role="a", ranks=1, entries=(entry("conv2d", 0.2), entry("x", 5.0, group="d2"))),
        RoleLedger(role="b", ranks=3, entries=(entry("conv2d", 0.4), entry("linear", 0.1))),
    )
    ledger = Ledger(
        model="m", strategy="d4", ranks=4, batch=4, evaluator="simulate", iteration_s=1, interval_s=(1, 1), roles=roles
    )
    assert layers_by_kind(ledger) == pytest.approx({"conv2d": 0.35, "linear": 0.075})
