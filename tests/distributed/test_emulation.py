"""Emulated training on gloo ranks: what ghosts issue against the plan, what they sleep, and the command as used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from profile_factory import make_profile, ring_fit

from calibrate.profile import write_profile
from paradl_bench.emulate.sleeper import MOST_PAID_BACK_S
from paradl_bench.measure.launcher import launch_ranks
from paradl_bench.measure.tracing import trace_network
from paradl_bench.models.catalog import load_model
from paradl_bench.spec.emulation import EmulatedLayers, emulated_layers
from paradl_bench.spec.ghost_record import read_table_file
from paradl_bench.spec.measurement import read_manifest, read_records
from paradl_bench.spec.training_record import TRAINING_FILE, TrainingIterations, TrainingRun, read_run
from predict.ghost import profile_hash
from predict.validation import validate_runs

pytestmark = pytest.mark.distributed

NETWORK = """
import torch
from torch import nn

class Small(nn.Module):
    "Convolutions, batch norm, a skip, and a head with a bias: buckets hold them in the order in which they arrive."
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.hidden, self.head = nn.Linear(8, 64), nn.Linear(64, 10)
    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        x = torch.relu_(self.two(x) + x)
        return self.head(torch.relu(self.hidden(x.mean((2, 3)))))
"""
PROGRAM = Path(__file__).parents[1] / "emulation_program.py"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a network, and a profile of it."""
    (tmp_path / "networks_of_emulation.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "networks_of_emulation", raising=False)
    network = trace_network(load_model("networks_of_emulation:Small"))
    write_profile(tmp_path / "profile.json", make_profile(network, communication=(ring_fit(), ring_fit("broadcast"))))
    return tmp_path


def emulate(place: Path, ranks: int, *cases: str) -> list[TrainingRun]:
    launch_ranks([sys.executable, str(PROGRAM), str(place), *cases], ranks=ranks, device="cpu", timeout_s=200)
    return [read_run(place / case.split()[0]) for case in cases]


def check_sleep(directory: Path, run: TrainingRun) -> None:
    """Every rank's iterations take what it slept at least, as measured from the clock, in sum."""
    assert run.ghost is not None
    records = read_records(directory, TRAINING_FILE, TrainingIterations)
    assert {record.rank for record in records} == set(range(run.ranks))
    for record in records:
        least_s = len(record.iteration_s) * sum(run.ghost.slept_s.values())
        assert sum(record.iteration_s) >= least_s - 2 * MOST_PAID_BACK_S
        assert record.losses == ()


def test_ghosts_issue_what_the_plan_holds_and_take_the_time_that_they_sleep(place: Path) -> None:
    plain, whole, shared, small = emulate(
        place,
        2,
        "plain d2 20",
        "whole d2 2 accumulate=2 recompute=hidden",
        "shared z1d2 20",
        "small d2 2 bucket_cap_mb=1",
    )
    for name, run in {"plain": plain, "whole": whole, "shared": shared, "small": small}.items():
        assert run.issued_equals_plan, (name, run.differences)
        assert run.issued
        assert run.memory == ()
        assert run.losses == ()
        check_sleep(place / name, run)
    about = read_manifest(place / "plain").environment.emulated
    sha256 = profile_hash(place / "profile.json")
    assert emulated_layers(about) == EmulatedLayers(profile_sha256=sha256, dilate=20.0)
    assert plain.ghost is not None
    assert plain.ghost.dilate == 20.0
    assert plain.ghost.without_compute_s > 0
    assert set(plain.ghost.framework_s) == {"FW", "BW", "WU"}
    # A rank updates a part of the parameters.
    assert shared.ghost is not None
    assert shared.ghost.slept_s["WU"] < plain.ghost.slept_s["WU"]
    table = read_table_file(place / "plain")
    assert (table.strategy, table.batch, table.role_of_rank) == ("d2", 8, (0, 0))
    # By force: the synthetic profile is of another host. What was slept is what it says.
    runs = [place / name for name in ("plain", "whole", "shared", "small")]
    report = validate_runs(place / "profile.json", runs, cluster_path=None, force=True)
    assert not any("would sleep" in note for note in report.notes)


@pytest.mark.slow
def test_ghosts_exchange_gradients_between_nodes_as_planned(place: Path) -> None:
    (run,) = emulate(place, 4, "nodes d4 2 exchange=segmented ranks_per_node=2")
    assert run.issued_equals_plan, run.differences
    check_sleep(place / "nodes", run)


def test_the_command_emulates_a_serial_run_and_goes_on_with_it(place: Path) -> None:
    words = "train networks_of_emulation:Small --strategy serial --batch 4 --warmup 3 --emulate profile.json -o run"
    result = run_in_process(place, *words.split(), "--iterations", "5", "--dilate", "3")
    assert result.returncode == 0, result.stderr
    assert "emulated: layers that sleep 3 times as long as profile" in result.stdout
    assert "layers slept" in result.stdout
    again = run_in_process(place, *words.split(), "--iterations", "5", "--dilate", "4")
    assert again.returncode == 2
    assert "emulated" in again.stderr
    run = read_run(place / "run")
    check_sleep(place / "run", run)
    assert run.ghost is not None
    report = validate_runs(place / "profile.json", [place / "run"], cluster_path=None, force=True)
    assert not any("would sleep" in note for note in report.notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--strategy d2 --emulate missing.json", "--emulate missing.json: there is no such file"),
        ("--strategy d2 --dilate 2", "--dilate is for layers that sleep"),
        ("--strategy d2 --emulate profile.json --dilate 0", "--dilate 0 has to be a positive number"),
        ("--strategy d2 --emulate profile.json --device cuda", "--emulate is for --device cpu"),
        ("--strategy p2 --emulate profile.json", "not pipeline parallelism of p2"),
        ("--strategy d2 --emulate profile.json --batch-norm sync", "not --batch-norm sync"),
        ("--strategy z3d2 --emulate profile.json", "not ZeRO stage 3 of z3d2"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_ranks_start(words: str, said: str, place: Path) -> None:
    result = run_in_process(place, "train", "networks_of_emulation:Small", *words.split(), "--batch", "8", "-o", "run")
    assert result.returncode == 2
    assert said in result.stderr
    assert not (place / "run").exists()


def test_a_file_that_is_no_profile_is_named_by_the_rank_that_reads_it(place: Path) -> None:
    (place / "profile.json").write_text("{}")
    words = "train networks_of_emulation:Small --strategy serial --emulate profile.json --batch 8 -o run"
    result = run_in_process(place, *words.split())
    assert result.returncode == 2
    assert "--emulate profile.json: profile profile.json" in result.stderr
    assert not (place / "run").exists()
