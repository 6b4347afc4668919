"""The whole chain on a real Slurm of two nodes: profile, sweep, runs, calibrate, predict, validate, report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import NODES, CannotStart, SlurmCluster, running_cluster, why_not

pytest.importorskip("torch")

from paradl_bench.records.measurement import COLLECTIVES_FILE, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, read_run

ROOT = Path(__file__).parents[2]
# Set where skipping would hide that nothing was tested.
REQUIRED = os.environ.get("PARADL_TEST_SLURM") == "required"
REASON = None if REQUIRED else why_not()

pytestmark = [
    pytest.mark.long(minutes=8),
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm of our own: {REASON}"),
]

# A model of the user's own, found in the folder in which the command is typed.
MODEL = """
import torch

def small():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(4), torch.nn.Flatten(),
        torch.nn.Linear(16 * 64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10),
    )
"""
ARGUMENTS = (
    *("--nodes", "1,2", "--models", "own_model:small", "--input-shape", "3x32x32", "--batch", "16"),
    *("--strategies", "serial,data", "--iterations", "10", "--warmup", "3", "--blocks", "2"),
    *("--ops", "all_reduce,broadcast", "--sizes", "128:512K:16", "--point-seconds", "0.01"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    try:
        with running_cluster(tmp_path_factory.mktemp("slurm")) as found:
            yield found
    except CannotStart as error:
        if REQUIRED:
            raise
        pytest.skip(f"no Slurm of our own: {error}")


def site(folder: Path, partition: str = "main", launcher: str = "srun") -> Path:
    path = folder / f"site-{partition}-{launcher}.yaml"
    path.write_text(
        f"device: cpu\nranks_per_node: 1\npartition: {partition}\nlauncher: {launcher}\ninterface: lo\n"
        f"python: {sys.executable}\n"
        # The names of these nodes are no hosts' names.
        f"variables: {{MASTER_ADDR: 127.0.0.1, PYTHONPATH: {ROOT}}}\n"
        "time_limits: {layers: 8m, sweep: 8m, run: 8m, analysis: 5m}\n"
    )
    return path


def run(cluster: SlurmCluster, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paradl_bench", *arguments],
        cwd=where,
        env=os.environ | cluster.variables | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=1600,
        check=False,
    )


@pytest.fixture(scope="module")
def calibration(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("calibration")
    (where / "own_model.py").write_text(MODEL)
    done = run(cluster, where, "slurm", "--site", str(site(where)), *ARGUMENTS, "-o", "out", "--submit", "--wait")
    logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted((where / "out/logs").glob("*")))
    assert done.returncode == 0, f"{done.stderr}\n{logs}\n{cluster.logs()}"
    return where / "out"


def test_every_job_ran_and_the_report_says_so(calibration: Path) -> None:
    summary = (calibration / "summary.md").read_text()
    assert "12 of 12 commands are done" in summary
    assert "## Missing" not in summary
    assert "predictions against 2 real runs: mean accuracy" in summary
    assert "- 2 nodes of sweep-2 (node1, node2) agree in all that doctor compares\n" in summary
    nodes = json.loads((calibration / "nodes/sweep-2/nodes.json").read_text())["nodes"]
    assert [node["ranks"] for node in nodes] == [[0], [1]]
    assert 0 < nodes[1]["clock"]["clock_error_s"] < 1
    # Of a run on several nodes as well, which its ranks have looked at themselves.
    of_run = json.loads((calibration / "runs/own_model_small-d2/nodes.json").read_text())

    def of_one(name: str) -> dict[str, Any]:
        node: dict[str, Any]
        (node,) = json.loads((calibration / name / "nodes.json").read_text())["nodes"]
        return node

    assert [(node["host"], node["ranks"]) for node in of_run["nodes"]] == [("node1", [0]), ("node2", [1])]
    assert of_run["differences"] == []
    # Of jobs on one node: Slurm gives another one each time.
    assert any(f"- layers ran on {name}\n" in summary for name in ("node1", "node2"))
    assert {"CPU", "torch"} <= {each["name"] for each in of_one("nodes/layers")["findings"]}
    assert of_one("runs/own_model_small-serial")["host"] in ("node1", "node2")
    measured = summary.partition("## Stragglers and slow spells\n")[2]
    for name in ("sweeps/gloo-2", "runs/own_model_small-serial", "runs/own_model_small-d2"):
        assert name in measured


def test_ranks_were_on_two_nodes_and_are_of_one_cluster(calibration: Path) -> None:
    sweep = calibration / "sweeps/gloo-2"
    records = read_records(sweep, COLLECTIVES_FILE, CollectiveSamples)
    assert {(record.level, record.ranks, record.ranks_per_node) for record in records} == {("system", 2, 1)}
    assert all(record.verified for record in records)
    manifest = read_manifest(sweep)
    assert manifest.environment.hostname == "main"
    assert manifest.environment.variables["SLURM_JOB_NUM_NODES"] == "2"
    assert manifest.environment.settings["scheduling"] == "SCHED_BATCH"


def test_the_profile_and_the_validation_hold_what_was_measured(calibration: Path) -> None:
    profile = json.loads((calibration / "profile.json").read_text())
    assert list(profile["network"]) == ["own_model:small"]
    assert {fit["operation"] for fit in profile["communication"]} == {"all_reduce", "broadcast"}
    assert {fit["level"] for fit in profile["communication"]} == {"system"}
    assert not any("merged because of --force" in note for note in profile["notes"])
    report = json.loads((calibration / "report/report.json").read_text())
    pairs = [pair for pair in report["pairs"] if pair["evaluator"] == "simulate"]
    assert {(pair["strategy"], pair["ranks"], pair["batch"]) for pair in pairs} == {("serial", 1, 16), ("d2", 2, 32)}
    for pair in pairs:
        directory = calibration / "runs" / f"own_model_small-{pair['strategy']}"
        assert pair["run"] == str(directory)
        assert pair["issued_equals_plan"] is True
        assert pair["iterations"] == 10
        assert read_run(directory).launcher == "srun"
    predicted = json.loads((calibration / "predictions/own_model_small-scaling.json").read_text())
    assert [point["ranks"] for point in predicted] == [2, 4, 8, 16]


def test_submitting_again_repeats_nothing(cluster: SlurmCluster, calibration: Path) -> None:
    before = (calibration / "submitted.json").read_bytes()
    where = calibration.parent
    done = run(cluster, where, "slurm", "--site", str(site(where)), *ARGUMENTS, "-o", "out", "--submit")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" is done\n") == 8
    assert (calibration / "submitted.json").read_bytes() == before


def test_what_is_missing_alone_is_started_again(cluster: SlurmCluster, calibration: Path) -> None:
    where = calibration.parent
    measured = (calibration / "layers/own_model_small-r1/layers.jsonl").stat().st_mtime_ns
    (calibration / "runs/own_model_small-d2/manifest.json").rename(where / "kept")
    status = run(cluster, where, "slurm-status", "out", "--exit-code")
    assert status.returncode == 3
    assert "runs-2" in status.stderr
    assert "measured iterations and memory of d2" in status.stdout
    (where / "kept").rename(calibration / "runs/own_model_small-d2/manifest.json")
    (calibration / "state/runs-own_model_small-d2.json").unlink()
    done = run(cluster, where, "slurm", "--site", str(site(where)), *ARGUMENTS, "-o", "out", "--submit", "--wait")
    assert done.returncode == 0, done.stderr
    for name in ("layers", "sweep-2", "runs-1", "calibrate", "predict"):
        assert f"{name} is done\n" in done.stderr
    for name in ("runs-2", "validate", "report"):
        assert f"{name} is submitted as " in done.stderr
    assert (
        "holds all 10 iterations already"
        in (calibration / "logs")
        .joinpath(f"runs-2-{json.loads((calibration / 'submitted.json').read_text())['runs-2']['job_id']}_0.out")
        .read_text()
    )
    assert (calibration / "layers/own_model_small-r1/layers.jsonl").stat().st_mtime_ns == measured
    assert "12 of 12 commands are done" in (calibration / "summary.md").read_text()


def test_a_partition_that_is_not_there_is_one_line(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(MODEL)
    done = run(
        cluster, tmp_path, "slurm", "--site", str(site(tmp_path, "nowhere")), *ARGUMENTS, "-o", "out", "--submit"
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "sbatch refuses" in last
    assert "invalid partition specified: nowhere" in last
    assert cluster.ask("squeue", "--noheader").strip() == ""


def test_a_failed_job_ends_the_chain_with_a_report(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(MODEL)
    arguments = (*ARGUMENTS, "--batch", "4", "-o", "out")
    written = run(cluster, tmp_path, "slurm", "--site", str(site(tmp_path)), *arguments)
    assert written.returncode == 0, written.stderr
    script = tmp_path / "out/scripts/layers.sbatch"
    # As a user may edit it; what is submitted is what was edited.
    script.write_text(script.read_text().replace("layers own_model:small", "layers own_model:big"))
    for name in ("sweep-2", "runs-1", "runs-2"):
        path = tmp_path / "out/scripts" / f"{name}.sbatch"
        path.write_text(
            "#!/bin/bash\n"
            + "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#SBATCH"))
            + "exit 0\n"
        )
    done = run(cluster, tmp_path, "slurm", "--site", str(site(tmp_path)), *arguments, "--submit", "--wait")
    assert done.returncode == 3
    assert "was edited by hand and is kept" in done.stderr
    summary = (tmp_path / "out/summary.md").read_text()
    assert "1 of 12 commands are done" in summary
    assert "| layers | layers/own_model_small-r1 | failed with exit code 2" in summary
    assert "without them no prediction" in summary
    assert (
        "own_model"
        in (tmp_path / "out/logs")
        .joinpath(f"layers-{json.loads((tmp_path / 'out/submitted.json').read_text())['layers']['job_id']}.out")
        .read_text()
    )
    assert not (tmp_path / "out/profile.json").exists()


def test_ranks_join_by_torchruns_rendezvous(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(MODEL)
    written = run(
        cluster, tmp_path, "slurm", "--site", str(site(tmp_path, launcher="torchrun")), *ARGUMENTS, "-o", "out"
    )
    assert written.returncode == 0, written.stderr
    done = subprocess.run(
        ["sbatch", "--wait", "out/scripts/runs-2.sbatch"],
        cwd=tmp_path,
        env=os.environ | cluster.variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    logs = "\n".join(path.read_text() for path in (tmp_path / "out/logs").glob("*"))
    assert done.returncode == 0, f"{done.stderr}{logs}"
    found = read_run(tmp_path / "out/runs/own_model_small-d2")
    assert (found.launcher, found.ranks, found.issued_equals_plan) == ("torchrun", 2, True)


def wait_until(condition: Callable[[], bool], limit_s: float = 600) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


class LongRun:
    """Serial training that lasts longer than any test, started, ended and started again by Slurm."""

    def __init__(self, cluster: SlurmCluster, where: Path) -> None:
        self.cluster, self.where = cluster, where
        (where / "own_model.py").write_text(MODEL)
        words = list(ARGUMENTS)
        words[words.index("--iterations") + 1] = "1000000"
        written = run(cluster, where, "slurm", "--site", str(site(where)), *words, "-o", "out")
        assert written.returncode == 0, written.stderr
        self.rows = where / "out/runs/own_model_small-serial" / TRAINING_FILE
        self.mark = where / "out/state/runs-own_model_small-serial.json"

    def submit(self, *options: str) -> str:
        return self.cluster.ask("sbatch", "--parsable", *options, str(self.where / "out/scripts/runs-1.sbatch")).strip()

    def in_queue(self, job: str) -> bool:
        return f"{job}_0 " in self.cluster.ask("squeue", "--noheader", "--array", "--format=%i ")

    def measured(self) -> bytes:
        """Rows that were written whole."""
        content = self.rows.read_bytes() if self.rows.exists() else b""
        return content[: content.rfind(b"\n") + 1]

    def wait_for_more(self) -> None:
        """Until rows were added to those that are there, which stay as they are."""
        before = self.measured()
        wait_until(lambda: len(self.measured()) > len(before))
        assert self.measured().startswith(before)

    def log(self, job: str) -> str:
        return (self.where / f"out/logs/runs-1-{job}_0.out").read_text()

    def node(self) -> str:
        """Where the command was begun last."""
        return str(json.loads(self.mark.read_text())["node_list"])


def test_a_run_resumes_after_time_limit_drain_requeue_and_scancel(cluster: SlurmCluster, tmp_path: Path) -> None:
    long = LongRun(cluster, tmp_path)
    submitted = time.monotonic()
    first = long.submit("--time=60", "--signal=TERM@5")
    long.wait_for_more()
    # One to two minutes from now: Slurm looks every half a minute, and warns of what comes before it looks again.
    minutes = int((time.monotonic() - submitted) // 60) + 2
    cluster.ask("scontrol", "update", f"JobId={first}_0", f"TimeLimit={minutes}")
    wait_until(lambda: not long.in_queue(first))
    assert json.loads(long.mark.read_text())["exit_code"] == 3, long.log(first)
    assert re.search(r"error: ended by SIGTERM \(time limit\?\); what was measured is kept", long.log(first))
    assert long.measured()
    drained = long.node()
    cluster.ask("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=tried")
    try:
        second = long.submit()
        long.wait_for_more()
        other = long.node()
        assert {drained, other} == set(NODES)
        assert "iterations measured before" in long.log(second)
        cluster.ask("scontrol", "requeue", f"{second}_0")
        wait_until(lambda: ", start 1\n" in long.log(second))
        long.wait_for_more()
        assert long.node() == other
        cluster.ask("scancel", f"{second}_0")
        wait_until(lambda: not long.in_queue(second))
    finally:
        cluster.ask("scontrol", "update", f"NodeName={drained}", "State=RESUME")
    status = run(cluster, tmp_path, "slurm-status", "out").stdout
    assert re.search(
        r"\| runs/own_model_small-serial \| (begun and not ended|ended by|failed with exit code 3)", status
    )
    assert "To go on" in status
    records = read_records(long.rows.parent, TRAINING_FILE, TrainingIterations)
    firsts = Counter(record.first_iteration for record in records)
    assert set(firsts.values()) == {1}
    # Without a gap: what one attempt ended with, the next one went on from.
    assert sorted(firsts) == [sum(len(r.iteration_s) for r in records[:i]) for i in range(len(records))]
