"""Real training on gloo ranks: what is issued against the plan, gradients against serial's, and the command as used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from in_process import run_in_process

from paradl_bench.measure.launcher import launch_ranks
from paradl_bench.measure.training_summary import TrainingSummary, summarise_training
from paradl_bench.spec.measurement import read_manifest, read_records
from paradl_bench.spec.training_record import TRAINING_FILE, TrainingIterations, read_run

pytestmark = pytest.mark.distributed

NETWORKS = """
import os, signal
import torch
from torch import nn

class BatchNormed(nn.Module):
    "Convolutions without biases, batch norm and a skip connection, as resnets have."
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)
    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        x = torch.relu(self.norm2(self.two(x)) + x)
        return self.head(x.mean((2, 3)))

class Biased(nn.Module):
    "Convolutions and fully connected layers with biases and no batch norm, as vgg has."
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
        self.hidden, self.head = nn.Linear(16 * 4 * 4, 32), nn.Linear(32, 10)
    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.one(x)), 2)
        x = torch.relu(self.two(x))
        x = nn.functional.interpolate(x, (4, 4))
        return self.head(torch.relu(self.hidden(x.flatten(1))))

class Recalling(nn.Module):
    "Reads its own input again, beside what was made of it, and by a convolution that may come behind the last block."
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3), nn.Linear(11, 10)
    def forward(self, x):
        y = torch.einsum("bchw,bdhw->bcd", self.one(x), x).sum(2) + torch.relu(self.two(x)).mean((2, 3))
        return self.head(torch.cat([y, x.amax((2, 3))], 1))

class Blocks(nn.Module):
    "Numbered blocks that read their input twice, behind a stem."
    input_shape = (3, 12, 12)
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.norm = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.two = nn.Conv2d(8, 6, 3, padding=1)
        def forward(self, x):
            return torch.relu(x + self.two(torch.relu(self.norm(self.one(x)))))
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 6, 3, padding=1), nn.Sequential(Blocks.Block(), Blocks.Block())
        self.head = nn.Linear(6, 10)
    def forward(self, x):
        return self.head(self.body(torch.relu(self.stem(x))).mean((2, 3)))

class Shared(nn.Module):
    "One layer that is used twice."
    input_shape = (6,)
    def __init__(self):
        super().__init__()
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 10)
    def forward(self, x):
        return self.head(torch.relu(self.twice(torch.relu(self.twice(x)))))

class Unused(nn.Module):
    "A head that the loss does not read."
    input_shape = (6,)
    def __init__(self):
        super().__init__()
        self.body, self.aside, self.head = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 10)
    def forward(self, x):
        x = torch.relu(self.body(x))
        return self.head(x), self.aside(x)

class Killed(Biased):
    "Is killed on rank 1 in its 20th iteration."
    calls = 0
    def forward(self, x):
        Killed.calls += x.device.type != "meta"
        if Killed.calls == 20 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

class Hungry(Biased):
    "Asks on rank 1, in its 20th forward, for more memory than there is."
    calls = 0
    def forward(self, x):
        Hungry.calls += x.device.type != "meta"
        if Hungry.calls == 20 and os.environ.get("RANK") == "1":
            torch.empty(2**48)
        return super().forward(x)

class Diverging(Biased):
    "Has a loss that is no number, from the 20th iteration on."
    calls = 0
    def forward(self, x):
        Diverging.calls += x.device.type != "meta"
        return super().forward(x) * (float("nan") if Diverging.calls >= 20 else 1.0)
"""

COMPARE = """
import json, os, sys
import msgspec
import torch
from paradl_bench.measure.process_groups import join_ranks
from paradl_bench.measure.recorder import differences, planned_collectives
from paradl_bench.measure.tracing import trace_network
from paradl_bench.measure.training import Trainer
from paradl_bench.measure.training_request import TrainingRequest
from paradl_bench.models.catalog import load_model
from paradl_bench.spec.strategy import parse_strategy
from paradl_bench.strategies.catalog import planner_for

def compare(case, context):
    name, text, cap_mb, batch_norm, *words = case.split()
    listed = ("split", "recompute")
    options = {name: tuple(value.split("+")) if name in listed else int(value) if value.isdigit() else value
        for name, value in (word.split("=") for word in words)}
    strategy = parse_strategy(text)
    request = TrainingRequest(model=f"networks:{name}", input_shape=None, strategy=strategy, batch=4 * context.ranks,
        device="cpu", bucket_cap_mb=None if cap_mb == "-" else float(cap_mb), batch_norm=batch_norm, **options)
    model = load_model(request.model)
    network = trace_network(model)
    trainer = Trainer(model, request, context)
    issued = trainer.prepare(network)
    plan = planner_for(strategy).plan(network, strategy, request.settings)
    chunk = trainer.run_chunk(0, 2)
    planned = plan.collectives(plan.role_of(context.rank))
    return dict(differences=differences(issued, planned_collectives(plan, context.rank)),
        counts=chunk.collectives_issued, recorded=trainer.recorded_count, chunk=msgspec.to_builtins(chunk),
        collectives=sum(planned.values()), of_layers=len(plan.of_layers(plan.role_of(context.rank))),
        all_reduces=sum(n for (op, _, _), n in planned.items() if op == "all_reduce"))

def threads():
    return len(os.listdir("/proc/self/task"))

sys.path.append(sys.argv[1])
before = threads()
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    assert threads() > before
    found = context.gather({case: compare(case, context) for case in sys.argv[2:]})
    if context.rank == 0:
        open(sys.argv[1] + "/found.json", "w").write(json.dumps(found))
# A thread of gloo's that outlives the interpreter aborts the process.
assert threads() == before, (threads(), before)
"""

GRADIENTS = """
import sys
import torch
from paradl_bench.measure.process_groups import join_ranks
from paradl_bench.measure.tracing import trace_network
from paradl_bench.models.catalog import load_model
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import parse_strategy
from paradl_bench.strategies.parallel import build_parallel

def gradients(module, loss_of, inputs, targets):
    module.zero_grad()
    loss_of(module(inputs), targets).backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in module.named_parameters()}

def check(name, context, batch_norm):
    model, serial = load_model(f"networks:{name}"), load_model(f"networks:{name}")
    network = trace_network(model)
    model.module.double(), serial.module.double()
    inputs, targets = model.make_batch(4 * context.ranks, seed=7)
    inputs = inputs.double()
    settings = PlanSettings(batch=4 * context.ranks, first_bucket_bytes=1000, bucket_cap_bytes=1000)
    parallel = build_parallel(model.module, network, parse_strategy("d2"), settings, context.device).module
    parts = list(zip(inputs.chunk(context.ranks), targets.chunk(context.ranks)))
    for _ in range(3):
        found = gradients(parallel, model.loss, *parts[context.rank])
        if batch_norm:
            # Statistics are each rank's own: the exact answer is the mean of the parts' gradients.
            of_parts = [gradients(serial.module, serial.loss, *part) for part in parts]
            exact = {key: sum(g[key] for g in of_parts) / len(parts) for key in found}
        else:
            exact = gradients(serial.module, serial.loss, inputs, targets)
        for key in exact:
            torch.testing.assert_close(found[key], exact[key], rtol=1e-12, atol=1e-14)

sys.path.append(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    check("Biased", context, batch_norm=False)
    check("Shared", context, batch_norm=False)
    check("BatchNormed", context, batch_norm=True)
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "networks.py").write_text(NETWORKS)
    return tmp_path


def launch(where: Path, program: str, *arguments: str, ranks: int = 2) -> None:
    path = where / "program_of_test.py"
    path.write_text(program)
    launch_ranks([sys.executable, str(path), str(where), *arguments], ranks=ranks, device="cpu", timeout_s=200)


def issued_and_planned(workplace: Path, cases: list[str], ranks: int) -> list[dict[str, Any]]:
    """What each rank found, by case: network, strategy, bucket cap in MiB or -, batch norm, options as name=value."""
    launch(workplace, COMPARE, *cases, ranks=ranks)
    of_ranks: list[dict[str, Any]] = json.loads((workplace / "found.json").read_text())
    assert len(of_ranks) == ranks
    for found in of_ranks:
        assert list(found) == cases
        for case, result in found.items():
            assert result["differences"] == [], case
            assert result["counts"] == [result["recorded"]] * 2, case
    return of_ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_replicas_issue_is_what_is_planned(workplace: Path, ranks: int) -> None:
    networks = ("BatchNormed", "Biased", "Shared", "Unused")
    cases = [f"{name} d{ranks} {cap} local" for name in networks for cap in ("-", "0.001", "0.004")]
    for found in issued_and_planned(workplace, cases, ranks):
        for case, result in found.items():
            assert result["recorded"] == result["collectives"], case
        of_cap = {cap: found[f"Biased d{ranks} {cap} local"]["all_reduces"] for cap in ("-", "0.001", "0.004")}
        assert of_cap["-"] == 1
        assert of_cap["0.001"] > of_cap["0.004"] > 1


def test_what_zero_issues_is_what_is_planned(workplace: Path) -> None:
    """Over three ranks, where rows of most parameters are padded and some ranks hold none."""
    names = ("BatchNormed", "Biased", "Shared", "Unused")
    cases = [f"{name} z{stage}d3 0.004 local" for name in names for stage in (1, 2, 3)]
    (found, *_) = issued_and_planned(workplace, cases, 3)
    for case, result in found.items():
        assert result["recorded"] == result["collectives"], case
        assert min(result["chunk"]["exposed_ge_s"]) > 0, case
        gathered = [f"{phase}_communication_s" for phase in ("fw", "bw") if result["chunk"][f"{phase}_communication_s"]]
        assert (len(gathered) > 0) == ("z1" not in case), case


@pytest.mark.parametrize(("ranks", "strategies"), [(2, "f2 c2 s2 s1x2"), (3, "f3 c3 s3"), (4, "s2x2 d2f2 d2c2 d2s2")])
def test_what_is_issued_for_shared_layers_is_what_is_planned(workplace: Path, ranks: int, strategies: str) -> None:
    cases = [f"{name} {strategy} 0.001 local" for name in ("BatchNormed", "Biased") for strategy in strategies.split()]
    cases += [f"BatchNormed {strategy} - sync" for strategy in strategies.split()]
    # What has no positions, or parameters that several layers or none use.
    cases += [f"{name} {s} - local" for name in ("Shared", "Unused") for s in strategies.split() if "s" not in s]
    cases += [f"Biased {s} - local split=two+h*" for s in strategies.split() if "s" not in s]
    cases += [f"Biased {s} - local filter_backward=reduce-scatter" for s in strategies.split() if "f" in s]
    cases += [f"BatchNormed {s} - sync spatial_until=two" for s in strategies.split() if "s" in s]
    cases += [f"Recalling {s} - local" for s in strategies.split()]
    cases += [f"Recalling {s} - local spatial_until=two" for s in strategies.split() if "s" in s]
    for found in issued_and_planned(workplace, cases, ranks):
        for case, result in found.items():
            chunk, timed = result["chunk"], {}
            for phase in ("fw", "bw"):
                of_kinds = chunk[f"{phase}_communication_s"]
                timed[phase] = [sum(values) for values in zip(*of_kinds.values(), strict=True)]
                # It is a part of the phase, timed inside of it.
                assert all(part < whole for part, whole in zip(timed[phase], chunk[f"{phase}_s"], strict=False)), case
            assert bool(result["of_layers"]) == bool(timed["fw"]), case
            exchanges = any(letter in case.split()[1] for letter in "ds")
            assert all((seconds > 0) == exchanges for seconds in chunk["exposed_ge_s"]), case


def test_what_is_issued_for_accumulated_gradients_is_what_is_planned(workplace: Path) -> None:
    """Once an iteration what is exchanged, for each micro-batch what layers share; ZeRO gathers and reduces anew."""
    runs = ("BatchNormed d2 0.004", "Unused d2 -", "BatchNormed f2 -", "Biased s2 0.001", "Biased z1d2 0.004")
    sharded = ("BatchNormed z2d2 -", "BatchNormed z3d2 -")
    cases = [f"{run} local accumulate={count}" for run in (*runs, *sharded) for count in (1, 2, 4)]
    (found, *_) = issued_and_planned(workplace, cases, 2)
    for run in (*runs, *sharded):
        once, twice, often = (found[f"{run} local accumulate={count}"] for count in (1, 2, 4))
        shared = "of_layers" if "d2" not in run or "z2" in run or "z3" in run else None
        if shared:
            assert [later[shared] for later in (twice, often)] == [2 * once[shared], 4 * once[shared]], run
        else:
            assert once["collectives"] == twice["collectives"] == often["collectives"] > 0, run
        phases = zip(*(often["chunk"][f"{name}_s"] for name in ("fw", "bw", "exposed_ge", "wu")), strict=True)
        assert [sum(parts) for parts in phases] == pytest.approx(often["chunk"]["iteration_s"]), run


def test_what_is_issued_again_in_backward_is_what_is_planned(workplace: Path) -> None:
    """Communication for layers that are computed again is issued again; what is exchanged for gradients is not."""
    runs = ("d2 0.001 local", "z1d2 - local", "f2 - local", "c2 - local", "s2 0.001 local", "s2 0.001 sync")
    runs += ("f2 - local filter_backward=reduce-scatter", "s2 - local spatial_until=body.1.two", "s1x2 - local")
    more = ("", " recompute=all", " recompute=body.1+stem accumulate=2")
    (found, *_) = issued_and_planned(workplace, [f"Blocks {run}{options}" for run in runs for options in more], 2)
    for run in runs:
        kept, again, some = (found[f"Blocks {run}{options}"] for options in more)
        if "d2" in run:
            assert kept["collectives"] == again["collectives"] == some["collectives"], run
        else:
            assert kept["of_layers"] < again["of_layers"], run
            in_backward = (sum(map(sum, each["chunk"]["bw_communication_s"].values())) for each in (kept, again))
            assert all(seconds > 0 for seconds in in_backward), run


def test_what_is_issued_over_nodes_is_what_is_planned(workplace: Path) -> None:
    """Four ranks as two nodes of two: leaders issue other things than those that they lead."""
    forms = ("flat", "leader ranks_per_node=2", "leaders:2 ranks_per_node=2", "segmented ranks_per_node=2")
    runs = ("BatchNormed d4 0.001", "Biased d4 -", "Biased d4 0.004", "Unused d4 -", "Unused z1d4 0.0001")
    cases = [f"{run} local exchange={form}" for run in runs for form in forms]
    cases += [f"BatchNormed {strategy} 0.001 sync exchange={form}" for strategy in ("d2s2", "s2d2") for form in forms]
    of_ranks = issued_and_planned(workplace, cases, 4)
    for case, result in of_ranks[0].items():
        assert ("s2" in case) or result["recorded"] == result["collectives"], case
        assert min(result["chunk"]["exposed_ge_s"]) > 0, case
    led, by_two = (f"BatchNormed d4 0.001 local exchange={form}" for form in forms[1:3])
    assert of_ranks[0][led]["all_reduces"] > 1
    assert [found[led]["all_reduces"] > 0 for found in of_ranks] == [True, False, True, False]
    assert all(found[by_two]["all_reduces"] > 0 for found in of_ranks)


def test_gradients_are_those_of_serial_training(workplace: Path) -> None:
    launch(workplace, GRADIENTS)


def train(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paradl_bench", "train", *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=240, check=False)


def measured(directory: Path, rank: int = 0) -> int:
    """Iterations that a rank's records hold."""
    records = read_records(directory, TRAINING_FILE, TrainingIterations)
    return sum(len(record.losses) for record in records if record.rank == rank)


def check_whole(directory: Path, iterations: int, ranks: int) -> TrainingSummary:
    """Every rank holds every iteration once, and its phases add up."""
    records = read_records(directory, TRAINING_FILE, TrainingIterations)
    for rank in range(ranks):
        own = [record for record in records if record.rank == rank]
        indices = [r.first_iteration + i for r in own for i in range(len(r.iteration_s))]
        assert indices == list(range(iterations))
        for record in own:
            phases = zip(record.fw_s, record.bw_s, record.exposed_ge_s, record.wu_s, strict=True)
            assert [sum(parts) for parts in phases] == pytest.approx(list(record.iteration_s))
    assert read_manifest(directory).complete
    assert len(read_run(directory).losses) == iterations
    return summarise_training(directory)


def test_a_run_as_a_user_makes_it(workplace: Path) -> None:
    settings = (
        "networks:BatchNormed",
        "--strategy",
        "d2",
        "--batch",
        "8",
        "--iterations",
        "12",
        "--bucket-cap-mb",
        "0.001",
    )
    result = train(workplace, *settings, "-o", "run", "--json")
    assert result.returncode == 0, result.stderr
    summary = check_whole(workplace / "run", 12, 2)
    run = summary.run
    assert (run.strategy, run.ranks, run.batch, run.backend, run.launcher) == ("d2", 2, 8, "gloo", "own")
    assert (run.first_bucket_bytes, run.bucket_cap_bytes) == (1048, 1048)
    assert run.issued_equals_plan
    assert run.differences == ()
    assert sum(item.count for item in run.issued if item.when == "iteration" and item.operation == "all_reduce") > 1
    cores = sorted(os.sched_getaffinity(0))
    assert [rank.core for rank in summary.ranks] == [cores[rank % len(cores)] for rank in range(2)]
    assert read_manifest(workplace / "run").environment.settings["pinned"] == "one core a rank"
    printed = json.loads(result.stdout)
    assert printed["run"]["issued_equals_plan"] is True
    assert [set(rank["phases"]) for rank in printed["ranks"]] == [{"iteration", "FW", "BW", "exposed GE", "WU"}] * 2

    again = train(workplace, *settings, "-o", "run")
    assert again.returncode == 0, again.stderr
    assert "holds all 12 iterations already" in again.stderr
    assert "every collective agrees with the plan to the byte" in again.stdout
    check_whole(workplace / "run", 12, 2)

    other = train(workplace, *settings[:5], "--iterations", "13", "-o", "run")
    assert other.returncode == 2
    assert other.stderr.strip().splitlines()[-1].startswith("paradl-bench: error: run was measured with")


def test_a_run_with_shared_layers_shows_their_communication(workplace: Path) -> None:
    settings = ("networks:BatchNormed", "--strategy", "s2", "--batch", "4", "--iterations", "12")
    settings += ("--spatial-until", "head")
    result = train(workplace, *settings, "--batch-norm", "sync", "-o", "run")
    assert result.returncode == 0, result.stderr
    assert "layer-wise communication within FW and BW" in result.stdout
    assert "every collective agrees with the plan to the byte" in result.stdout
    summary = check_whole(workplace / "run", 12, 2)
    assert (summary.run.batch_norm, summary.run.spatial_until) == ("sync", "head")
    assert read_manifest(workplace / "run").arguments["spatial_until"] == "head"
    for rank in summary.ranks:
        assert list(rank.communication) == ["FW halo", "FW all_reduce", "FW all_gather", "BW all_reduce", "BW halo"]
        for phase in ("FW", "BW"):
            parts = [item.median_s for name, item in rank.communication.items() if name.startswith(phase)]
            assert 0 < sum(parts) < 2 * rank.phases[phase].median_s
    local = train(workplace, *settings, "-o", "run")
    assert local.returncode == 2
    assert "batch_norm" in local.stderr


def test_serial_exchanges_nothing_and_goes_on_after_an_interruption(workplace: Path) -> None:
    settings = ("networks:Biased", "--strategy", "serial", "--batch", "4", "--iterations", "500", "-o", "run")
    command = [sys.executable, "-m", "paradl_bench", "train", *settings]
    with subprocess.Popen(
        command, cwd=workplace, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as first:
        # The file is there an instant before its first line is.
        path = workplace / "run" / TRAINING_FILE
        wait_for(lambda: path.exists() and path.read_bytes().endswith(b"\n"))
        first.send_signal(signal.SIGINT)
        _, errors = first.communicate(timeout=60)
    assert first.returncode == 3
    assert "interrupted; what was measured is kept: run the same command again to go on" in errors
    assert 0 < measured(workplace / "run") < 500
    assert not read_manifest(workplace / "run").complete
    second = train(workplace, *settings)
    assert second.returncode == 0, second.stderr
    assert "iterations were measured before" in second.stderr
    summary = check_whole(workplace / "run", 500, 1)
    assert (summary.run.backend, summary.run.issued, summary.run.planned) == ("none", (), ())
    assert summary.ranks[0].phases["exposed GE"].median_s == 0
    assert "no collectives were issued, and none are planned" in second.stdout


def wait_for(condition: Callable[[], bool], limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_that_dies_ends_the_run_and_what_was_measured_is_kept(workplace: Path) -> None:
    result = train(workplace, "networks:Killed", "--strategy", "d2", "--batch", "4", "-o", "run")
    assert result.returncode == 3
    assert "error: rank 1 was killed by signal 9 (SIGKILL); the other ranks were ended" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert measured(workplace / "run") == 10
    assert not read_manifest(workplace / "run").complete


def test_memory_that_runs_out_is_a_result(workplace: Path) -> None:
    """On one rank in the middle of a run, whose iterations are kept, and on all of them before it has begun."""
    result = train(workplace, "networks:Hungry", "--strategy", "d2", "--batch", "8", "-o", "run")
    assert result.returncode == 3
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("paradl-bench: error: does not fit: needed 1024 TiB, had ")
    assert line.endswith("(rank 1, asked for 1024 TiB in forward); run.json keeps that")
    run = read_run(workplace / "run")
    (found,) = run.did_not_fit
    assert (found.rank, found.phase, found.requested_bytes) == (1, "forward", 2**50)
    assert found.needed_bytes > found.requested_bytes > found.had_bytes > 0
    assert run.issued_equals_plan
    assert measured(workplace / "run") == 10

    result = train(workplace, "networks:Biased", "--strategy", "serial", "--batch", str(10**12), "-o", "large")
    assert result.returncode == 3
    assert "does not fit: needed" in result.stderr
    (found,) = read_run(workplace / "large").did_not_fit
    assert found.requested_bytes == 4 * 10**12 * 3 * 12 * 12


def test_a_loss_that_is_no_number_ends_the_run(workplace: Path) -> None:
    result = train(workplace, "networks:Diverging", "--strategy", "serial", "--batch", "4", "-o", "run")
    assert result.returncode == 3
    assert "networks:Diverging, rank 0, iteration 10: the loss is nan" in result.stderr
    assert measured(workplace / "run") == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("resnet18 --strategy x2 --batch 8", "strategy 'x2' does not parse"),
        (
            "resnet18 --strategy t2 --batch 8",
            "p <= 1: no linear layer of resnet18 feeds another one through operations that can be cut (fc: it is in no"
            " pair: what it reads comes from avgpool (adaptive_avg_pool2d), which needs all of it)",
        ),
        ("resnet18 --strategy f2s2 --batch 8", "filter and spatial both share layers out, and one of them can"),
        ("resnet18 --strategy d2f2 --batch 3", "batch 3 does not split evenly over 2 ranks of its data axis"),
        ("networks:BatchNormed --strategy f9 --batch 8", "9 ranks along f9, but p <= 8: fewest filters, layer one"),
        ("networks:BatchNormed --strategy c9 --batch 8", "9 ranks along c9, but p <= 8: fewest channels, layer two"),
        ("networks:BatchNormed --strategy s13 --batch 8", "12 positions along dim 0, fewer than 13 parts"),
        (
            "networks:BatchNormed --strategy s3x3x3 --batch 8",
            "over 3 dims: an input of networks:BatchNormed has 2 spatial",
        ),
        ("networks:BatchNormed --strategy f2 --batch 8 --batch-norm global", "'global' is not one of 'local', 'sync'"),
        (
            "networks:BatchNormed --strategy f2 --batch 8 --split two,on",
            "to split 'on': did you mean one? choices are head",
        ),
        (
            "resnet18 --strategy d2 --batch 8 --split fc",
            "--split is for filter, channel, tensor parallelism, not for d2",
        ),
        ("resnet18 --strategy d4 --batch 3", "batch 3 is smaller than 4 ranks"),
        ("resnet18 --strategy d2 --batch 7", "the nearest that do are 6 and 8"),
        ("resnet18 --strategy d2 --batch 0", "--batch"),
        ("resnet18 --strategy d2 --batch 8 --backend smoke", "unknown backend 'smoke': choices are gloo, mpi, nccl"),
        ("resnet18 --strategy d2 --batch 8 --backend nccl", "use --backend gloo"),
        ("resnet18 --strategy d2 --batch 8 --launcher srun", "SLURM_PROCID is not set"),
        ("resnet18 --strategy d2 --batch 8 --warmup 2", "--warmup 2 is too short"),
        ("resnet18 --strategy d2 --batch 8 --bucket-cap-mb 0", "--bucket-cap-mb 0 has to be a positive number"),
        ("resnet18 --strategy d2 --batch 8 --input-shape 3x0", "'0' is not a positive whole number"),
        ("resnet19 --strategy serial --batch 8", "unknown model 'resnet19'"),
        ("networks:BatchNormed --input-shape 3x1x1 --strategy d2 --batch 2", "does not train on a local batch of 1"),
        ("networks:Nothing --strategy serial --batch 8", "Nothing"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(workplace: Path, arguments: str, message: str) -> None:
    result = run_in_process(workplace, "train", *arguments.split(), "-o", "run")
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("paradl-bench: error: ")
    assert message in line
    assert result.stdout == ""
    assert not (workplace / "run").exists()


def test_a_directory_of_something_else_is_not_touched(workplace: Path) -> None:
    (workplace / "notes").mkdir()
    (workplace / "notes" / "mine.txt").write_text("mine")
    settings = ("--strategy", "serial", "--batch", "4", "-o", "notes")
    result = run_in_process(workplace, "train", "networks:Biased", *settings)
    assert result.returncode == 2
    assert "notes is not empty and holds no measurement" in result.stderr
    assert [path.name for path in (workplace / "notes").iterdir()] == ["mine.txt"]
