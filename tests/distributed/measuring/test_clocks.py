"""Hosts whose clocks are apart and do not keep pace: ranks are compared as if they had one clock."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from survival_program import write_networks

from paradl_bench.measure.collectives.summary import CollectivesSummary, summarise_collectives
from paradl_bench.measure.training.summary import TrainingSummary, summarise_training
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.contexts.context import CONTEXTS_FILE, ContextSamples
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import read_records
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations

pytestmark = pytest.mark.distributed

AHEAD_S, PACE = 5.0, 1 + 2e-3
LATE_S = 0.01

# Ranks 1 and 2 are on another node, whose clock is ahead and goes faster; rank 1 comes late to where they meet, by a
# pause that belongs to nothing it computes.
PROGRAM = """
import os, sys, time
from pathlib import Path
from paradl_bench.ranks.clocks import CpuClock

rank, (ahead_s, pace, late_s) = int(os.environ["RANK"]), map(float, sys.argv[2:])
os.environ["SLURMD_NODENAME"] = "node2" if rank else "node1"
if rank:
    CpuClock.stamp = staticmethod(lambda: time.perf_counter() * pace + ahead_s)
from paradl_bench.measure.machine import doctor
from paradl_bench.measure.machine.node_findings import NodeFinding
governor = NodeFinding(name="CPU governor", found="powersave" if rank else "performance")
doctor.node_findings = lambda: (governor,)
from paradl_bench.measure.collectives.calls import Calls
from paradl_bench.measure.collectives.request import CollectivesRequest
from paradl_bench.measure.collectives.sweep import measure_collectives
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.measure.training.run import measure_training
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.plan.strategy import parse_strategy

def late(method):
    def called(self, *arguments):
        if rank == 1:
            time.sleep(late_s)
        return method(self, *arguments)
    return called

Calls.stamped, Trainer.iterate = late(Calls.stamped), late(Trainer.iterate)
where = Path(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=100) as context:
    request = CollectivesRequest(ranks=3, backend="gloo", device="cpu", concurrent=1, operations=("all_reduce",),
        sizes=(1024, 65536), blocks=3, point_s=0.2, seed=0, contexts=("after-compute",))
    measure_collectives(request, context, where / "sweep", ("paradl-bench",))
    training = TrainingRequest(model="survivors:Plain", input_shape=None, strategy=parse_strategy("d3"), batch=6,
        device="cpu", iterations=20)
    measure_training(training, context, where / "run", ("paradl-bench",))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("clocks")
    write_networks(where)
    program = where / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(where), *map(str, (AHEAD_S, PACE, LATE_S))]
    launch_ranks(words, ranks=3, device="cpu", timeout_s=200, environment={"PYTHONPATH": str(where)})
    return where


def true_s(rank: int, stamps_s: tuple[float, ...]) -> np.ndarray:
    """What the host's real clock, which all ranks share, showed."""
    stamps = np.array(stamps_s)
    return (stamps - AHEAD_S) / PACE if rank else stamps


def test_arrivals_at_collectives_are_those_of_one_clock(measured: Path) -> None:
    clocks = HostClocks(read_host_records(measured / "sweep"))
    records = read_records(measured / "sweep", CONTEXTS_FILE, ContextSamples)
    assert len(records) == 6
    for record in records:
        assert (record.one_clock, record.lags_s()) == (False, ())
        raw = [np.array(row) for row in record.host_start_s]
        assert abs(float(np.median(raw[1] - raw[0]))) > 1
        truth = np.array([true_s(rank, row) for rank, row in enumerate(record.host_start_s)])
        aligned = record.aligned(clocks)
        assert aligned.clock_error_s is not None
        # Of the other host both ranks are off alike, by what was known to be possible.
        np.testing.assert_allclose(aligned.arrivals_s, truth, rtol=0, atol=aligned.clock_error_s)
        stragglers = truth.max(axis=0) - truth.min(axis=0)
        np.testing.assert_allclose(aligned.lags_s(), stragglers, rtol=0, atol=2 * aligned.clock_error_s)


def test_the_late_rank_and_the_drifting_clock_are_named(measured: Path) -> None:
    sweep = summarise_collectives(measured / "sweep")
    (lag_s,) = {row.lag_s is not None and row.lag_s > LATE_S / 2 for row in sweep.contexts}
    assert lag_s
    assert [arrival.rank for arrival in sweep.pace.arrivals if arrival.late] == [1]
    run = summarise_training(measured / "run").pace
    (late,) = (arrival for arrival in run.arrivals if arrival.late)
    assert (late.rank, late.host, late.calls) == (1, "node2", 20)
    assert late.late_s > LATE_S / 2
    # By its compute where that was slow as well, as after a pause it may be.
    assert any(line.startswith("rank 1 on node2 com") for line in run.lines())
    for pace in (sweep.pace, run):
        (drift,) = pace.clocks
        assert (drift.host, drift.against, drift.drifted, drift.bent_s) == ("node2", "node1", True, 0.0)
        assert abs(drift.gained_s - (PACE - 1) * drift.over_s) <= drift.error_s
        assert pace.lines()[-1].startswith("the clock of node2 gained ")


@pytest.mark.parametrize(("what", "summarise"), [("sweep", summarise_collectives), ("run", summarise_training)])
def test_differences_between_nodes_are_kept_beside_their_measurements(
    measured: Path, what: str, summarise: Callable[[Path], CollectivesSummary | TrainingSummary]
) -> None:
    kept = json.loads((measured / what / "nodes.json").read_text())
    assert [(node["host"], node["ranks"]) for node in kept["nodes"]] == [("node1", [0]), ("node2", [1, 2])]
    # Rank 1 answers for its node, by its own clock.
    assert kept["nodes"][1]["clock"]["clock_offset_s"] > 1
    cores = {own["name"]: own["found"] for own in kept["nodes"][0]["findings"]}["CPU"]
    # As many as ranks were given, not the one that the rank is pinned to.
    assert f"{len(os.sched_getaffinity(0))} cores allowed" in cores
    found = summarise(measured / what).nodes
    assert found == ("its 2 nodes differ in CPU governor: performance on node1; powersave on node2",)


def test_iterations_of_a_run_begin_when_they_did(measured: Path) -> None:
    clocks = HostClocks(read_host_records(measured / "run"))
    records = read_records(measured / "run", TRAINING_FILE, TrainingIterations)
    assert {record.attempt for record in records} == {1}
    for record in records:
        found = clocks.on_one_clock(record.attempt, record.rank, record.host_begin_s)
        assert found is not None
        assert np.all(np.abs(found.stamps_s - true_s(record.rank, record.host_begin_s)) <= found.error_s + 1e-9)
    rows = [json.loads(line) for line in (measured / "run/hosts.jsonl").read_text().splitlines()]
    # Every rank at the beginning, then one of each host at the end.
    assert [row["rank"] for row in rows] == [0, 1, 2, 0, 1]
    # Calendars were not moved apart.
    assert all(abs(row["wall_offset_s"]) <= row["clock_error_s"] for row in rows)
