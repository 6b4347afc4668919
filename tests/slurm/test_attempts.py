"""Attempts at commands: noted by the scripts, however they end, and counted in what was spent; what a start costs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from in_process import run_in_process

from paradl_bench.records.measurement import SCHEMA_VERSION, Environment, Manifest, write_manifest
from paradl_bench.slurm.attempts import Spent, read_attempts, spent_on
from paradl_bench.slurm.jobs.plan import read_plan
from paradl_bench.slurm.jobs.site import Rates, Site
from paradl_bench.slurm.starts import ASSUMED, Start, start_of

SITE = Site(device="cpu", ranks_per_node=2)
MARK = "layers-vgg11-r1"


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A calibration's folder, as the command writes it."""
    (tmp_path / "site.yaml").write_text("device: cpu\nranks_per_node: 2\n")
    words = ("--nodes", "1,2", "--models", "vgg11", "--input-shape", "3x32x32", "-o", "out")
    done = run_in_process(tmp_path, "slurm", "--site", "site.yaml", *words)
    assert done.returncode == 0, done.stderr
    return tmp_path / "out"


def start_job(chain: Path, job: str, srun: str) -> subprocess.CompletedProcess[str]:
    """The script of the layers' job, as Slurm starts it, with an ``srun`` of our own for what measures."""
    programs = chain.parent / "bin"
    programs.mkdir(exist_ok=True)
    own = f'case " $* " in *" doctor "*) exit 0;; esac\n{srun}'
    for name, body in (("srun", own), ("scontrol", "echo node1")):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": job, "SLURM_JOB_NAME": "x"}
    variables |= {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
    script = ["bash", str(chain / "scripts/layers.sbatch")]
    return subprocess.run(script, env=variables, capture_output=True, text=True, timeout=60, check=False)


def line(job: str, code: int | None, seconds: int = 0, nodes: int = 1, utc: str = "2026-01-01T00:00:00Z") -> bytes:
    note = {"exit_code": code, "seconds": seconds, "nodes": nodes, "node_list": "n1", "job": job, "noted_utc": utc}
    return b"\n" + msgspec.json.encode(note) + b"\n"


def test_scripts_note_every_attempt_and_killed_ones_have_no_end(chain: Path) -> None:
    # As at the end of a time limit: the script is killed with what it runs.
    killed = start_job(chain, "7", "kill -9 $PPID")
    assert killed.returncode == -9
    assert start_job(chain, "7", "exit 3").returncode == 3
    assert start_job(chain, "8", "exit 0").returncode == 0
    attempts = read_attempts(chain, MARK)
    assert [(each.job, each.seconds is None) for each in attempts] == [("7", True), ("7", False), ("8", False)]
    assert json.loads((chain / f"state/{MARK}.json").read_text())["exit_code"] == 0
    # The second command of the job was begun by the second attempt only.
    assert [each.job for each in read_attempts(chain, "layers-vgg11-r2")] == ["7", "8"]
    text = run_in_process(chain.parent, "slurm-status", "out").stdout
    # Three more were at looking what the node has.
    assert ", in 8 attempts at its commands; " in text
    assert "1 attempts were killed, or run still: how long they took is not counted." in text


def test_a_full_disk_stops_no_command_and_is_reported(chain: Path) -> None:
    (chain / f"state/{MARK}.attempts").symlink_to("/dev/full")
    done = start_job(chain, "7", "echo measured")
    assert done.returncode == 3
    assert done.stdout.count("measured\n") == 2
    said = f"{MARK}: what becomes of it can't be noted in {chain}/state (a full disk?): submit again to go on\n"
    assert done.stdout.count(said) == 2
    assert not (chain / f"state/{MARK}.json").exists()
    assert json.loads((chain / "state/layers-vgg11-r2.json").read_text())["exit_code"] == 0


def test_all_attempts_are_spent_and_torn_notes_are_passed_over(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(chain)
    assert spent_on(chain, plan) == Spent()
    (chain / f"state/{MARK}.attempts").write_bytes(
        line("7", None) + line("7", 143, 600) + line("7", None)[:-9] + line("9", None) + line("9", 0, 30)
    )
    (chain / "state/sweeps-gloo-2.attempts").write_bytes(line("10", None, nodes=2) + line("10", 0, 60, 2))
    # What fits and predicts is no measuring.
    (chain / "state/profile.json.attempts").write_bytes(line("11", None) + line("11", 0, 1000))
    assert spent_on(chain, plan) == Spent(node_s=750.0, attempts=3)
    (chain / "state/sweeps-gloo-1.attempts").write_bytes(line("12", None))
    assert spent_on(chain, plan) == Spent(node_s=750.0, attempts=4, cut_short=1)
    # Accounting knows of the killed one as well, and of each start of a requeued job.
    program = chain.parent / "sacct"
    program.write_text("#!/bin/sh\nprintf '%s\\n' '7|700|1' '7|50|1' '9|40|1' '10|70|2' '12|90|1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{chain.parent}:{os.environ['PATH']}")
    assert spent_on(chain, plan) == Spent(node_s=1020.0, attempts=4, cut_short=1, source="sacct")
    for told in ("echo '7|700|1'", "echo 'Slurm accounting storage is disabled' >&2; exit 1"):
        program.write_text(f"#!/bin/sh\n{told}\n")
        assert spent_on(chain, plan).source == "notes"


def test_start_cost_is_stated_else_recorded_else_assumed(chain: Path) -> None:
    assert start_of(SITE, chain, None) == ASSUMED
    seconds, source = start_of(SITE, chain, 6.5)
    assert seconds == 26.5
    assert "torch took 6.5 s to load here, and 20 s more are assumed" in source
    for mark, opened in ((MARK, 41), ("layers-vgg11-r2", 45)):
        (chain / f"state/{mark}.attempts").write_bytes(
            line("7", None, utc="2026-01-01T00:00:00Z") + line("7", 0, 100, utc="2026-01-01T00:01:40Z")
        )
        directory = chain / mark.replace("-", "/", 1)
        directory.mkdir(parents=True)
        write_manifest(directory, manifest(f"2026-01-01T00:00:{opened}Z"))
    assert start_of(SITE, chain, 6.5) == Start(43.0, "median of 2 starts recorded in out/state")
    stated = msgspec.structs.replace(SITE, estimate=Rates(start_s=9))
    assert start_of(stated, chain, 6.5) == Start(9, "stated by the site file")
    # By hand, before the job: no start of the job's.
    write_manifest(chain / "layers/vgg11-r2", manifest("2025-12-31T00:00:00Z"))
    assert start_of(SITE, chain, None) == Start(41.0, "median of one start recorded in out/state")


def test_the_estimate_names_where_the_start_comes_from(chain: Path) -> None:
    words = ("--nodes", "1,2", "--models", "vgg11", "--input-shape", "3x32x32", "-o", "out", "--dry-run")
    shown = run_in_process(chain.parent, "slurm", "--site", "site.yaml", *words)
    said = re.search(r"([0-9.]+) s a start \((.*?)\)", shown.stderr.replace("\n", " "))
    assert said is not None
    assert float(said[1]) >= 20
    assert "assumed" in said[2]


def manifest(created_utc: str) -> Manifest:
    environment = Environment(
        device="cpu", device_name="x", device_count=1, memory_bytes=1, hostname="n", kernel="", versions={}, settings={}
    )
    return Manifest(
        schema_version=SCHEMA_VERSION,
        kind="layers",
        command_line=("paradl-bench",),
        arguments={},
        created_utc=created_utc,
        environment=environment,
        complete=True,
    )
