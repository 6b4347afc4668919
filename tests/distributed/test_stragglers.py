"""A rank that is slowed on purpose is named, in a run and in a sweep; clocks of hosts that are apart are aligned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from survival_program import write_networks

from paradl_bench.measure.launcher import launch_ranks
from paradl_bench.spec.host_record import read_hosts

pytestmark = pytest.mark.distributed

# Rank 1 comes to every call of a sweep late, and its host's clock is ahead by five seconds.
PROGRAM = """
import json, sys, time
from pathlib import Path
import msgspec
from paradl_bench.measure.collective_calls import Calls
from paradl_bench.measure.collective_request import CollectivesRequest
from paradl_bench.measure.collectives import measure_collectives
from paradl_bench.measure.process_groups import join_ranks
from paradl_bench.measure.rank_hosts import hosts_of_ranks

where = Path(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=100) as context:
    stamped = Calls.stamped
    def late(self, *arguments):
        if context.rank == 1:
            time.sleep(0.01)
        return stamped(self, *arguments)
    Calls.stamped = late
    request = CollectivesRequest(ranks=3, backend="gloo", device="cpu", concurrent=1, operations=("all_reduce",),
        sizes=(1024, 65536), blocks=2, point_s=0.2, seed=0, beside_compute=False, behind_compute=False)
    measure_collectives(request, context, where / "sweep", ("paradl-bench",))
    clock = lambda: time.perf_counter() + (5.0 if context.rank else 0.0)
    found = hosts_of_ranks(context, host="node2" if context.rank else "node1", clock=clock)
    (where / f"{context.rank}.json").write_bytes(msgspec.json.encode(found))
"""


def test_a_rank_that_is_slow_in_training_is_named_with_its_share_of_iterations(tmp_path: Path) -> None:
    write_networks(tmp_path)
    command = ("train", "survivors:Slow", "--strategy", "d2", "--batch", "4", "--iterations", "40", "-o", "run")
    result = run_in_process(tmp_path, *command)
    assert result.returncode == 0, result.stderr
    (host,) = {record.host for record in read_hosts(tmp_path / "run").values()}
    named = [line for line in result.stdout.splitlines() if line.startswith(f"rank 1 on {host} computes ")]
    assert len(named) == 1
    again = run_in_process(tmp_path, *command, "--json")
    pace = json.loads(again.stdout)["pace"]
    slow = {own["rank"]: own for own in pace["ranks"]}[1]
    # It sleeps from the twentieth forward on, some of which come before the timed iterations.
    assert slow["ratio"] > 1.5
    assert slow["slow_share"] > 0.5
    assert pace["affected_share"] >= slow["slow_share"]
    assert pace["slow_nodes"] == []


def test_a_rank_that_comes_late_to_collectives_is_named_and_clocks_are_aligned(tmp_path: Path) -> None:
    from paradl_bench.measure.collective_summary import summarise_collectives

    program = tmp_path / "late.py"
    program.write_text(PROGRAM)
    launch_ranks([sys.executable, str(program), str(tmp_path)], ranks=3, device="cpu", timeout_s=200)
    pace = summarise_collectives(tmp_path / "sweep").pace
    assert [rank.rank for rank in pace.ranks if rank.late] == [1]
    assert pace.ranks[1].lag_s > 0.005
    assert pace.lines()[0].startswith("the others wait for rank 1 on ")
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert told[0] == told[1] == told[2]
    first, *others = told[0]
    assert (first["clock_offset_s"], first["clock_error_s"]) == (0.0, 0.0)
    for other in others:
        assert 0 < other["clock_error_s"] < 1
        # The truth is five seconds, and the error is what the round trip allows.
        assert abs(other["clock_offset_s"] - 5.0) <= other["clock_error_s"]
    # On one host there is nothing to align.
    assert {record.clock_error_s for record in read_hosts(tmp_path / "sweep").values()} == {0.0}
