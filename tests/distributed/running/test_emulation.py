"""Emulated training on gloo ranks: what ghosts issue against the plan, what they sleep, and the command as used."""

from __future__ import annotations

import os
import statistics
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from profile_factory import make_profile, model_times, ring_fit

from calibrate.profile.profile import write_profile
from paradl_bench.core.files.storage import hash_of_file, read_json
from paradl_bench.emulation.draws import IterationDraws
from paradl_bench.emulation.table import MAKERS
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Compute, FrameworkOverhead, WeightUpdate
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.emulation import EmulatedLayers, Emulation, kind_of_emulation
from paradl_bench.records.measurement import read_manifest, read_records
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.records.training.ghost_record import GHOST_FILE, DrawnSleeps, GhostTable
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, TrainingRun, read_run
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.cli import main as predict
from predict.validation.validation import validate_runs

pytestmark = [pytest.mark.distributed, pytest.mark.long(minutes=4)]

NETWORK = Path(__file__).parents[2] / "cases" / "emulated_layers.py"
ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "on_ranks" / "emulation_program.py"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a network, and a profile of it."""
    (tmp_path / "networks_of_emulation.py").write_text(NETWORK.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "networks_of_emulation", raising=False)
    profile_of(tmp_path, "Small")
    return tmp_path


def profile_of(place: Path, name: str) -> None:
    """Write a profile of one of the networks."""
    network = trace_network(load_model(f"networks_of_emulation:{name}"))
    operations = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    profile = make_profile(
        network,
        communication=tuple(ring_fit(operation) for operation in operations),
        model_times=model_times(network, quantiles=(0.8, 0.9, 1.0, 1.15, 1.6)),
    )
    (place / "profile.json").unlink(missing_ok=True)
    write_profile(place / "profile.json", profile)


def emulate(place: Path, ranks: int, *cases: str) -> list[TrainingRun]:
    launch_ranks([sys.executable, str(PROGRAM), str(place), *cases], ranks=ranks, device="cpu", timeout_s=200)
    return [read_run(place / case.split()[0]) for case in cases]


def _table_of(directory: Path) -> GhostTable:
    return read_json(directory / GHOST_FILE, GhostTable)


def planned_sleep_s(directory: Path, run: TrainingRun) -> list[float]:
    """What every rank would sleep in an iteration: the seconds of the table for the works of the plan."""
    assert run.ghost is not None
    strategy = parse_strategy(run.strategy)
    plan = planner_for(strategy).plan(trace_network(load_model(run.model)), strategy, run.settings)
    table = _table_of(directory)
    found = []
    for rank in range(run.ranks):
        seconds, whole_s = table.of_rank(rank), 0.0
        for work in (plan.works[index] for index in plan.roles[plan.role_of(rank)].work.tolist()):
            if isinstance(work, Compute):
                whole_s += seconds.layers[work.layer][work.phase]
            elif isinstance(work, FrameworkOverhead):
                whole_s += seconds.between[work.phase]
            elif isinstance(work, WeightUpdate):
                whole_s += seconds.update_s
        longer = 1.0 if run.ghost.slow_rank is None else run.ghost.slow_rank.of_rank(rank)
        found.append(longer * run.ghost.dilate * whole_s)
    return found


def check_sleep(directory: Path, run: TrainingRun) -> None:
    """Iterations take what a rank is to sleep at least; one that follows a late one is shorter by that much."""
    assert run.ghost is not None
    planned_s = planned_sleep_s(directory, run)
    assert sum(run.ghost.slept_s.values()) == pytest.approx(max(planned_s))
    records = read_records(directory, TRAINING_FILE, TrainingIterations)
    assert {record.rank for record in records} == set(range(run.ranks))
    for record in records:
        # Of two, the longer one: the first may follow an untimed one that others kept from the core.
        assert statistics.median_high(record.iteration_s) >= 0.97 * planned_s[record.rank]
        assert record.losses == ()


def check(place: Path, runs: list[TrainingRun], names: list[str]) -> None:
    """They issued what is planned, slept what is planned, and are held against predictions of as many seconds."""
    for name, run in zip(names, runs, strict=True):
        assert run.issued_equals_plan, (name, run.differences)
        assert run.issued
        assert run.memory == ()
        assert run.losses == ()
        # What it runs without communication, over groups that move nothing.
        assert run.ghost is not None
        assert run.ghost.host_s
        assert min(run.ghost.host_iteration_s) <= run.ghost.host_s <= run.ghost.host_at_most_s
        check_sleep(place / name, run)
    # By force: the synthetic profile is of another host. What was slept is what it says.
    report = validate_runs(place / "profile.json", [place / name for name in names], cluster_path=None, force=True)
    assert not any("would sleep" in note for note in report.notes)
    assert {pair.strategy for pair in report.pairs} == {run.strategy for run in runs}
    # Every rank's begins and ends are known, and are those of the units that are planned.
    activities = {pair.run: pair.activity for pair in report.pairs if pair.evaluator == "simulate"}
    assert [len(found.ranks) if found else 0 for found in activities.values()] == [run.ranks for run in runs], (
        report.notes
    )
    assert all(found.one_clock for found in activities.values() if found)


@pytest.mark.slow
def test_ghosts_issue_the_planned_communication_and_take_their_sleep(place: Path) -> None:
    plain, whole, shared, small, slow = emulate(
        place,
        2,
        "plain d2 20",
        "whole d2 2 accumulate=2 recompute=hidden",
        "shared z1d2 20",
        "small d2 2 bucket_cap_mb=1",
        "slow d2 20 slow_rank=1.5@1",
    )
    check(place, [plain, whole, shared, small, slow], ["plain", "whole", "shared", "small", "slow"])
    assert plain.ghost is not None
    assert slow.ghost is not None
    assert sum(slow.ghost.slept_s.values()) == pytest.approx(1.5 * sum(plain.ghost.slept_s.values()))
    assert (slow.ghost.dilate, slow.ghost.slow_rank) == (20.0, SlowRank(factor=1.5, rank=1))
    slow_words = kind_of_emulation(read_manifest(place / "slow").environment.emulated)
    assert slow_words == f"{kind_of_emulation(read_manifest(place / 'plain').environment.emulated)}, slow rank 1.5@1"
    about = read_manifest(place / "plain").environment.emulated
    sha256 = hash_of_file(place / "profile.json", what="profile")
    assert about == Emulation(layers=EmulatedLayers(profile_sha256=sha256, dilate=20.0))
    assert plain.ghost.dilate == 20.0
    assert plain.ghost.without_compute_s > 0
    assert set(plain.ghost.framework_s) == {"FW", "BW", "WU"}
    # A rank updates a part of the parameters.
    assert shared.ghost is not None
    assert shared.ghost.slept_s["WU"] < plain.ghost.slept_s["WU"]
    table = _table_of(place / "plain")
    assert (table.strategy, table.batch, table.role_of_rank) == ("d2", 8, (0, 0))


def test_drawn_ghosts_follow_their_seed_and_are_predicted_later(place: Path) -> None:
    """Of this profile all of a rank's compute takes longer or shorter together."""
    plain, drawn = emulate(place, 2, "plain d2 2", "drawn d2 2 spread=drawn seed=3")
    directory = place / "drawn"
    assert drawn.issued_equals_plan, drawn.differences
    assert drawn.ghost is not None
    assert plain.ghost is not None
    assert drawn.ghost.drawn == DrawnSleeps(seed=3, samples=20)
    assert drawn.ghost.slept_s == pytest.approx(plain.ghost.slept_s)
    environment = read_manifest(directory).environment
    words = kind_of_emulation(environment.emulated)
    assert (
        words
        == f"{kind_of_emulation(read_manifest(place / 'plain').environment.emulated)}, drawn as its samples spread"
    )
    spread = _table_of(directory).spread
    assert spread is not None
    planned_s = planned_sleep_s(directory, drawn)
    wanted = [
        [
            planned_s[rank] * (1 + IterationDraws(spread, seed=3, rank=rank, iteration=each + 1).tied)
            for each in range(5)
        ]
        for rank in range(2)
    ]
    assert max(wanted[0]) > 1.05 * min(wanted[0])
    assert wanted[0] != wanted[1]
    for record in read_records(directory, TRAINING_FILE, TrainingIterations):
        # A rank waits for the other at the end of backward: no iteration takes less than either's draw.
        for slept_s, taken_s in zip(wanted[record.rank], record.iteration_s, strict=True):
            assert taken_s >= 0.97 * slept_s
    (noted,) = (
        p
        for p in validate_runs(place / "profile.json", [directory], cluster_path=None, force=True).pairs
        if p.evaluator == "simulate"
    )
    (level,) = (
        p
        for p in validate_runs(place / "profile.json", [place / "plain"], cluster_path=None, force=True).pairs
        if p.evaluator == "simulate"
    )
    assert noted.predicted_s > level.predicted_s


CUT = (
    "filters f2 0.5 filter_backward=reduce-scatter",
    "channels c2 0.5",
    "blocks s2 0.5",
    "heads t2 0.5",
    "stages p2 0.5 schedule=1f1b micro_batches=4",
)
NESTED = (
    "filters d2f2 1",
    "channels d2c2 1",
    "positions s2x2 1",
    "blocks d2s2 1",
    "heads d2t2 1",
    "gpipe d2p2 1",
    "one_forward d2p2 1 schedule=1f1b micro_batches=4",
    "interleaved d2p2 1 schedule=interleaved",
    "parts d2p2 1 schedule=zb micro_batches=4",
    "four p4 1",
    "cut p2f2 1",
    "cut_blocks p2s2 1 schedule=1f1b",
    "sharded z3d4 1",
    "synced d2s2 1 batch_norm=sync",
)


def test_ghosts_of_shards_and_stages_follow_the_plan_and_sleep(place: Path) -> None:
    runs = emulate(place, 2, *CUT)
    check(place, runs, [case.split()[0] for case in CUT])
    # A rank has half of the filters, and of what is not split all.
    whole = _table_of(place / "filters").of_rank(0).layers
    assert whole["two"]["FW"] < 0.6 * whole["add"]["FW"]


def test_ghosts_of_a_vocabulary_in_parts_follow_the_plan(place: Path) -> None:
    profile_of(place, "Words")
    runs = emulate(place, 2, "words t2 1 model=Words", "stages p2 1 model=Words")
    check(place, runs, ["words", "stages"])
    issued = [item for item in runs[0].issued if item.when == "iteration"]
    # The look-up, a pair forward and backward, the head's input, and three numbers of a token.
    assert sum(item.count for item in issued if item.operation == "all_reduce") == 1 + 2 + 1 + 3


TRANSFORMERS = (
    "gathered x2 1 model=Reading",
    "heads x2 1 model=llama_tokens context_exchange=all-to-all",
    "ring x2 1 model=Reading context_exchange=ring",
    "ring_again x2 1 model=llama_tokens context_exchange=ring accumulate=2 recompute=all",
    "experts e2 1 model=mixtral_tokens",
    "sorted e2 1 model=Sorted",
    "sequence t2 1 model=llama_tokens sequence_parallel=on",
)


def of_transformers(place: Path) -> None:
    """Have the networks of transformers among those of the place."""
    networks = (place / "networks_of_emulation.py").read_text()
    (place / "networks_of_emulation.py").write_text(f"{networks}\nfrom transformer_networks import *\n")
    del sys.modules["networks_of_emulation"]


@pytest.mark.slow
def test_ghosts_of_features_and_tokens_follow_the_plan(place: Path) -> None:
    of_transformers(place)
    profile_of(place, "llama_tokens")
    cases = "gathered x2t2 1 model=llama_tokens", "ring t2x2 1 model=llama_tokens context_exchange=ring"
    check(place, emulate(place, 4, *cases), [case.split()[0] for case in cases])


@pytest.mark.slow
def test_ghosts_of_contexts_and_experts_follow_the_plan(place: Path) -> None:
    of_transformers(place)
    for model in ("Reading", "llama_tokens", "mixtral_tokens", "Sorted"):
        names = [case for case in TRANSFORMERS if f"model={model}" in case]
        profile_of(place, model)
        check(place, emulate(place, 2, *names), [case.split()[0] for case in names])
    for name in ("experts", "sorted"):
        # Rows go to both ranks alike, as the plan has it.
        sent = [item for item in read_run(place / name).issued if item.operation == "all_to_all"]
        assert sent
        assert all(item.received_bytes == item.message_bytes for item in sent)


SHARDED = (
    "gathered z3d2 1",
    "kept z2d2 1",
    "again z3d2 1 accumulate=2",
    "synced d2 1 batch_norm=sync",
)


def test_ghosts_of_zero_and_synchronised_norms_follow_the_plan(place: Path) -> None:
    runs = emulate(place, 2, *SHARDED)
    check(place, runs, [case.split()[0] for case in SHARDED])
    gathered, kept, *_ = (read_records(place / case.split()[0], TRAINING_FILE, TrainingIterations) for case in SHARDED)
    # Stage 3 gathers for backward once more, which stage 2 has no need of.
    assert all("all_gather" in record.bw_communication_s for record in gathered)
    assert not any("all_gather" in record.bw_communication_s for record in kept)


@pytest.mark.slow
def test_ghosts_of_nested_strategies_follow_the_plan_and_sleep(place: Path) -> None:
    check(place, emulate(place, 4, *NESTED), [case.split()[0] for case in NESTED])


@pytest.mark.slow
def test_ghosts_exchange_gradients_between_nodes_as_planned(place: Path) -> None:
    (run,) = emulate(place, 4, "nodes d4 2 exchange=segmented ranks_per_node=2")
    assert run.issued_equals_plan, run.differences
    check_sleep(place / "nodes", run)


def test_ghosts_exchange_merged_gradients_as_planned(place: Path) -> None:
    asked = "ghost --from-profile profile.json --model networks_of_emulation:Small --strategy d2 --batch 4"
    made = run_in_process(place, *asked.split(), "-o", "fused.json", main=predict, program="predict")
    assert made.returncode == 0, made.stderr
    words = "train networks_of_emulation:Small --strategy d2 --batch 4 --warmup 3 --emulate fused.json --fusion none"
    result = run_in_process(place, *words.split(), "--iterations", "5", "-o", "fused")
    assert result.returncode == 0, result.stderr
    run = read_run(place / "fused")
    assert run.issued_equals_plan, run.differences
    check_sleep(place / "fused", run)
    report = validate_runs(place / "profile.json", [place / "fused"], cluster_path=None, force=True)
    assert {pair.options["fused_by"] for pair in report.pairs} == {run.axis_options["fused_by"]}


def test_train_emulates_a_serial_run_and_resumes_it(place: Path) -> None:
    asked = "ghost --from-profile profile.json --model networks_of_emulation:Small --strategy serial --batch 4"
    made = run_in_process(place, *asked.split(), "-o", "table.json", main=predict, program="predict")
    assert made.returncode == 0, made.stderr
    words = "train networks_of_emulation:Small --strategy serial --batch 4 --warmup 3 --emulate table.json -o run"
    result = run_in_process(place, *words.split(), "--iterations", "5", "--dilate", "3")
    assert result.returncode == 0, result.stderr
    assert "emulated: layers that sleep 3 times as long as profile" in result.stdout
    assert "layers slept" in result.stdout
    again = run_in_process(place, *words.split(), "--iterations", "5", "--dilate", "4")
    assert again.returncode == 2, again.stderr
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
        ("--strategy d2 --dilate 2", "--dilate needs --emulate FILE"),
        ("--strategy d2 --slow-rank 2", "--slow-rank needs --emulate FILE"),
        ("--strategy d2 --spread", "--spread needs --emulate FILE"),
        ("--strategy d2 --emulate profile.json --seed 1", "--seed needs --spread, whose sleeps it draws"),
        ("--strategy d2 --emulate profile.json --spread --seed -1", "-1 is not in the range"),
        ("--strategy d2 --emulate profile.json --slow-rank 2@2", "--slow-rank 2@2: d2 has ranks 0 to 1"),
        ("--strategy d2 --emulate profile.json --slow-rank half", "'half' is no FACTOR[@RANK]"),
        ("--strategy d2 --emulate profile.json --dilate 0", "--dilate 0 has to be a positive number"),
        ("--strategy d2 --emulate profile.json --device cuda", "--emulate is for --device cpu"),
        ("--strategy d2 --emulate profile.json --dtype bf16", "--emulate knows --dtype fp32, not bf16"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_ranks_start(words: str, said: str, place: Path) -> None:
    result = run_in_process(place, "train", "networks_of_emulation:Small", *words.split(), "--batch", "8", "-o", "run")
    assert result.returncode == 2
    assert said in result.stderr
    assert not (place / "run").exists()


def test_the_installed_entry_point_makes_a_table_of_a_profile(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = place / "tables-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: tables\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][MAKERS]
    (installed / "entry_points.txt").write_text(f"[{MAKERS}]\nprofile = {points['profile']}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
    words = "train networks_of_emulation:Small --strategy serial --batch 4 --warmup 3 --emulate profile.json"
    result = run_in_process(place, *words.split(), "--iterations", "2", "-o", "run")
    assert result.returncode == 0, result.stderr
    check_sleep(place / "run", read_run(place / "run"))
    (place / "profile.json").write_text("{}")
    again = run_in_process(place, *words.split(), "-o", "again")
    assert again.returncode == 2
    assert "--emulate profile.json: profile profile.json" in again.stderr
    assert not (place / "again").exists()


def test_the_rank_that_reads_it_names_a_file_without_table(place: Path) -> None:
    (place / "profile.json").write_text('{"role_of_rank": []}')
    words = "train networks_of_emulation:Small --strategy serial --emulate profile.json --batch 8 -o run"
    result = run_in_process(place, *words.split())
    assert result.returncode == 2
    assert "--emulate profile.json: table of sleeps: " in result.stderr
    assert not (place / "run").exists()
