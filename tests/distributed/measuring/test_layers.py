"""``paradl-bench layers`` as a user calls it: on one rank and two at once, resumed, and given wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from in_process import run_in_process

from paradl_bench.measure.layers.summary import closures
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Compute
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.measurement import COPIES_FILE, ITERATIONS_FILE, LAYERS_FILE, read_manifest, read_records
from paradl_bench.records.samples import CopySamples, IterationSamples, LayerSamples
from paradl_bench.strategies.nesting.catalog import planner_for

FACTORY = """
import torch
class Net(torch.nn.Module):
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Conv2d(3, 6, 3, padding=1)
        self.two = torch.nn.Conv2d(6, 6, 3, padding=1)
        self.three = torch.nn.Conv2d(6, 6, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(6)
        self.head = torch.nn.Linear(6, 4)
    def forward(self, x):
        x = torch.relu(self.one(x))
        x = self.three(torch.relu(self.norm(self.two(x)))) + x
        return self.head(x.mean((2, 3)))
"""
REHEARSAL = Path(__file__).parents[1] / "running" / "rehearsal_program.py"
CALLS = {"all_gather": "all_gather_into", "reduce_scatter": "reduce_scatter_into", "halo": "batch_isend_irecv"}
SETTINGS = ("--batch", "3,5", "--blocks", "2", "--iterations", "2", "--warmup", "1")


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "nets_of_layers_test.py").write_text(FACTORY)
    # A user's own predict.py must not shadow the project's package.
    (tmp_path / "predict.py").write_text("raise SystemExit('shadowed')")
    return tmp_path


def layers(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(where, "layers", *arguments)


def read(directory: Path) -> tuple[list[LayerSamples], list[IterationSamples], list[CopySamples]]:
    return (
        read_records(directory, LAYERS_FILE, LayerSamples),
        read_records(directory, ITERATIONS_FILE, IterationSamples),
        read_records(directory, COPIES_FILE, CopySamples),
    )


@pytest.mark.distributed
def test_every_layer_and_phase_is_measured_and_resumed(workplace: Path) -> None:
    model = "nets_of_layers_test:Net"
    done = layers(workplace, model, *SETTINGS, "--isolated", "all", "-o", "out", "--json")
    assert done.returncode == 0, done.stderr
    directory = workplace / "out"
    network = msgspec.json.decode((directory / "network-nets_of_layers_test_Net.json").read_bytes(), type=ModelGraph)
    samples, iterations, copies = read(directory)
    in_situ = [s for s in samples if s.mode == "in_situ"]
    assert {(s.layer, s.phase, s.batch, s.block) for s in in_situ} == {
        (layer.name, phase, batch, block)
        for layer in network.layers
        for phase in ("FW", "BW")
        for batch in (3, 5)
        for block in (0, 1)
    }
    assert {len(s.samples_s) for s in in_situ} == {2}
    assert sum(sum(s.samples_s) for s in in_situ if s.layer == "two" and s.phase == "BW") > 0
    isolated = {(s.operation, s.phase) for s in samples if s.mode == "isolated"}
    twins = [layer for layer in network.layers if layer.name in ("two", "three")]
    assert twins[0].operation == twins[1].operation
    assert {s.layer for s in samples if s.mode == "isolated" and s.operation == twins[0].operation} == {"two"}
    # The first convolution reads the input, which needs no gradient.
    assert {p for o, p in isolated if o == network.layers[0].operation} == {"FW", "BW_weight"}
    assert {p for o, p in isolated if o == twins[0].operation} == {"FW", "BW_input", "BW_weight"}
    assert len(iterations) == 4
    assert {(c.direction, c.bytes) for c in copies} == {
        (direction, network.parameter_bytes) for direction in ("into", "out", "add", "store", "fetch")
    }
    assert len(json.loads(done.stdout)) == len(closures(directory)) == 2
    manifest = read_manifest(directory)
    assert manifest.complete
    assert manifest.environment.settings["threads"] == "1"
    assert manifest.environment.settings["MALLOC_MMAP_THRESHOLD_"] != "default"
    _resume(workplace, model, directory)


def _resume(workplace: Path, model: str, directory: Path) -> None:
    """Take the last block and half a line away, as an interruption would have, and go on."""
    lines = (directory / ITERATIONS_FILE).read_bytes().splitlines(keepends=True)
    (directory / ITERATIONS_FILE).write_bytes(b"".join(lines[:-1]) + lines[-1][:50])
    again = layers(workplace, model, *SETTINGS, "--isolated", "all", "-o", "out")
    assert again.returncode == 0, again.stderr
    assert "3 blocks measured before" in again.stderr
    assert f"layers of {model}: 1 block, whose iterations take about " in again.stderr
    assert "(medians), input 3x12x12" in again.stdout
    blocks = [(i.batch, i.block) for i in read(directory)[1]]
    assert sorted(blocks) == [(3, 0), (3, 1), (5, 0), (5, 1)]
    other = layers(workplace, model, *SETTINGS, "--isolated", "none", "-o", "out")
    assert other.returncode == 2
    assert "was measured with isolated all, not none" in other.stderr


@pytest.mark.distributed
def test_numbers_of_ranks_are_measured_in_turn_and_resumed(workplace: Path) -> None:
    """One rank, a part of them and all; those that a turn leaves out have nothing to say."""
    arguments = ("nets_of_layers_test:Net", *SETTINGS, "--ranks-on-host", "1,2,3", "-o", "turns")
    done = layers(workplace, *arguments)
    assert done.returncode == 0, done.stderr
    samples, iterations, copies = read(workplace / "turns")
    ranks = {(count, rank) for count in (1, 2, 3) for rank in range(count)}
    assert {(s.ranks_on_host, s.rank) for s in samples} == {(c.ranks_on_host, c.rank) for c in copies} == ranks
    first = [i for i in iterations if i.rank == 0]
    turns = [(i.block, i.batch, i.ranks_on_host) for i in first]
    assert sorted(turns) == [(block, batch, count) for block in (0, 1) for batch in (3, 5) for count in (1, 2, 3)]
    # A block's numbers of ranks follow each other, and another one begins in the next block.
    assert [count for _, _, count in turns] == [1, 2, 3, 1, 2, 3, 2, 3, 1, 2, 3, 1]
    assert [turns[at][1] for at in range(0, 12, 3)] == [turns[at + 2][1] for at in range(0, 12, 3)]
    path = workplace / "turns" / ITERATIONS_FILE
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    again = layers(workplace, *arguments)
    assert again.returncode == 0, again.stderr
    assert "11 blocks measured before" in again.stderr
    assert sorted((i.block, i.batch, i.ranks_on_host) for i in read(workplace / "turns")[1] if i.rank == 0) == sorted(
        turns
    )


@pytest.mark.distributed
def test_shards_have_the_shapes_that_ranks_of_the_plan_run(workplace: Path) -> None:
    settings = ("--batch", "3", "--blocks", "2", "--iterations", "2", "--warmup", "1", "--shards", "f4,c2,s2")
    done = layers(workplace, "nets_of_layers_test:Net", *settings, "-o", "out", "--json")
    assert done.returncode == 0, done.stderr
    directory = workplace / "out"
    name = "network-nets_of_layers_test_Net.json"
    network = msgspec.json.decode((directory / name).read_bytes(), type=ModelGraph)
    samples, iterations, copies = read(directory)
    for text in ("f4", "c2", "s2"):
        strategy = parse_strategy(text)
        plan = planner_for(strategy).plan(network, strategy, PlanSettings(batch=3))
        assert plan.sharded
        # Layers that are left whole are measured beside the shards.
        assert {s.operation for s in samples if s.shard == text} == {
            work.operation for work in plan.of_kind(Compute).values()
        }
        assert sum(sum(s.samples_s) for s in samples if s.shard == text and s.phase == "BW") > 0
        # 6 filters over 4 ranks are 2, 2, 1 and 1, 3 channels over 2 are 2 and 1; either half has one halo row.
        assert {i.position for i in iterations if i.shard == text} == {"f4": {0, 2}, "c2": {0, 1}, "s2": {0}}[text]
    assert {s.layer for s in samples if not s.shard} == {layer.name for layer in network.layers}
    assert len(iterations) == 2 * (1 + 2 + 2 + 1)
    assert len(copies) == 2 * 5
    assert {c["shard"] for c in json.loads(done.stdout)} == {"", "f4", "c2", "s2"}
    again = layers(workplace, "nets_of_layers_test:Net", *settings, "-o", "out")
    assert again.returncode == 0
    assert len(read(directory)[1]) == len(iterations)


@pytest.mark.distributed
def test_ranks_that_rehearse_together_send_what_is_planned(tmp_path: Path) -> None:
    launch_ranks([sys.executable, str(REHEARSAL), str(tmp_path / "result.json")], ranks=2, device="cpu", timeout_s=200)
    result = json.loads((tmp_path / "result.json").read_text())
    for strategy, found in result["parts"].items():
        assert found["alone"] == {}, strategy
        expected = {CALLS.get(name, name): count for name, count in found["planned"].items() if count}
        if strategy.startswith("s2"):
            # Gradients of whole parameters are exchanged as in data parallelism, and not by layers.
            expected["all_reduce"] = found["answered"].get("all_reduce", 0)
        assert found["answered"] == {name: count for name, count in expected.items() if count}, strategy
        # The other rank came a second late.
        assert found["seconds"] < 0.8, strategy
        assert found["finite"], strategy
    for strategy, phases in result["gathered"].items():
        # The other rank came a second late to forward, and to backward.
        assert max(phases["forward"], phases["backward"]) < 0.8, strategy
        assert phases["update"] >= 1, strategy


@pytest.mark.distributed
def test_whole_layers_are_measured_behind_gathers(workplace: Path) -> None:
    settings = ("--batch", "3", "--blocks", "2", "--iterations", "2", "--warmup", "1", "--ranks-on-host", "1,2")
    done = layers(workplace, "nets_of_layers_test:Net", *settings, "--shards", "z3d2", "-o", "out", "--no-verify")
    assert done.returncode == 0, done.stderr
    samples, iterations, _ = read(workplace / "out")
    behind = [s for s in samples if s.shard]
    assert {(s.shard, s.ranks_on_host, s.rank) for s in behind} == {("z3d2", 2, 0), ("z3d2", 2, 1)}
    assert {(s.layer, s.phase) for s in behind} == {(s.layer, s.phase) for s in samples if s.mode == "in_situ"}
    assert sum(sum(s.samples_s) for s in behind if s.phase == "BW") > 0
    shared = [i for i in iterations if i.shard]
    assert len(shared) == 2 * 2
    for iteration in shared:
        assert min(*iteration.fw_s, *iteration.bw_s, *iteration.wu_s, *iteration.wu_instrumented_s) > 0


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet19", "--batch", "2", "-o", "x"), "did you mean resnet18"),
        (("resnet18", "--batch", "0", "-o", "x"), "not a positive whole number"),
        (("resnet18", "--batch", "2", "--ranks-on-host", "1,0", "-o", "x"), "not a positive whole number"),
        (("resnet18", "--batch", "2", "--input-shape", "3x0x4", "-o", "x"), "is not a positive whole number"),
        (("resnet18", "--batch", "2", "--input-shape", "5x32x32", "-o", "x"), "does not run on an input of 5x32x32"),
        (("resnet18", "--batch", "1", "--input-shape", "3x32x32", "-o", "x"), "does not train with batch 1"),
        (("nets_of_layers_test:Nets", "--batch", "2", "-o", "x"), "did you mean Net"),
        (("resnet18", "--batch", "2", "-o", "nets_of_layers_test.py"), "is a file"),
        (("resnet18", "--batch", "2", "--shards", "d2", "-o", "x"), "none of its axes splits layers"),
        (("resnet18", "--batch", "2", "--shards", "z3d2", "-o", "x"), "and 1 measure; give --ranks-on-host 2"),
        (("resnet18", "--batch", "2", "--shards", "z3d1d2", "-o", "x"), "measured of one axis; give z3d1"),
        (("nets_of_layers_test:Net", "--batch", "2", "--shards", "f8", "-o", "x"), "fewest filters, layer head"),
        (("resnet18", "--batch", "2", "--shards", "q2", "-o", "x"), "does not parse"),
        (("resnet18", "--batch", "2", "-o", "."), "holds no measurement"),
        (("resnet18", "--batch", "2", "--device", "cuda", "-o", "x"), "cuda"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(workplace: Path, arguments: tuple[str, ...], message: str) -> None:
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run_in_process(workplace, "layers", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (workplace / "x").exists()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "asked",
    [
        ("describe", "MODEL"),
        ("layers", "MODEL", "--batch", "1", "--blocks", "2", "--iterations", "2", "--warmup", "1", "-o", "out"),
        ("train", "MODEL", "--strategy", "serial", "--batch", "2", "--iterations", "5", "-o", "out"),
        ("kernels", "--for", "MODEL", "--batch", "1", "--samples", "1", "--plan"),
    ],
    ids=lambda asked: asked[0],
)
def test_a_forgotten_input_shape_is_said_once(workplace: Path, asked: tuple[str, ...]) -> None:
    pool = "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))"
    (workplace / "pooled.py").write_text(f"from torch import nn\n\n\ndef network():\n    return {pool}\n")
    done = run_in_process(workplace, *("pooled:network" if part == "MODEL" else part for part in asked))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines().count("pooled:network: no --input-shape: 3x224x224 is taken") == 1
