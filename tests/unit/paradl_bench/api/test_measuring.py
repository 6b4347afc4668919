"""Measurements from a script: objects by the name that other processes import, and the command that measures."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from torch import nn

import paradl_bench
from paradl_bench.api.model_names import named
from paradl_bench.core.errors import UserError

TINY = """
import functools
from torch import nn


def build(width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, width))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(48, 4))


wide = functools.partial(build, 8)
net = Net()
"""
SCRIPT = """
import paradl_bench
from torch import nn

net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
{guard}
    paradl_bench.measure_layers(net, "measured", batch=2, input_shape="3x4x4", blocks=2, iterations=2, isolated="none")
"""
QUICK = {"input_shape": "3x4x4", "blocks": 2, "iterations": 2, "warmup": 1, "isolated": "none"}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file in a folder that is not the working directory, imported here."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "tiny_net.py").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path / "nets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tiny_net", raising=False)
    return __import__("tiny_net")


@pytest.mark.parametrize("attribute", ["build", "Net", "wide", "net"])
def test_objects_of_a_file_have_its_name(tiny: ModuleType, tmp_path: Path, attribute: str) -> None:
    assert named(getattr(tiny, attribute)) == (f"tiny_net:{attribute}", str(tmp_path / "nets"))


def test_what_no_file_holds_is_refused(tiny: ModuleType) -> None:
    for lost in (nn.Linear(2, 2), lambda: tiny.net, functools.partial(tiny.build, 3)):
        with pytest.raises(UserError, match="no file holds it at its top level"):
            named(lost)


def test_a_model_is_measured_as_the_command_does(tiny: ModuleType) -> None:
    by_name = paradl_bench.measure_layers("nets.tiny_net:build", "named", batch=[2], **QUICK)
    raw = paradl_bench.measure_layers(tiny.net, "measured", batch=[2], **QUICK)
    with pytest.raises(UserError, match=r"unknown factory in nets\.tiny_net 'buildd'"):
        paradl_bench.measure_layers("nets.tiny_net:buildd", "other", batch=2, input_shape="3x4x4")
    with pytest.raises(UserError, match="unknown option 'batches'"):
        paradl_bench.measure_layers(tiny.build, "other", batch=2, batches=3)
    assert raw.manifest.complete
    frame = raw.to_frame("layers")
    assert set(frame["batch"]) == {2}
    assert set(frame["model"]) == {"tiny_net:net"}
    assert (frame["samples_s"].map(len) == 2).all()
    assert frame[["operation", "phase"]].equals(by_name.to_frame("layers")[["operation", "phase"]])


def test_a_run_and_its_collectives_are_measured(tiny: ModuleType) -> None:
    run = paradl_bench.train(tiny.Net, "d2", "run", batch=4, iterations=3, warmup=3, input_shape="3x4x4")
    assert run.manifest.complete
    assert run.to_frame().explode("iteration_s").groupby("rank").size().to_dict() == {0: 3, 1: 3}
    with pytest.raises(UserError, match="d4"):
        paradl_bench.train(tiny.Net, "d4", "other", batch=2, input_shape="3x4x4")
    sizes = {"sizes": "4K:8K:2", "blocks": 2, "point_seconds": 0.01}
    sweep = paradl_bench.measure_collectives("sweep", ranks=2, backend="gloo", ops=["all_reduce"], **sizes)
    assert set(sweep.to_frame()["message_bytes"]) == {4096, 8192}


@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_a_script_measures_its_own_model(tmp_path: Path, guard: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "own.py").write_text(SCRIPT.format(guard=guard))
    done = subprocess.run(
        [sys.executable, "scripts/own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    guarded = "name" in guard
    assert (done.returncode == 0) == guarded, done.stderr
    assert (tmp_path / "measured" / "layers.jsonl").exists() == guarded
    if not guarded:
        assert 'put what the script does under if __name__ == "__main__":' in done.stderr
