"""``paradl-bench slurm`` and ``slurm-status``: what they plan, keep, refuse, submit and tell of a calibration."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from in_process import run_in_process
from profile_factory import make_network, write_training_run
from synthetic_measurements import write_collectives

from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.core.interruption import Terminated
from paradl_bench.measure.machine.node_findings import JobNodes, Node, NodeFinding, differences
from paradl_bench.records.hosts.host_record import RankHost
from paradl_bench.slurm import submission


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": "0"}, "--nodes"),
        ({"nodes": "1,x"}, "--nodes"),
        ({"strategies": "d3f3"}, "9 ranks do not fill whole nodes of 2"),
        ({"strategies": "d8"}, "takes 4 nodes of 2 ranks: add 4 to --nodes"),
        ({"strategies": "data+filter"}, "write the degrees of both"),
        ({"strategies": "q7"}, "strategy 'q7' does not parse"),
        ({"models": "vgg11,,vgg16"}, "'' is not a model's name"),
        ({"models": "resnet18x"}, "unknown model 'resnet18x'"),
        ({"output": "/dev/null/out"}, "cannot make the folder /dev/null/out"),
        ({"output": "a folder"}, "sbatch cannot take ' '"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    (tmp_path / "site.yaml").write_text("device: cpu\nranks_per_node: 2\n")
    given = {"nodes": "1,2", "models": "vgg11", "input-shape": "3x32x32", "output": "out"} | changed
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    done = run_in_process(tmp_path, "slurm", "--site", "site.yaml", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def plan(where: Path, *more: str, nodes: str = "1,2", model: str = "vgg11") -> subprocess.CompletedProcess[str]:
    (where / "site.yaml").write_text("device: cpu\nranks_per_node: 2\nestimate: {start_s: 30}\n")
    sample = ("--models", model, "--input-shape", "3x32x32")
    return run_in_process(where, "slurm", "--site", "site.yaml", "--nodes", nodes, *sample, "-o", "out", *more)


def test_a_dry_run_shows_minutes_and_writes_nothing(tmp_path: Path) -> None:
    done = plan(tmp_path, "--dry-run", model="resnet18")
    assert done.returncode == 0, done.stderr
    assert "node-minutes" in done.stdout
    assert len(done.stdout.splitlines()) < 60
    assert "scripts would be written to" in done.stderr
    assert "2e+10 FLOP/s a rank" in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "site.yaml"]
    planned = json.loads(plan(tmp_path, "--dry-run", "--json", model="resnet18").stdout)
    sweep = next(job for job in planned["jobs"] if job["name"] == "sweep-2")
    assert sweep["nodes"] == 2
    assert "alpha and beta of all_reduce" in sweep["adds"]
    layers = next(job for job in planned["jobs"] if job["name"] == "layers")
    # Forward and backward of resnet18 on 3x32x32 are 0.22 GFLOP a sample; 47 iterations of 8 of them take 4 s.
    assert [round(task["estimate_s"]) for task in layers["tasks"]] == [30, 34, 34]


def test_edited_scripts_are_kept_and_others_follow_the_site_file(tmp_path: Path) -> None:
    assert plan(tmp_path).returncode == 0
    scripts_folder = tmp_path / "out/scripts"
    edited = scripts_folder / "layers.sbatch"
    edited.write_text(edited.read_text().replace("--time=60", "--time=90"))
    (tmp_path / "site.yaml").write_text("device: cpu\nranks_per_node: 2\ntime_limits: {sweep: 2h}\n")
    sample = ("--models", "vgg11", "--input-shape", "3x32x32", "--nodes", "1,2", "-o", "out")
    again = run_in_process(tmp_path, "slurm", "--site", "site.yaml", *sample)
    assert again.returncode == 0
    assert "was edited by hand and is kept" in again.stderr
    assert "--time=90" in edited.read_text()
    assert "--time=120" in (scripts_folder / "sweep-2.sbatch").read_text()
    assert run_in_process(tmp_path, "slurm", "--site", "site.yaml", *sample, "--force").returncode == 0
    assert "--time=60" in edited.read_text()


def test_a_folder_of_another_calibration_is_refused(tmp_path: Path) -> None:
    assert plan(tmp_path).returncode == 0
    done = plan(tmp_path, nodes="1,4")
    assert done.returncode == 2
    assert "is a calibration with nodes 1,2, not 1,4; give another folder" in done.stderr


def test_a_status_without_any_job_names_all_that_is_missing(tmp_path: Path) -> None:
    assert plan(tmp_path).returncode == 0
    done = run_in_process(tmp_path, "slurm-status", "out", "--exit-code")
    assert done.returncode == 3
    assert "0 of 17 commands are done" in done.stdout
    assert "| layers | layers/vgg11-r2 | not started |" in done.stdout
    assert "--submit" in done.stdout
    nothing = run_in_process(tmp_path, "slurm-status", "site.yaml")
    assert nothing.returncode == 2
    assert nothing.stderr.count("\n") == 1


def test_measurements_of_another_site_are_refused_once_they_have_begun(tmp_path: Path) -> None:
    assert plan(tmp_path).returncode == 0
    sample = ("--models", "vgg11", "--input-shape", "3x32x32", "--nodes", "1,2", "-o", "out")
    (tmp_path / "site.yaml").write_text("device: cpu\nranks_per_node: 4\n")
    # Nothing was measured: a mistake in the site file is mended.
    assert run_in_process(tmp_path, "slurm", "--site", "site.yaml", *sample).returncode == 0
    assert "--ntasks-per-node=4" in (tmp_path / "out/scripts/sweep-2.sbatch").read_text()
    (tmp_path / "out/state/layers-vgg11-r1.json").touch()
    for text, named in (
        ("ranks_per_node: 2\n", "ranks of a node 4, not 2"),
        ("ranks_per_node: 4\ncluster: other\n", "cluster none, not other"),
    ):
        (tmp_path / "site.yaml").write_text(f"device: cpu\n{text}")
        done = run_in_process(tmp_path, "slurm", "--site", "site.yaml", *sample)
        assert done.returncode == 2
        assert f"out is a calibration with {named} as the site file says; give another folder" in done.stderr
    (tmp_path / "site.yaml").write_text("device: cpu\nranks_per_node: 4\ntime_limits: {run: 5m}\n")
    assert run_in_process(tmp_path, "slurm", "--site", "site.yaml", *sample).returncode == 0


def test_the_summary_names_what_nodes_differ_in(tmp_path: Path) -> None:
    assert plan(tmp_path).returncode == 0
    assert "## Nodes" not in run_in_process(tmp_path, "slurm-status", "out").stdout
    own = [NodeFinding(name="CPU", found="x"), NodeFinding(name="eth0", found="up 25000 Mb/s")]
    other = [NodeFinding(name="CPU", found="x")]
    nodes = tuple(
        Node(host=f"n{rank}", ranks=(rank,), clock=RankHost(rank=rank, host=f"n{rank}"), findings=tuple(findings))
        for rank, findings in enumerate((own, other, own))
    )
    found = JobNodes(nodes=nodes, differences=differences(nodes))
    (tmp_path / "out/nodes/sweep-2").mkdir(parents=True)
    kept = tmp_path / "out/nodes/sweep-2/nodes.json"
    kept.write_bytes(msgspec.json.encode(found))
    text = run_in_process(tmp_path, "slurm-status", "out").stdout
    assert "- 3 nodes of sweep-2 (n0, n1, n2) differ in what follows\n" in text
    assert "  - eth0: up 25000 Mb/s on n0, n2; missing on n1\n" in text
    kept.write_bytes(msgspec.json.encode(JobNodes(nodes=nodes[::2], differences=())))
    assert "2 nodes of sweep-2 (n0, n2) agree" in run_in_process(tmp_path, "slurm-status", "out").stdout
    away = msgspec.structs.replace(nodes[2], clock=RankHost(rank=2, host="n2", wall_offset_s=90.0, clock_error_s=1e-4))
    kept.write_bytes(msgspec.json.encode(JobNodes(nodes=(nodes[0], away), differences=())))
    told = run_in_process(tmp_path, "slurm-status", "out").stdout
    assert "  - the calendar of n2 is 90.0 s ahead of rank 0's (within 100 us)" in told
    kept.write_bytes(b"{")
    assert "## Nodes" not in run_in_process(tmp_path, "slurm-status", "out").stdout


def test_the_summary_names_straggling_ranks_and_nodes(tmp_path: Path) -> None:
    assert plan(tmp_path).returncode == 0
    assert "## Stragglers" not in run_in_process(tmp_path, "slurm-status", "out").stdout
    even, slow = [(0.1, 0.2, 0.0, 0.01)] * 20, [(0.1, 0.2, 0.0, 0.01)] * 8 + [(0.2, 0.4, 0.0, 0.02)] * 12
    network = make_network()
    write_training_run(tmp_path / "out/runs/vgg11-d2", network, phases_s=[even, even])
    run = write_training_run(
        tmp_path / "out/runs/vgg11-d4", network, strategy="d4", ranks=4, phases_s=[even, even, slow, slow]
    )
    hosts = [RankHost(rank=rank, host=f"n{rank // 2}", attempt=1) for rank in range(4)]
    append_lines(run / "hosts.jsonl", hosts)
    nodes = tuple(
        Node(host=f"n{i}", ranks=(2 * i,), clock=hosts[2 * i], findings=(NodeFinding(name="CPU turbo", found=state),))
        for i, state in enumerate(("on", "off"))
    )
    (run / "nodes.json").write_bytes(msgspec.json.encode(JobNodes(nodes=nodes, differences=differences(nodes))))
    write_collectives(tmp_path / "out/sweeps/gloo-1")
    text = run_in_process(tmp_path, "slurm-status", "out").stdout
    section = text.partition("## Stragglers and slow spells\n\n")[2].partition("\n\n")[0]
    assert "- all ranks kept pace in " in section
    assert "runs/vgg11-d2" in section.splitlines()[0]
    named = section.partition("- runs/vgg11-d4\n")[2].splitlines()[:3]
    assert named == [
        "  - its 2 nodes differ in CPU turbo: on on n0; off on n1",
        "  - node n1 is slow: its 2 ranks compute 2.00 times as long as their peers, in 60% of iterations",
        "  - 60% of iterations had a rank that its peers waited for",
    ]
    # What can't be read keeps no summary from being written.
    (run / "nodes.json").write_bytes(b"{")
    torn = run_in_process(tmp_path, "slurm-status", "out").stdout.partition("## Stragglers")[2]
    assert "vgg11-d4" not in torn.partition("## Missing")[0]


def test_what_the_script_noted_is_told_apart(tmp_path: Path) -> None:
    assert plan(tmp_path).returncode == 0
    note = {"seconds": 5, "nodes": 1, "node_list": "n1", "job": "9", "noted_utc": "2026-01-01T00:00:00Z"}
    codes = {"layers-vgg11-r1": 3, "layers-vgg11-r2": None, "sweeps-gloo-1": 0, "sweeps-gloo-2": 143}
    for mark, code in codes.items():
        (tmp_path / f"out/state/{mark}.json").write_bytes(msgspec.json.encode({"exit_code": code} | note))
    text = run_in_process(tmp_path, "slurm-status", "out").stdout
    kept = "what it measured is kept"
    assert f"layers/vgg11-r1 | failed with exit code 3 after 5 s (job 9 on n1); {kept} | logs/layers-9.out" in text
    assert "layers/vgg11-r2 | begun and not ended (job 9 on n1)" in text
    # By SIGTERM before it could say so itself, as while torch is loaded.
    assert "sweeps/gloo-2 | ended by SIGTERM after 5 s (job 9 on n1); what it measured is kept" in text
    # It ended well, and what it measured was taken away since.
    assert "sweeps/gloo-1 | not started" in text


def test_without_slurm_nothing_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = plan(tmp_path, "--submit")
    assert done.returncode == 3
    assert "sbatch is not on PATH" in done.stderr
    assert (tmp_path / "out/scripts/layers.sbatch").exists()


@pytest.mark.parametrize("broken", ["squeue", "sbatch"])
def test_a_program_that_cannot_be_started_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("squeue", "sbatch"):
        # Its interpreter is missing.
        (programs / name).write_text("#!/no/such/shell\n" if name == broken else "#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    done = plan(tmp_path, "--submit")
    assert done.returncode == 3
    assert f"{programs / broken} could not be started: " in done.stderr
    assert "Traceback" not in done.stderr


def test_waiting_joins_a_chain_already_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue shows all jobs as waiting, twice; then they are gone, and the report has not been written."""
    assert plan(tmp_path).returncode == 0
    names = [job["name"] for job in json.loads((tmp_path / "out/plan.json").read_text())["jobs"]]
    rows = "\n".join(f"{number}|paradl-{name}|{tmp_path}/out" for number, name in enumerate(names, start=10))
    (tmp_path / "rows").write_text(f"{rows}\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    asked = f'echo asked >> {tmp_path}/asked; [ "$(wc -l < {tmp_path}/asked)" -gt 2 ] || cat {tmp_path}/rows'
    for name, body in (("squeue", asked), ("sbatch", f"touch {tmp_path}/submitted")):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(submission, "_POLL_S", 0.01)
    done = plan(tmp_path, "--submit", "--wait")
    assert done.stderr.count("is in the queue already as ") == len(names)
    assert done.returncode == 3
    assert "job report has left the queue and failed" in done.stderr
    assert (tmp_path / "asked").read_text().count("asked") == 3
    assert not (tmp_path / "submitted").exists()


@pytest.mark.timeout(60)
def test_who_waits_for_a_chain_can_be_ended_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on: only the program that waits for it is ended."""
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho 7\nexec sleep 1000\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    waiting = submission._sbatch(["layers.sbatch"], wait=True)
    assert waiting.__enter__() == 7
    assert not waiting.__exit__(Terminated, Terminated(), None)


def test_operations_that_are_given_go_before_those_that_strategies_need(tmp_path: Path) -> None:
    for options, operations in (((), "send_recv,exchange"), (("--ops", "all_reduce"), "--ops all_reduce")):
        folder = tmp_path / f"out-{len(options)}"
        done = plan(tmp_path, "--strategies", "spatial", *options, "-o", str(folder))
        scripts = "".join(path.read_text() for path in (folder / "scripts").iterdir())
        assert f"{operations} --sizes" in scripts, done.stderr
