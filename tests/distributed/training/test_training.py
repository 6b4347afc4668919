"""Real training on gloo ranks by the command, as it is used, interrupted and misused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from training_programs import NETWORKS

from paradl_bench.measure.training.summary import TrainingSummary, summarise_training
from paradl_bench.records.measurement import read_manifest, read_records
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, read_run

pytestmark = pytest.mark.distributed


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "networks.py").write_text(NETWORKS)
    return tmp_path


def train(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(where, "train", *arguments)


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
    for record in read_records(workplace / "run", TRAINING_FILE, TrainingIterations):
        phases = zip(record.copies_s, record.fw_s, record.bw_s, strict=True)
        assert all(0 < copies_s < fw_s + bw_s for copies_s, fw_s, bw_s in phases)
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
    assert "iterations measured before" in second.stderr
    summary = check_whole(workplace / "run", 500, 1)
    assert (summary.run.backend, summary.run.issued, summary.run.planned) == ("none", (), ())
    assert summary.ranks[0].phases["exposed GE"].median_s == 0
    assert "no collectives were issued, and none are planned" in second.stdout


def wait_for(condition: Callable[[], bool], limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines of standard error, but for those on what else this host does."""
    return [
        line for line in result.stderr.strip().splitlines() if "host is busy" not in line and "busy host" not in line
    ]


def test_a_dead_rank_ends_the_run_and_keeps_measurements(workplace: Path) -> None:
    result = train(workplace, "networks:Killed", "--strategy", "d2", "--batch", "4", "--no-verify", "-o", "run")
    assert result.returncode == 3
    assert "error: rank 1 was killed by signal 9 (SIGKILL); the other ranks were ended" in result.stderr
    assert len(said(result)) == 1
    assert measured(workplace / "run") == 10
    assert not read_manifest(workplace / "run").complete


def test_memory_that_runs_out_is_a_result(workplace: Path) -> None:
    """On one rank in the middle of a run, whose iterations are kept, and on all of them before it has begun."""
    result = train(workplace, "networks:Hungry", "--strategy", "d2", "--batch", "8", "--no-verify", "-o", "run")
    assert result.returncode == 3
    (line,) = said(result)
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
        ("resnet18 --strategy q2 --batch 8", "strategy 'q2' does not parse"),
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
        ("networks:BatchNormed --input-shape 3x1x1 --strategy d2 --batch 2", "does not train on a single sample"),
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
