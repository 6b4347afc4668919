"""A rank that is slowed on purpose is named, in a run and in a sweep."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from survival_program import write_networks

from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.hosts.host_record import last_of_each, read_host_records

pytestmark = pytest.mark.distributed

# Rank 1 comes to every call of a sweep late.
PROGRAM = """
import sys, time
from pathlib import Path
from paradl_bench.measure.collectives.calls import Calls
from paradl_bench.measure.collectives.request import CollectivesRequest
from paradl_bench.measure.collectives.sweep import measure_collectives
from paradl_bench.ranks.groups.process_groups import join_ranks

where = Path(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=100) as context:
    stamped = Calls.stamped
    def late(self, *arguments):
        if context.rank == 1:
            time.sleep(0.01)
        return stamped(self, *arguments)
    Calls.stamped = late
    request = CollectivesRequest(ranks=3, backend="gloo", device="cpu", concurrent=1, operations=("all_reduce",),
        sizes=(1024, 65536), blocks=2, point_s=0.2, seed=0)
    measure_collectives(request, context, where / "sweep", ("paradl-bench",))
"""


def test_a_slow_training_rank_is_named_with_its_slow_share(tmp_path: Path) -> None:
    write_networks(tmp_path)
    command = ("train", "survivors:Slow", "--strategy", "d2", "--batch", "4", "--iterations", "40", "-o", "run")
    result = run_in_process(tmp_path, *command)
    assert result.returncode == 0, result.stderr
    (host,) = {record.host for record in last_of_each(read_host_records(tmp_path / "run")).values()}
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


def test_a_rank_that_comes_late_to_collectives_is_named(tmp_path: Path) -> None:
    from paradl_bench.measure.collectives.summary import summarise_collectives

    program = tmp_path / "late.py"
    program.write_text(PROGRAM)
    launch_ranks([sys.executable, str(program), str(tmp_path)], ranks=3, device="cpu", timeout_s=200)
    pace = summarise_collectives(tmp_path / "sweep").pace
    assert [rank.rank for rank in pace.ranks if rank.late] == [1]
    assert pace.ranks[1].lag_s > 0.005
    assert pace.lines()[0].startswith("the others wait for rank 1 on ")
    # On one host there is nothing to align.
    assert {record.clock_error_s for record in last_of_each(read_host_records(tmp_path / "sweep")).values()} == {0.0}
