"""The judge under SimGrid: the machine that is simulated, what is written of it, and a small run where SimGrid is."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from profile_factory import in_context, make_network, make_profile, ring_fit, with_compute

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "smpi"))

from cases import PARTS, Extent, calibration, judged
from fat_tree import FatTree
from judging import _without_contention, records
from plan_file import plan_text
from simulation import Result, Row, Simulator, Sweep

from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Stream
from predict.costs.cost_model import CostModel
from predict.costs.priced import PricedPlan
from predict.simulation import prepared
from predict.workload import Configuration

TREE = FatTree()
needs_simgrid = pytest.mark.skipif(
    shutil.which("smpirun") is None or shutil.which("smpicc") is None,
    reason="SimGrid is not installed (libsimgrid-dev)",
)


def test_the_platform_is_a_three_level_fat_tree_oversubscribed_threefold() -> None:
    (cluster,) = ElementTree.fromstring(TREE.platform_xml())
    levels, down, up, _ = cluster.attrib["topo_parameters"].split(";")
    children, parents = ([int(number) for number in row.split(",")] for row in (down, up))
    assert (levels, len(children), len(parents)) == ("3", 3, 3)
    # A leaf's children over its uplinks; a pod's switch has as many links up as down.
    assert children[0] == 3 * parents[1]
    assert children[1] == parents[2]
    first, last = map(int, cluster.attrib["radical"].split("-"))
    assert last - first + 1 == np.prod(children) == TREE.nodes
    assert TREE.ranks >= 1024
    assert TREE.oversubscription == 3


def test_ranks_fill_nodes_in_order_within_their_levels() -> None:
    hosts = TREE.host_file(10, 2).split()
    assert Counter(hosts) == {"node-0": 8, "node-1": 8, "node-2": 4}
    assert [TREE.level_of(span) for span in (2, 4, 5, 12, 13, 24, 25, 1024)] == [
        *("node", "node", "rack", "rack", "pod", "pod", "system", "system")
    ]
    assert [TREE.cluster().level_of(span).name for span in (4, 12, 24, 1024)] == ["node", "rack", "pod", "system"]
    with pytest.raises(ValueError, match="do not fit"):
        TREE.host_file(TREE.ranks + 1)
    with pytest.raises(ValueError, match="bandwidths have to be above 0"):
        FatTree(bandwidth_bytes_per_s=0)


def test_what_is_judged_was_not_fitted() -> None:
    extent = Extent(libraries=("smpi-ring",))
    fitted = list(calibration(extent, TREE))
    asked = list(judged(extent, TREE))
    assert {case.ranks * case.groups for case in fitted} == {2, 4, 8, 12, 16, 24, 32, 48, 64}
    assert {case.ranks * case.groups for case in asked} == {128, 256, 1024}
    assert {TREE.level_of(case.ranks * case.groups) for case in fitted} == {"node", "rack", "pod", "system"}
    assert len({case.name for case in (*fitted, *asked)}) == len(fitted) + len(asked)
    for case in (*fitted, *asked):
        whole = max(case.sizes) * (case.ranks if case.operation in PARTS else 1)
        assert whole <= 1 << 28


def test_rows_become_measurements_of_groups_alone_and_at_once() -> None:
    # Groups of every second rank: 0 and 2, 1 and 3.
    case = Sweep(library="smpi-ring", operation="all_reduce", ranks=2, groups=2, sizes=(1024,))
    rows = (
        Row(operation="all_reduce", message_bytes=1024, together=1, seconds=(1.0, 0.0, 2.0, 0.0)),
        Row(operation="all_reduce", message_bytes=1024, together=2, seconds=(3.0, 4.0, 5.0, 6.0)),
    )
    result = Result(name=case.name, simgrid="3", platform="", settings=(), rows=rows)
    alone, first, second = records(case, result, FatTree(ranks_per_node=2))
    assert (alone.concurrent, alone.samples_s) == (1, ((1.0,), (2.0,)))
    assert (first.concurrent, first.group, first.samples_s) == (2, 0, ((3.0,), (5.0,)))
    assert (second.concurrent, second.group, second.samples_s) == (2, 1, ((4.0,), (6.0,)))
    assert {record.level for record in (alone, first, second)} == {"rack"}
    assert {record.ranks_per_node for record in (alone, first, second)} == {1}


def test_send_recv_takes_the_time_of_its_first_rank() -> None:
    case = Sweep(library="smpi-ring", operation="send_recv", ranks=4, sizes=(8,))
    row = Row(operation="send_recv", message_bytes=8, together=1, seconds=(2.0, 0.0, 0.0, 1.0))
    (record,) = records(case, Result(name="", simgrid="3", platform="", settings=(), rows=(row,)), TREE)
    assert record.samples_s == ((2.0,), (2.0,))
    assert (record.level, record.ranks_per_node) == ("node", 4)


def priced(strategy: str) -> PricedPlan:
    fits = tuple(ring_fit(operation) for operation in ("all_reduce", "all_gather", "send_recv", "broadcast"))
    profile = make_profile(make_network(), communication=fits, contexts=(with_compute(),))
    model = CostModel(profile=profile, network=make_network())
    return prepared.price(model, Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=8)))


def test_a_profile_without_contention_keeps_its_other_contexts() -> None:
    profile = make_profile(make_network(), contexts=(with_compute(), in_context("groups", groups=2)))
    assert _without_contention(profile).contexts == (with_compute(),)


def test_the_plan_file_holds_the_plans_tasks() -> None:
    plan = priced("d2f2").plan
    lines = iter(plan_text(priced("d2f2")).splitlines())
    ranks, groups, roles = map(int, next(lines).split())
    assert (ranks, roles) == (4, len(plan.roles))
    colours = {next(lines) for _ in range(groups)}
    # Ranks of one replica are neighbours; those that exchange gradients stand apart.
    assert {"0 0 2 2", "0 1 0 1"} <= colours
    assert [int(role) for role in next(lines).split()] == [plan.role_of(rank) for rank in range(4)]
    for role in plan.roles:
        assert int(next(lines)) == role.tasks
        tasks = [next(lines).split() for _ in range(role.tasks)]
        sent = Counter((task[1], int(task[3])) for task in tasks if task[1] != "compute")
        works = [plan.works[index] for index in role.work]
        assert sent == Counter((w.operation, w.message_bytes) for w in works if isinstance(w, Collective))
        assert all(float(task[2]) >= 0 for task in tasks)
        for number, task in enumerate(tasks):
            waits = [int(text) for text in task[6:]]
            assert len(waits) == int(task[5])
            assert all(wait < number and tasks[wait][0] != task[0] for wait in waits)
        assert {task[0] for task in tasks} == {str(int(Stream.COMPUTE)), str(int(Stream.COMMUNICATION))}


def test_messages_between_pairs_are_refused() -> None:
    with pytest.raises(UserError, match="judged are plans of collectives"):
        plan_text(priced("p2"))


@needs_simgrid
def test_a_simulated_all_reduce_moves_ring_bytes_and_is_kept(tmp_path: Path) -> None:
    simulator = Simulator(TREE, tmp_path / "simulated", tmp_path)
    size = 1 << 26
    case = Sweep(library="smpi-ring", operation="all_reduce", ranks=4, groups=4, sizes=(size,))
    alone, together = simulator.sweep(case).rows
    # SMPI's default model lets large messages have 94% of a link, and four groups share one.
    link_s = 2 * 3 / 4 * size / (0.940694 * TREE.bandwidth_bytes_per_s)
    assert max(alone.seconds) == pytest.approx(link_s, rel=0.02)
    assert max(together.seconds) == pytest.approx(4 * link_s, rel=0.02)
    (kept,) = (tmp_path / "simulated").iterdir()
    before = kept.stat().st_mtime_ns
    assert simulator.sweep(case).rows == (alone, together)
    assert kept.stat().st_mtime_ns == before


@needs_simgrid
def test_an_iteration_takes_compute_plus_exposed_communication(tmp_path: Path) -> None:
    simulator = Simulator(TREE, tmp_path / "simulated", tmp_path)
    size = 1 << 22
    case = Sweep(library="smpi-ring", operation="all_reduce", ranks=4, sizes=(size,))
    exchange_s = max(simulator.sweep(case).rows[0].seconds)
    # 10 ms, then an exchange beside another 1 ms, then 2 ms that wait for it.
    tasks = ("0 compute 0.01 0 0 0", f"1 all_reduce 0 {size} 0 1 0", "0 compute 0.001 0 0 0", "0 compute 0.002 0 0 1 1")
    plan = "\n".join(("4 1 1", "0 0 0 0", "0 0 0 0", str(len(tasks)), *tasks, ""))
    took, waited = simulator.iteration("by-hand", "smpi-ring", 4, plan).rows
    assert exchange_s > 0.001
    assert max(took.seconds) == pytest.approx(0.012 + exchange_s, rel=1e-3)
    assert min(waited.seconds[::2]) == pytest.approx(exchange_s - 0.001, rel=0.01)


def run_judge(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "smpi" / "run.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@needs_simgrid
@pytest.mark.slow
def test_a_small_run_reports_and_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run_judge("-o", str(output), "--small", "--libraries", "smpi-ring")
    assert done.returncode == 0, done.stderr
    with open(output / "pairs.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["kind"] for row in rows} == {"collective", "iteration"}
    assert {row["what"] for row in rows} >= {"all_reduce", "resnet18 d8", "resnet18 d2f4"}
    for row in rows:
        error = float(row["predicted_s"]) / float(row["simulated_s"]) - 1
        assert float(row["error"]) == pytest.approx(error, abs=1e-3)
    kept = {path.name: path.stat().st_mtime_ns for path in (output / "simulated").iterdir()}
    # One case of the fit is lost, as after an interruption: it alone is simulated again.
    lost = next(name for name in sorted(kept) if "-1x2-" in name)
    (output / "simulated" / lost).unlink()
    refused = run_judge("-o", str(output), "--small", "--libraries", "smpi-ring", "--only-kept")
    assert refused.returncode == 2
    assert "is not simulated yet" in refused.stderr.splitlines()[-1]
    assert run_judge("-o", str(output), "--small", "--libraries", "smpi-ring").returncode == 0
    again = {path.name: path.stat().st_mtime_ns for path in (output / "simulated").iterdir()}
    assert [name for name in kept if kept[name] != again[name]] == [lost]


def test_wrong_input_is_one_line(tmp_path: Path) -> None:
    done = run_judge("-o", str(tmp_path), "--libraries", "openmpi")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "run.py: --libraries openmpi: unknown openmpi; choose from smpi-ring, smpi-mpich"
    ]
