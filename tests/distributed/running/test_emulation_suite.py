"""The emulation suite on a cluster of one node with two ranks, from its calibration to its table."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "emulation"))

import emulated_profile
import emulation
import emulation_cases
import emulation_table
from host_network import needs_nodes

from paradl_bench.records.training.training_record import read_run

pytestmark = [pytest.mark.long(minutes=3), pytest.mark.distributed, pytest.mark.slow]


@needs_nodes
def test_the_suite_calibrates_validates_and_repeats_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = "emulated_networks:small_vgg"
    suite = emulation_cases.Suite(
        models={model: (3, 32, 32)},
        configurations=lambda *_: [("d2", {}), ("f2", {}), ("p2", {"schedule": "1f1b"})],
        sweeps=emulated_profile.sweeps_of,
    )
    monkeypatch.setattr(emulation, "NODES_OF", {2: (1,)})
    monkeypatch.setitem(emulation.SUITES, "strategies", suite)
    monkeypatch.setattr(emulation_cases, "SERIAL_S", 1.0)
    rows = emulation.run_suite(tmp_path, "strategies", [model], [2])
    assert [row.strategy for row in rows] == ["d2", "f2", "p2"]
    assert all(row.issued_equals_plan and row.predicted_s > 0 for row in rows)
    for each in rows:
        directory = next((tmp_path / "2-a-node" / "1x2").glob(f"small_vgg-{each.strategy}*"))
        ghost = read_run(directory).ghost
        assert ghost is not None
        # Neither can be shorter than what the rank that sleeps most sleeps.
        assert min(each.predicted_s, each.measured_s) >= 0.97 * sum(ghost.slept_s.values())
    assert msgspec.json.decode((tmp_path / "table.json").read_bytes(), type=list[emulation_table.Row]) == rows
    capfd.readouterr()
    assert emulation.run_suite(tmp_path, "strategies", [model], [2]) == rows
    assert "runs on" not in capfd.readouterr().out
