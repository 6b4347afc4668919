"""``doctor`` on two nodes that are one here: each task sees a host name, a sysfs and an ``nvidia-smi`` of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process

pytestmark = pytest.mark.distributed

PROGRAM = """
import os, platform, sys
from pathlib import Path
from paradl_bench.measure.machine import doctor
from paradl_bench.measure.machine import node_findings

rank = int(os.environ["SLURM_PROCID"])
platform.node = lambda: f"node{rank + 1}"
root = Path(sys.argv[1]) / str(rank)
doctor.node_findings = lambda: node_findings.node_findings(root / "sys")
sys.argv = ["paradl-bench", "doctor", "--launcher", "srun", *sys.argv[2:]]
from paradl_bench.cli import main
main()
"""

SMI = """#!/bin/sh
[ "$1" = topo ] && printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\t%s\\nGPU1\\t%s\\t X \\n' LINK LINK && exit
printf 'NVIDIA H100, 1980 MHz, 2619 MHz, 700.00 W, Enabled, Enabled\\n%.0s' 1 2
"""


def make_node(root: Path, *, speed: str, link: str) -> None:
    device = root / "sys/class/net/eth0"
    (device / "device").mkdir(parents=True)
    (root / "sys/bus/mlx5_core").mkdir(parents=True)
    (device / "device/driver").symlink_to(root / "sys/bus/mlx5_core")
    for name, text in (("operstate", "up"), ("mtu", "1500"), ("speed", speed)):
        (device / name).write_text(f"{text}\n")
    (root / "sys/class/net/lo").mkdir()
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("state", "4: ACTIVE"), ("rate", "200 Gb/sec (4X HDR)"), ("link_layer", "InfiniBand")):
        (port / name).write_text(f"{text}\n")
    (root / "bin").mkdir()
    (root / "bin/nvidia-smi").write_text(SMI.replace("LINK", link))
    (root / "bin/nvidia-smi").chmod(0o755)


def tasks(where: Path, *options: str) -> list[subprocess.CompletedProcess[str]]:
    """The command as srun starts it, a task on each of two nodes."""
    (where / "program.py").write_text(PROGRAM)
    shared = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    shared |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(where / "program.py"), str(where), *options],
            env={
                **shared,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": "0",
                "PATH": f"{where / str(rank) / 'bin'}:{shared['PATH']}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [(task, *task.communicate(timeout=180)) for task in started]
    return [subprocess.CompletedProcess([], task.returncode, out, err) for task, out, err in ended]


def test_nodes_are_compared_and_their_clocks_too(tmp_path: Path) -> None:
    make_node(tmp_path / "0", speed="100000", link="NV18")
    make_node(tmp_path / "1", speed="25000", link="PIX")
    first, second = tasks(tmp_path, "-o", str(tmp_path / "out"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    assert "differ in 3" in first.stdout
    kept = json.loads((tmp_path / "out/nodes.json").read_text())
    assert [(node["host"], node["ranks"]) for node in kept["nodes"]] == [("node1", [0]), ("node2", [1])]
    found = {own["name"]: own["found"] for own in kept["differences"]}
    assert found["network interfaces"] == [
        ["eth0 up 100000 Mb/s MTU 1500 (mlx5_core)", ["node1"]],
        ["eth0 up 25000 Mb/s MTU 1500 (mlx5_core)", ["node2"]],
    ]
    (topology,) = (name for name in found if name.startswith("topology"))
    # Each node's nvidia-smi lies in a folder of its own here.
    assert set(found) == {"network interfaces", topology, "nvidia-smi"}
    texts = [{own["name"]: own["text"] for own in node["findings"]}[topology] for node in kept["nodes"]]
    assert ["NV18" in text for text in texts] == [True, False]
    values = {own["name"]: own["found"] for own in kept["nodes"][0]["findings"]}
    assert values["InfiniBand ports"] == "mlx5_0:1 ACTIVE 200 Gb/sec (4X HDR) (InfiniBand)"
    assert "2 x NVIDIA H100, 1980 MHz, 2619 MHz, 700.00 W, Enabled, Enabled" in values.values()
    clock = kept["nodes"][1]["clock"]
    # Both are this host's: the offset that was measured is within its error of none.
    assert 0 < clock["clock_error_s"] < 1
    assert abs(clock["clock_offset_s"]) <= clock["clock_error_s"]


def test_comparing_nodes_takes_tasks_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = run_in_process(tmp_path, "doctor", "--launcher", "srun")
    assert outside.returncode == 2
    assert "is not set; start this command through srun" in outside.stderr
    for name, number in (("PROCID", 0), ("NTASKS", 2), ("LOCALID", 0)):
        monkeypatch.setenv(f"SLURM_{name}", str(number))
    (tmp_path / "file").touch()
    (tmp_path / "nodes.json").touch()
    for output, message in (
        ("file", "file is a file; -o takes a directory"),
        (".", "nodes.json is there already; give"),
    ):
        refused = run_in_process(tmp_path, "doctor", "--launcher", "srun", "-o", output)
        assert (refused.returncode, message in refused.stderr) == (2, True)
    both = run_in_process(tmp_path, "doctor", "--launcher", "srun", "--measure", "-o", "out")
    assert both.returncode == 2
    assert "--launcher compares nodes, and --measure measures the ranks of one host: give only one" in both.stderr
