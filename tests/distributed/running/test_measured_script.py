"""A script that measures its own model, under torchrun: one measurement after the other on the same ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.distributed

SCRIPT = """
import json, os
import paradl_bench
from torch import nn

net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4))
net.input_shape = (3, 4, 4)

if __name__ == "__main__":
    layers = paradl_bench.measure_layers(net, "layers", batch=2, blocks=2, iterations=2, isolated="none")
    run = paradl_bench.train(net, "d2", "run", batch=4, iterations=4, warmup=3)
    found = {
        "complete": [each.manifest.complete for each in (layers, run)],
        "layers": sorted(set(layers.to_frame()["rank"])),
        "run": run.to_frame().explode("iteration_s").groupby("rank").size().to_dict(),
    }
    with open(f"rank-{os.environ['RANK']}.json", "w") as out:
        json.dump(found, out)
"""


@pytest.mark.slow
def test_a_script_measures_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["complete"] == [True, True]
        assert found["layers"] == [0, 1]
        assert found["run"] == {"0": 4, "1": 4}
