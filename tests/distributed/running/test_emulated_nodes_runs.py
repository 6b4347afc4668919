"""Sweeps and training on emulated nodes: what they measure and record, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from host_network import held, namespaces_of, needs_nodes
from in_process import run_in_process
from survival_program import children, start, wait_for, write_networks

from calibrate.fitting.fit import fit_profile
from paradl_bench.measure.collectives.ghosts_before import GHOSTS_S
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.ranks.emulated_nodes.links import burst_bytes
from paradl_bench.records.contexts.context import CONTEXTS_FILE, ContextSamples
from paradl_bench.records.emulation import EmulatedNodes, emulated_nodes
from paradl_bench.records.hosts.host_record import last_of_each, read_host_records
from paradl_bench.records.measurement import COLLECTIVES_FILE, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.records.training.training_record import read_run
from predict.costs.communication.communication_costs import CommunicationCosts

pytestmark = [pytest.mark.distributed, pytest.mark.long(minutes=3)]

RATE = 25e6
LINK = ("--link-bandwidth", "200Mbit/s")
SWEEP = ("collectives", *LINK, "--ops", "all_reduce", "--blocks", "1", "--point-seconds", "0.001")


def nodes_of(directory: Path) -> EmulatedNodes | None:
    return emulated_nodes(read_manifest(directory).environment.emulated)


def may_take_turns() -> bool:
    """Whether this machine lets a process run under SCHED_RR; a container may not."""
    program = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


@needs_nodes
def test_the_link_bounds_an_all_reduce_only_between_nodes(
    tmp_path: Path,
) -> None:
    across = run_in_process(
        tmp_path, *SWEEP, "--nodes", "2", "--ranks-per-node", "1", "--sizes", "4K,64K,8M", "-o", "across"
    )
    assert across.returncode == 0, across.stderr
    assert across.stdout.startswith("emulated: 2 x 1 ranks, nodes with links of 25.0 MB/s (tbf at both ends")
    inside = run_in_process(
        tmp_path, *SWEEP, "--nodes", "1", "--ranks-per-node", "2", "--sizes", "4K,64K,8M", "-o", "inside",
        "--contexts", "after-compute,with-all-reduce,with-compute",
    )  # fmt: skip
    assert inside.returncode == 0, inside.stderr
    # Layers sleep there, and so does what stands before calls.
    records = read_records(tmp_path / "inside", CONTEXTS_FILE, ContextSamples)
    assert {record.context for record in records} == {"after-compute", "with-all-reduce", "with-compute"}
    assert {record.neighbour for record in records} == {"ghosts"}
    for record in records:
        slept = record.neighbour_idle_s if record.context == "with-compute" else record.neighbour_s
        if record.context != "with-all-reduce":
            assert min(value for row in slept for value in row) >= GHOSTS_S
    settings = read_manifest(tmp_path / "inside").environment.settings
    assert settings["scheduling"] == ("SCHED_RR" if may_take_turns() else "SCHED_OTHER")
    for name, level, hosts in (("across", "system", ["node0", "node1"]), ("inside", "node", ["node0", "node0"])):
        records = read_records(tmp_path / name, COLLECTIVES_FILE, CollectiveSamples)
        assert all(record.verified and (record.level, record.ranks) == (level, 2) for record in records)
        placed = last_of_each(read_host_records(tmp_path / name))
        assert [placed[rank].host for rank in range(2)] == hosts
        # Nodes share the host's clock.
        assert all((host.clock_offset_s, host.clock_error_s) == (0, 0) for host in placed.values())
        assert len({host.core for host in placed.values()}) == min(2, len(os.sched_getaffinity(0)))
        found = nodes_of(tmp_path / name)
        assert found is not None
        assert (found.ranks, found.link_bytes_per_s) == (2, RATE)
    # Either rank sends as many bytes as the message has: 2 (p - 1) / p times as many.
    least_s = (8 * 1024**2 - burst_bytes(RATE)) / RATE
    (large,) = (
        record
        for record in read_records(tmp_path / "across", COLLECTIVES_FILE, CollectiveSamples)
        if record.message_bytes == 8 * 1024**2
    )
    assert min(max(times) for times in zip(*large.samples_s, strict=True)) >= least_s
    profile = fit_profile([tmp_path / "inside", tmp_path / "across"], command_line=("calibrate",), force=False)
    assert [(level.name, level.ranks) for level in profile.cluster.levels] == [("node", 2), ("system", 2)]
    assert {fit.level for fit in profile.communication} == {"node", "system"}


@pytest.mark.slow
@needs_nodes
def test_three_levels_are_measured_into_one_profile(tmp_path: Path) -> None:
    places = {"node": "--nodes 1x1 --ranks-per-node 2", "rack": "--nodes 2x2 --ranks-per-node 1 --side-by-side 2"}
    places["system"] = "--nodes 2x1 --ranks-per-node 1"
    rates = {"rack": 12.5e6, "system": 2.5e6}
    for level, place in places.items():
        result = run_in_process(
            tmp_path, *SWEEP, *place.split(), "--link-bandwidth", "100Mbit/s,20Mbit/s", "--sizes", "4K,64K,512K,1M",
            "-o", level,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        records = read_records(tmp_path / level, COLLECTIVES_FILE, CollectiveSamples)
        assert all(record.verified and (record.level, record.ranks) == (level, 2) for record in records)
        if level in rates:
            large = next(record for record in records if record.message_bytes == 1024**2)
            least_s = (1024**2 - burst_bytes(rates[level])) / rates[level]
            assert min(max(times) for times in zip(*large.samples_s, strict=True)) >= least_s
    profile = fit_profile([tmp_path / level for level in places], command_line=("calibrate",), force=False)
    assert [(level.name, level.ranks) for level in profile.cluster.levels] == [("node", 2), ("rack", 4), ("system", 4)]
    # Of each level the reached bytes/s: of two ranks each sends as many bytes as the message has.
    costs, strategy, size = CommunicationCosts(profile, None, "gloo"), parse_strategy("d2c2f2"), 1024**2
    reached = {}
    for axis, level in enumerate(("system", "rack", "node")):
        work = Collective(operation="all_reduce", message_bytes=size, ranks=2, axes=(axis,))
        reached[level] = size / costs.cost(work, strategy).cost.seconds
    assert reached["system"] < reached["rack"] < reached["node"]
    # A busy host makes calls longer, and no call is faster than its link, but for what a bucket lets pass at once.
    for level, rate in rates.items():
        assert rate / 2 < reached[level] < 1.2 * rate


def ranks_on_nodes(process: subprocess.Popen[str]) -> set[str]:
    return namespaces_of(*children(process.pid)) if process.poll() is None else set()


@needs_nodes
def test_emulated_nodes_vanish_after_a_kill_or_an_interruption(tmp_path: Path) -> None:
    command = (*SWEEP, "--nodes", "2", "--ranks-per-node", "1", "--sizes", "1K", "--blocks", "3000", "-o", "sweep")
    for number in (signal.SIGKILL, signal.SIGINT):
        process = start(tmp_path, *command)
        measured = tmp_path / "sweep" / COLLECTIVES_FILE
        before = measured.stat().st_size if measured.exists() else 0
        wait_for(lambda: measured.exists() and measured.stat().st_size > before)  # noqa: B023
        namespaces = ranks_on_nodes(process)
        assert len(namespaces) == 2
        assert held(namespaces) == namespaces
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 3), errors
        # Ranks end when the kernel tells them that their launcher is gone.
        wait_for(lambda: not held(namespaces))  # noqa: B023


@needs_nodes
def test_training_runs_on_nodes_and_issues_what_is_planned(tmp_path: Path) -> None:
    write_networks(tmp_path)
    command = ("train", "survivors:Plain", "--batch", "4", "--strategy", "d2", "--nodes", "2", *LINK, "-o", "run")
    result = run_in_process(tmp_path, *command, "--iterations", "3", "--warmup", "3", "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["emulated"].startswith("2 x 1 ranks, nodes with links of 25.0 MB/s")
    assert summary["run"]["issued_equals_plan"] is True
    other = run_in_process(tmp_path, *command, "--nodes", "1", "--iterations", "3", "--warmup", "3")
    assert other.returncode == 2
    assert "was measured with emulated_nodes 2x1, not 1x2; give another directory" in other.stderr


@pytest.mark.slow
@needs_nodes
def test_leader_exchange_and_concurrent_groups_respect_emulated_nodes(tmp_path: Path) -> None:
    write_networks(tmp_path)
    result = run_in_process(
        tmp_path, "train", "survivors:Plain", "--batch", "4", "--strategy", "d4", "--exchange", "leader",
        "--nodes", "2", *LINK, "--iterations", "3", "--warmup", "3", "-o", "run",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    run = read_run(tmp_path / "run")
    assert (run.ranks_per_node, run.issued_equals_plan) == (2, True)
    groups = {item.group for item in run.issued if item.when == "iteration"}
    assert {(0, 1), (0, 2)} <= groups
    result = run_in_process(
        tmp_path,
        *SWEEP,
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--contexts",
        "groups=2",
        "--sizes",
        "256K,1M",
        "-o",
        "two",
    )
    assert result.returncode == 0, result.stderr
    records = read_records(tmp_path / "two", CONTEXTS_FILE, ContextSamples)
    # A group has a rank on either node, and shares the links with the other group.
    about = {(record.level, record.ranks, record.ranks_per_node, record.groups) for record in records}
    assert about == {("system", 2, 1, 2)}
    sent = [record for record in records if record.message_bytes == 1024**2]
    seconds = [max(times) for record in sent for times in zip(*record.end_s, strict=True)]
    assert min(seconds) >= (1024**2 - burst_bytes(RATE)) / RATE


def test_without_root_a_sweep_runs_on_one_level_with_notice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paradl_bench", *SWEEP, "--nodes", "2", "--ranks-per-node", "1"]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv of util-linux, which takes root's rights away, is not installed")
        command = ["setpriv", "--bounding-set=-sys_admin", *command]
    result = subprocess.run(
        [*command, "--sizes", "1K", "-o", "sweep"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "emulated: 2 x 1 ranks, nodes on one level (this process may not make network names" in result.stderr
    (record,) = read_records(tmp_path / "sweep", COLLECTIVES_FILE, CollectiveSamples)
    assert (record.level, record.verified) == ("node", True)
    assert nodes_of(tmp_path / "sweep") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("collectives --nodes 2 --ranks 2", "--nodes 2: give the rate of each node's link as well"),
        ("collectives --ranks-per-node 2 --ranks 2", "--ranks-per-node is for emulated nodes: give --nodes"),
        (
            "collectives --nodes 3 --ranks-per-node 1 --contexts groups=2 --link-bandwidth 1Gbit/s",
            "--contexts groups=2: 3 ranks cannot form so many equal groups of 2 or more",
        ),
        ("collectives --nodes 1 --ranks-per-node 1 --link-bandwidth 1Gbit/s", "a collective needs at least 2 ranks"),
        (
            "collectives --nodes 2 --ranks 2 --link-bandwidth 1Gbit/s --backend nccl",
            "--nodes emulates nodes for ranks on a CPU",
        ),
        ("collectives --tool osu --nodes 2 --ranks 2", "--nodes is for --tool torch; osu does not have it"),
        (
            "collectives --nodes 2 --ranks 2 --link-bandwidth 1Gbit/s --launcher torchrun",
            "--nodes emulates nodes for ranks that this program starts; torchrun started this one",
        ),
        (
            "train alexnet --strategy d4 --batch 4 --nodes 3 --link-bandwidth 1Gbit/s",
            "--nodes 3, which 4 ranks do not fill equally",
        ),
    ],
)
def test_mistakes_are_said_before_any_rank_starts(
    tmp_path: Path, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    result = run_in_process(tmp_path, *arguments.split(), "-o", "out")
    assert (result.returncode, message in result.stderr) == (2, True), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
