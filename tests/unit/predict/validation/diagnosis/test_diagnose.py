"""``predict diagnose``: what is made worse on purpose is named first, and of what is not nothing is said."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from network_factory import small_cnn
from profile_factory import (
    affine_seconds,
    free_copies,
    layer_times,
    make_profile,
    model_times,
    ring_fit,
    write_training_run,
)

from calibrate.profile.input_side import InputSide, LoaderRate
from calibrate.profile.profile import Dispatch, Profile
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.network.graph import Layer
from paradl_bench.records.cluster import Cluster, Level
from paradl_bench.records.training.training_record import TRAINING_FILE, MemoryPeak
from predict.cli import group
from predict.validation.diagnosis.limitations import LIMITATIONS
from predict.validation.diagnosis.of_run import options_of_run
from predict.validation.runs import read_runs

NETWORK = small_cnn(6, 8)
BATCHES = (2, 4, 8, 16, 32)
OPERATIONS = ("all_reduce", "all_gather", "send_recv", "broadcast", "reduce_scatter", "exchange")


def even_seconds(layer: Layer, phase: str, batch: int) -> float:
    """Convolutions alone take time, all as much, so that they can be cut evenly."""
    return (1e-3 if layer.kind == "conv" else 1e-9) * batch * (1 if phase == "FW" else 2)


def batch_hardly_matters(layer: Layer, phase: str, batch: int) -> float:
    """So micro-batches take nearly as long as the batch that they are parts of."""
    return (1e-3 + 1e-6 * batch if layer.kind == "conv" else 1e-9) * (1 if phase == "FW" else 2)


def profile(
    *, slow: str = "", seconds: Any = even_seconds, wu_s: float = 1e-6, contention: float = 1.0, **changes: object
) -> Profile:
    """Messages take next to nothing but those of a slow operation, which take 10 ms and 1 us a byte."""
    fits = [
        ring_fit(name, alpha_s=1e-2, beta_s_per_byte=1e-6)
        if name == slow
        else ring_fit(name, alpha_s=1e-8, beta_s_per_byte=1e-14)
        for name in OPERATIONS
    ]
    level = Level(name="node", ranks=8, contention=contention)
    times = {
        "layer_times": layer_times(
            NETWORK, batches=BATCHES, ranks_on_host={n: 1.0 for n in (1, 2, 4, 8)}, seconds=seconds
        ),
        "model_times": model_times(NETWORK, batches=BATCHES, ranks_on_host=(1, 2, 4, 8), seconds=seconds, wu_s=wu_s),
        "communication": tuple(fits),
        "contexts": (),
        "copies": free_copies((1, 2, 4, 8)),
        "cluster": Cluster(name="test", levels=(level,), memory_bytes_per_rank=8e9),
    }
    return msgspec.structs.replace(make_profile(NETWORK), **{**times, **changes})


def diagnosed(tmp_path: Path, made: Profile, *options: str) -> list[Any]:
    """The findings, those that are there first."""
    path = tmp_path / "profile.json"
    path.write_bytes(encode_pretty(made))
    where = [] if "--run" in options else ["--model", NETWORK.name]
    result = CliRunner().invoke(group, ["diagnose", "--from-profile", str(path), *where, *options, "--json"])
    assert result.exit_code == 0, result.output
    (diagnosis,) = json.loads(result.stdout)
    return diagnosis["findings"]


def present(findings: Sequence[Any]) -> list[str]:
    return [finding["limitation"]["name"] for finding in findings if finding["state"] == "present"]


def run_of(
    tmp_path: Path, rows: Sequence[Sequence[tuple[float, float, float, float]]], strategy: str, **changes: object
) -> str:
    """A run of batch 8; ``rows[rank][iteration]`` are seconds of FW, BW, exposed GE and WU."""
    directory = tmp_path / "run"
    write_training_run(directory, NETWORK, strategy=strategy, ranks=len(rows), batch=8, phases_s=rows, **changes)
    return str(directory)


def host_bound(dispatch_s: float = 1e-2) -> Profile:
    """A GPU whose host takes longer over an operation than its kernels, which were timed alone."""
    made = profile()
    host = Dispatch(forward_s=dispatch_s, backward_s=dispatch_s, relative_sd=0.01, runs=("a run",))
    gpu = msgspec.structs.replace(made.devices[0], kind="cuda", dispatch=host)
    alone = tuple(msgspec.structs.replace(time, mode="isolated") for time in made.layer_times)
    return msgspec.structs.replace(made, devices=(gpu,), layer_times=alone, model_times=(), shard_times=())


WORSE = {
    "host dispatch": (host_bound(), ["--strategy", "d2", "--batch", "2"]),
    "gradient exchange": (profile(slow="all_reduce"), ["--strategy", "d2", "--batch", "8"]),
    "layer-wise communication": (profile(slow="all_gather"), ["--strategy", "f2", "--batch", "8"]),
    "halo exchange": (profile(slow="exchange"), ["--strategy", "s2", "--batch", "8"]),
    "pipeline communication": (profile(slow="send_recv"), ["--strategy", "p2", "--batch", "8"]),
    "pipeline bubbles": (profile(), ["--strategy", "p2", "--batch", "8", "--micro-batches", "1"]),
    "workload imbalance": (
        profile(),
        ["--strategy", "p2", "--batch", "32", "--micro-batches", "16", "--stages", "conv5"],
    ),
    "weight update": (profile(wu_s=0.05), ["--strategy", "d2", "--batch", "8"]),
    "redundant computation": (
        profile(seconds=batch_hardly_matters),
        ["--strategy", "p2", "--batch", "32", "--micro-batches", "16"],
    ),
    "redundant memory": (profile(), ["--strategy", "d2", "--batch", "8", "--memory", "50KiB"]),
    "number of ranks": (profile(), ["--strategy", "d2", "--batch", "2"]),
    "input": (profile(), ["--strategy", "d2", "--batch", "8", "--io-seconds", "0.2", "--h2d-seconds", "0"]),
}


@pytest.mark.parametrize("name", WORSE)
def test_what_is_made_worse_is_named_first(tmp_path: Path, name: str) -> None:
    made, options = WORSE[name]
    assert present(diagnosed(tmp_path, made, *options, "--no-remedies"))[:1] == [name]


def test_ranks_that_slow_each_other_compute_nothing_again(tmp_path: Path) -> None:
    """Two ranks at once take 1.5 times as long for a layer as one alone, as where they share memory's bandwidth."""
    slowed = {
        "layer_times": layer_times(NETWORK, batches=BATCHES, ranks_on_host={1: 1.0, 2: 1.5}, seconds=even_seconds)
    }
    options = ["--strategy", "p2", "--batch", "16", "--micro-batches", "16", "--no-remedies"]
    findings = diagnosed(tmp_path, profile(**slowed), *options)
    (again,) = (own for own in findings if own["limitation"]["name"] == "redundant computation")
    assert again["share"] < 0.01


def test_contention_of_groups_is_named(tmp_path: Path) -> None:
    made = profile(slow="all_gather", contention=4.0)
    names = present(diagnosed(tmp_path, made, "--strategy", "d4f2", "--batch", "8", "--no-remedies"))
    assert names[:1] == ["contention of groups"]
    assert "contention of groups" not in present(
        diagnosed(tmp_path, profile(slow="all_gather"), "--strategy", "d4f2", "--batch", "8", "--no-remedies")
    )


@pytest.mark.parametrize("strategy", ["serial", "d2", "d4", "f2", "s2", "z3d2", "d2f2"])
def test_nothing_is_said_where_nothing_is_wrong(tmp_path: Path, strategy: str) -> None:
    findings = diagnosed(tmp_path, profile(), "--strategy", strategy, "--batch", "16", "--no-remedies")
    assert present(findings) == []
    assert {finding["limitation"]["name"] for finding in findings} == {own.name for own in LIMITATIONS}


@pytest.mark.parametrize(("strategy", "batch"), [("d2", "10"), ("p2", "10"), ("d2p2", "20")])
def test_more_ranks_need_not_be_twice_as_many(tmp_path: Path, strategy: str, batch: str) -> None:
    """Neither 4 ranks nor 4 micro-batches part a batch of 10."""
    findings = diagnosed(tmp_path, profile(), "--strategy", strategy, "--batch", batch, "--no-remedies")
    assert "number of ranks" not in present(findings)


@pytest.mark.parametrize(("cut", "stages"), [("FLOPs", None), ("--stages", "conv3")])
def test_a_run_gives_stages_only_where_its_user_did(tmp_path: Path, cut: str, stages: str | None) -> None:
    """A run names its stages whatever cut them; as an option they would bind other schedules and strategies."""
    rows = [(0.05, 0.1, 1e-5, 1e-6)] * 20
    run = run_of(tmp_path, [rows, rows], "p2", micro_batches=2, stages=("conv3",), cut_by=cut)
    ((read,), _) = read_runs([Path(run)])
    options = dict.fromkeys(("model", "strategy", "batch", "ranks", "stages"))
    assert options_of_run(read, options, knows_input=False)["stages"] == stages


def test_a_run_tells_congestion(tmp_path: Path) -> None:
    clean, slow = (0.024, 0.048, 1e-5, 1e-6), (0.024, 0.048, 0.2, 1e-6)
    rows = [slow if index % 5 == 0 else clean for index in range(40)]
    findings = diagnosed(tmp_path, profile(), "--run", run_of(tmp_path, [rows, rows], "d2"), "--no-remedies")
    assert present(findings)[:1] == ["network congestion"]


def test_a_run_tells_a_slow_rank(tmp_path: Path) -> None:
    fast, slow = [(0.024, 0.048, 0.04, 1e-6)] * 20, [(0.034, 0.078, 1e-5, 1e-6)] * 20
    findings = diagnosed(tmp_path, profile(), "--run", run_of(tmp_path, [fast, slow], "d2"), "--no-remedies")
    assert present(findings) == ["workload imbalance"]
    assert findings[0]["share"] == pytest.approx(0.04 / 2 / 0.112001, rel=1e-2)


def test_a_run_tells_split_and_concatenation(tmp_path: Path) -> None:
    """Halves of layers take 24 and 48 ms, and copies 20 and 30 ms besides."""
    rows = [(0.044, 0.078, 0.0, 0.0)] * 20
    run = changed_run(run_of(tmp_path, [rows, rows], "f2"), copies_s=[0.05] * 20)
    findings = diagnosed(tmp_path, profile(), "--run", run, "--no-remedies")
    assert present(findings) == ["split and concatenation"]
    assert findings[0]["seconds_s"] == pytest.approx(0.05)


@pytest.mark.parametrize("strategy", ["d2", "f2", "p2"])
def test_a_run_tells_layers_slower_than_predicted(tmp_path: Path, strategy: str) -> None:
    """Layers are predicted to take 24 and 48 ms."""
    rows = [(0.15, 0.15, 1e-6, 1e-6)] * 20
    findings = diagnosed(tmp_path, profile(), "--run", run_of(tmp_path, [rows, rows], strategy), "--no-remedies")
    assert present(findings)[:1] == ["slower layers"]
    assert findings[0]["seconds_s"] == pytest.approx(0.3 - 0.072, rel=1e-2)


def test_layers_that_are_not_well_known_may_be_slower(tmp_path: Path) -> None:
    """All layers share an error of 30%: 90% of runs take 72 ms +- 49%, and this one takes 1.4 times as long."""
    rows = [(0.0336, 0.0672, 1e-6, 1e-6)] * 20
    run = run_of(tmp_path, [rows, rows], "d2")
    counts = {"batches": BATCHES, "ranks_on_host": (1, 2, 4, 8), "seconds": even_seconds, "wu_s": 1e-6}
    for common_sd, state in ((0.0, "present"), (0.3, "possible")):
        made = profile(model_times=model_times(NETWORK, common_sd=common_sd, **counts))
        findings = diagnosed(tmp_path, made, "--run", run, "--no-remedies")
        (slower,) = (own for own in findings if own["limitation"]["name"] == "slower layers")
        assert slower["state"] == state
        assert slower["seconds_s"] == pytest.approx(0.0288, rel=1e-2)
        assert slower["share_interval"][1] == pytest.approx((0.0288 + 1.645 * common_sd * 0.072) / 0.1008, rel=0.05)


def test_computing_again_is_known_as_parts_and_whole_are(tmp_path: Path) -> None:
    """Three convolutions of two micro-batches take 18.1 ms on a rank, and half of six of the batch 9.1 ms."""
    counts = {"batches": BATCHES, "ranks_on_host": (1, 2, 4, 8), "seconds": batch_hardly_matters, "wu_s": 1e-6}
    made = profile(seconds=batch_hardly_matters, model_times=model_times(NETWORK, common_sd=0.1, **counts))
    options = ("--strategy", "p2", "--batch", "8", "--micro-batches", "2", "--no-remedies")
    findings = diagnosed(tmp_path, made, *options)
    (again,) = (own for own in findings if own["limitation"]["name"] == "redundant computation")
    low, high = (share * again["seconds_s"] / again["share"] for share in again["share_interval"])
    assert (high - low) / 2 == pytest.approx(1.645 * 0.1 * math.hypot(18.07e-3, 9.07e-3), rel=0.02)


def test_copies_are_no_redundant_computation_too(tmp_path: Path) -> None:
    """Parts of a batch take nearly as long as all of it, copies included."""
    rows = [(0.024, 0.048, 0.0, 0.0)] * 20
    run = run_of(tmp_path, [rows, rows], "p2", micro_batches=2)
    made = profile(seconds=batch_hardly_matters)
    seconds = []
    for copies in ({}, {"copies_s": [1e-4] * 20}):
        findings = diagnosed(tmp_path, made, "--run", changed_run(run, **copies), "--no-remedies")
        seconds += [own["seconds_s"] for own in findings if own["limitation"]["name"] == "redundant computation"]
    assert seconds[0] - seconds[1] == pytest.approx(1e-4)


def test_a_run_without_timed_copies_tells_nothing_of_them(tmp_path: Path) -> None:
    rows = [(0.024, 0.048, 0.0, 0.0)] * 20
    findings = diagnosed(tmp_path, profile(), "--run", run_of(tmp_path, [rows, rows], "f2"), "--no-remedies")
    states = {own["limitation"]["name"]: own["state"] for own in findings}
    assert states["split and concatenation"] == "not measured"


def changed_run(run: str, **fields: object) -> str:
    """The run with fields of every rank's record replaced."""
    file = Path(run) / TRAINING_FILE
    records = [json.loads(line) | fields for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return run


@pytest.mark.parametrize(("slow", "named"), [("send_recv", "pipeline communication"), ("", "pipeline bubbles")])
def test_waiting_of_stages_is_parted_as_predicted(tmp_path: Path, slow: str, named: str) -> None:
    """Stages compute 24 and 48 ms, and wait for 150."""
    rows = [(0.024, 0.048, 0.0, 0.0)] * 20
    run = changed_run(run_of(tmp_path, [rows, rows], "p2", micro_batches=2), iteration_s=[0.222] * 20)
    findings = diagnosed(tmp_path, profile(slow=slow), "--run", run, "--no-remedies")
    assert present(findings)[:1] == [named]
    waited = [own for own in findings if own["limitation"]["name"] in ("pipeline communication", "pipeline bubbles")]
    assert sum(own["seconds_s"] for own in waited) == pytest.approx(0.15)


def test_a_run_tells_contention_from_calls_as_predicted(tmp_path: Path) -> None:
    """Groups at once are predicted to take four times as long; halves of layers take 12 and 24 ms, and calls 80."""
    rows = [(0.052, 0.064, 0.0, 0.0)] * 20
    gathers = {"fw_communication_s": {"all_gather": [0.04] * 20}, "bw_communication_s": {"all_reduce": [0.04] * 20}}
    run = changed_run(run_of(tmp_path, [rows] * 8, "d4f2"), **gathers)
    findings = diagnosed(tmp_path, profile(slow="all_gather", contention=4.0), "--run", run, "--no-remedies")
    seconds = {own["limitation"]["name"]: own["seconds_s"] for own in findings}
    assert present(findings)[:1] == ["contention of groups"]
    assert seconds["contention of groups"] + seconds["layer-wise communication"] == pytest.approx(0.08)


def test_a_run_tells_its_communication_for_layers_by_kind(tmp_path: Path) -> None:
    """Of an iteration of 100 ms: 10 ms in halos, and 2 and 3 ms in gathers and sums, in forward and backward."""
    rows = [(0.04, 0.06, 0.0, 0.0)] * 20
    kinds = {
        "fw_communication_s": {"halo": [0.01] * 20, "all_gather": [0.002] * 20},
        "bw_communication_s": {"all_reduce": [0.003] * 20},
    }
    run = changed_run(run_of(tmp_path, [rows, rows], "s2"), **kinds)
    findings = diagnosed(tmp_path, profile(), "--run", run, "--no-remedies")
    shares = {own["limitation"]["name"]: own["share"] for own in findings}
    assert shares["halo exchange"] == pytest.approx(0.1)
    assert shares["layer-wise communication"] == pytest.approx(0.05)


def test_a_run_tells_a_full_allocator(tmp_path: Path) -> None:
    peaks = tuple(
        MemoryPeak(rank=rank, tracked_bytes=1, parts_bytes={}, allocator_bytes=1, reserved_bytes=int(7.9e9))
        for rank in range(2)
    )
    rows = [(0.024, 0.048, 1e-5, 1e-6)] * 20
    run = run_of(tmp_path, [rows, rows], "d2", memory=peaks)
    states = {own["limitation"]["name"]: own["state"] for own in diagnosed(tmp_path, profile(), "--run", run)}
    assert states["memory stalls"] == "possible"


def test_a_clean_run_yields_nothing(tmp_path: Path) -> None:
    rows = [(0.024, 0.048, 1e-5, 1e-6)] * 20
    run = run_of(tmp_path, [rows, rows], "d2")
    assert present(diagnosed(tmp_path, profile(), "--run", run)) == []


def test_a_remedy_is_a_command_that_predicts_its_seconds(tmp_path: Path) -> None:
    made = profile()
    findings = diagnosed(tmp_path, made, "--strategy", "p2", "--batch", "16", "--micro-batches", "1")
    remedy = findings[0]["remedies"][0]
    words = remedy["command"].split()
    assert words[0] == "predict"
    result = CliRunner().invoke(group, [*words[1:], "--json"])
    assert result.exit_code == 0, result.output
    (prediction,) = json.loads(result.stdout)
    assert prediction["iteration_s"] == pytest.approx(remedy["iteration_s"])
    assert remedy["gain"] > 0.3


def test_host_dispatch_takes_what_the_ledger_says_it_adds(tmp_path: Path) -> None:
    made = host_bound()
    findings = diagnosed(tmp_path, made, "--strategy", "serial", "--batch", "2", "--no-remedies")
    path = tmp_path / "profile.json"
    words = ["--from-profile", str(path), "--model", NETWORK.name, "--strategy", "serial", "--batch", "2"]
    result = CliRunner().invoke(group, [*words, "--explain", "--json"])
    assert result.exit_code == 0, result.output
    (ledger,) = json.loads(result.stdout)
    entries = ledger["roles"][0]["entries"]
    added_s = sum(change["added_s"] for entry in entries for change in entry.get("adjustments", ()))
    assert findings[0]["seconds_s"] == pytest.approx(added_s)
    assert "fitted to training runs" in findings[0]["evidence"]


def test_a_larger_batch_is_a_remedy_for_host_dispatch(tmp_path: Path) -> None:
    """Other limitations, present too, keep the mini-batch."""
    made = msgspec.structs.replace(host_bound(), communication=profile(slow="all_reduce").communication)
    findings = diagnosed(tmp_path, made, "--strategy", "d2", "--batch", "2")
    by_name = {finding["limitation"]["name"]: finding for finding in findings}
    remedy = by_name["host dispatch"]["remedies"][0]
    assert remedy["change"] == "--batch 4"
    result = CliRunner().invoke(group, [*remedy["command"].split()[1:], "--json"])
    assert result.exit_code == 0, result.output
    (prediction,) = json.loads(result.stdout)
    assert prediction["batch"] == 4
    assert prediction["iteration_s"] == pytest.approx(remedy["iteration_s"])
    low, high = remedy["gain_interval"]
    assert low <= remedy["gain"] <= high
    assert 0.5 < remedy["gain"] <= 1
    others = by_name["gradient exchange"]["remedies"]
    assert all("--batch 2" in other["command"] for other in others)


def test_a_bar_shows_while_remedies_are_predicted(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(encode_pretty(profile(slow="all_reduce")))
    words = ["diagnose", "--from-profile", str(path), "--model", NETWORK.name, "--strategy", "d2", "--batch", "8"]
    for option, shows in (("--remedies", True), ("--no-remedies", False)):
        result = CliRunner(env={"PARADL_PROGRESS": "1"}).invoke(group, [*words, option])
        assert result.exit_code == 0, result.output
        assert ("remedies predicted" in result.stderr) == shows


def test_more_loading_workers_are_a_remedy_for_input(tmp_path: Path) -> None:
    """A worker takes 50 ms a sample, so that the default of one is waited for, and 8 are not."""
    rates = tuple(
        LoaderRate(workers=workers, batch=8, sample_s=0.05 / workers, relative_sd=0.01) for workers in (1, 2, 4, 8)
    )
    made = profile(input_side=(InputSide(source="folder", loader=rates),))
    findings = diagnosed(tmp_path, made, "--strategy", "d2", "--batch", "16", "--io-workers", "1", "--h2d-seconds", "0")
    assert present(findings)[:1] == ["input"]
    (remedy,) = findings[0]["remedies"]
    assert remedy["change"] == "--io-workers 8"
    assert "--io-workers 8" in remedy["command"]


def test_a_run_reads_no_input_whatever_the_profile_knows(tmp_path: Path) -> None:
    rates = (LoaderRate(workers=1, batch=8, sample_s=0.05, relative_sd=0.01),)
    rows = [(0.024, 0.048, 1e-5, 1e-6)] * 20
    run = run_of(tmp_path, [rows, rows], "d2")
    made = profile(input_side=(InputSide(source="folder", loader=rates),))
    assert present(diagnosed(tmp_path, made, "--run", run, "--no-remedies")) == []


def test_a_run_that_clips_is_diagnosed(tmp_path: Path) -> None:
    rows = [(0.024, 0.048, 1e-5, 1e-6)] * 20
    run = run_of(tmp_path, [rows, rows], "d2", clip_norm=0.5)
    ((read,), _) = read_runs([Path(run)])
    options = dict.fromkeys(("model", "strategy", "batch", "ranks", "stages"))
    assert options_of_run(read, options, knows_input=False)["clip_norm"] == 0.5
    diagnosed(tmp_path, profile(), "--run", run)


def test_shares_are_parts_of_an_iteration(tmp_path: Path) -> None:
    made = profile(slow="all_gather", seconds=affine_seconds, wu_s=1e-4)
    for strategy in ("d2", "f2", "d2f2", "p2", "z3d2"):
        findings = diagnosed(tmp_path, made, "--strategy", strategy, "--batch", "8", "--no-remedies")
        assert 0 < sum(own["share"] for own in findings if own["seconds_s"] is not None) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", NETWORK.name, "--strategy", "d2"], "--batch"),
        (["--run", "nowhere"], "nowhere"),
        (["--run", "RUN", "--batch", "8"], "--batch is known from the run of --run; leave it out"),
        (["--run", "RUN", "--micro-batches", "4"], "--micro-batches is known from the run of --run; leave it out"),
        (["--model", NETWORK.name, "--strategy", "d2", "--batch", "8", "--memory", "much"], "--memory"),
        (["--model", NETWORK.name, "--strategy", "d2", "--batch", "8", "--evaluator", "paradl"], "--evaluator paradl"),
        (["--model", NETWORK.name, "--strategy", "d2", "--batch", "8", "--dataset-samples", "9"], "--dataset-samples"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(encode_pretty(profile()))
    run = run_of(tmp_path, [[(0.02, 0.04, 1e-5, 1e-6)] * 6] * 2, "d2")
    words = [run if word == "RUN" else word for word in options]
    result = CliRunner().invoke(group, ["diagnose", "--from-profile", str(path), *words])
    assert result.exit_code != 0
    assert message in f"{result.output}{result.exception}"
