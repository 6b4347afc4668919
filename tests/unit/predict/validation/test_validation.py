"""Validation: how runs are held against predictions, what is found, and what the report says of it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from predicted_runs import CHAIN, PROFILE, phases, predicted, run_like, validate
from profile_factory import make_profile, model_times, ring_fit, write_training_run

from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.training.training_record import TRAINING_FILE, MemoryPeak
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.validation.shown.report import markdown, refuse_existing, write_report
from predict.validation.validation import validate_runs
from predict.validation.validation_report import Pair, Report
from predict.validation.validation_scores import rank
from predict.workload import Configuration, evaluator_named


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.json", PROFILE)
    return tmp_path / "profile.json"


def test_runs_that_take_what_is_predicted_are_predicted_exactly(profile: Path, tmp_path: Path) -> None:
    runs = [run_like(tmp_path / strategy, strategy, 8) for strategy in ("serial", "d2")]
    report = validate(profile, runs)
    assert [(pair.strategy, pair.evaluator) for pair in report.pairs] == [
        (strategy, name)
        for names in (("simulate", "paradl", "csf"), ("osf", "dag"))
        for strategy in ("serial", "d2")
        for name in names
    ]
    score = report.overall["simulate"].score
    assert score.mean_accuracy == pytest.approx(1)
    assert score.interval_coverage == 1
    assert score.phase_accuracy == pytest.approx({"FW": 1, "BW": 1, "GE": 1, "WU": 1})
    assert report.outliers == ()
    assert report.overall["simulate"].ranking.rank_correlation == pytest.approx(1)
    assert report.overall["simulate"].ranking.top1_regret == 0


def test_a_run_is_predicted_with_its_own_options(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    fits = (ring_fit(), ring_fit("all_gather"))
    write_profile(profile, msgspec.structs.replace(PROFILE, communication=fits))
    rows = [[(1.0, 2.0, 0.0, 0.1)] * 12] * 2
    choices = {"all": (), "one": ("fc0",), "rest": ("fc[1]", "fc2")}
    runs = [
        write_training_run(tmp_path / name, CHAIN, strategy="f2", batch=8, phases_s=rows, split=split)
        for name, split in choices.items()
    ]
    found = {Path(pair.run).name: pair for pair in validate(profile, runs).pairs if pair.evaluator == "simulate"}
    assert [found[name].options for name in choices] == [{}, {"split": "fc0"}, {"split": "fc[1],fc2"}]
    for name, split in choices.items():
        settings = plan_settings(batch=8, split=split)
        model = CostModel(profile=msgspec.structs.replace(PROFILE, communication=fits), network=CHAIN)
        point = Configuration(strategy=parse_strategy("f2"), settings=settings)
        exact = Predictor(model, evaluator_named("simulate")).predict(point).iteration_s
        assert found[name].predicted_s == pytest.approx(exact)
    assert len({pair.predicted_s for pair in found.values()}) == len(choices)
    # Runs with unlike options do not repeat each other.
    assert validate(profile, runs).reruns == {}


def test_the_baselines_are_the_closed_forms(profile: Path, tmp_path: Path) -> None:
    report = validate(profile, [run_like(tmp_path / "run", "d2", 8)])
    for name in ("paradl", "csf"):
        (pair,) = (pair for pair in report.pairs if pair.evaluator == name)
        assert pair.predicted_s == pytest.approx(predicted("d2", 8, name).iteration_s)
        assert pair.error == pytest.approx(pair.predicted_s / pair.measured_median_s - 1)


def test_reruns_of_a_configuration_bound_how_well_it_is_predictable(profile: Path, tmp_path: Path) -> None:
    runs = [run_like(tmp_path / str(factor), "serial", 8, factor=factor) for factor in (1.0, 1.25, 0.8)]
    alone = run_like(tmp_path / "alone", "d2", 8)
    report = validate(profile, [*runs, alone])
    (strategy,) = report.reruns
    rerun = report.reruns[strategy]
    # Medians of the others: of 1.25 and 0.8, of 1 and 0.8, of 1 and 1.25.
    off = [abs(1.025 / 1.0 - 1), abs(0.9 / 1.25 - 1), abs(1.125 / 0.8 - 1)]
    assert (strategy, rerun.runs) == ("serial", 3)
    assert rerun.mean_accuracy == pytest.approx(1 - sum(off) / 3)
    assert max(off) > rerun.half_width_85 > sorted(off)[1]
    assert "half-width that holds 85%" in markdown(report)
    assert validate(profile, [alone]).reruns == {}


def test_predictions_are_held_against_the_median_of_a_configurations_runs(profile: Path, tmp_path: Path) -> None:
    runs = [run_like(tmp_path / str(factor), "serial", 8, factor=factor) for factor in (1.0, 1.25, 0.8, 1.3)]
    alone = run_like(tmp_path / "alone", "d2", 8)
    report = validate(profile, [alone, *runs])
    (found,) = report.repeated
    medians_s = [
        pair.measured_median_s for pair in report.pairs if (pair.strategy, pair.evaluator) == ("serial", "csf")
    ]
    assert (found.strategy, found.runs) == ("serial", 4)
    assert found.measured_median_s == pytest.approx((medians_s[0] + medians_s[1]) / 2)
    assert found.measured_range_s == (medians_s[2], medians_s[3])
    assert set(found.by_evaluator) == {"simulate", "paradl", "csf", "osf", "dag"}
    for name, of_median in found.by_evaluator.items():
        expected = predicted("serial", 8, name)
        assert of_median.error == pytest.approx(expected.iteration_s / found.measured_median_s - 1)
        low, high = expected.time.interval_s
        assert of_median.covered == (low <= found.measured_median_s <= high)
    text = markdown(report)
    assert f"| serial | simulate | 1 | {1 - abs(found.by_evaluator['simulate'].error):.1%} |" in text
    assert "| d2 | simulate | 1 |" in text.split("## Repeated runs")[0]
    assert "| d2 |" not in text.split("## Repeated runs")[1].split("## Findings")[0]
    assert validate(profile, [alone, runs[0]]).repeated == ()


def test_one_strategys_accuracy_is_shown_once(profile: Path, tmp_path: Path) -> None:
    serial, data = (run_like(tmp_path / strategy, strategy, 8) for strategy in ("serial", "d2"))
    assert "| all |" not in markdown(validate(profile, [serial]))
    assert "| all | simulate | 2 |" in markdown(validate(profile, [serial, data]))


def test_memory_is_held_against_the_rank_that_held_most(profile: Path, tmp_path: Path) -> None:
    wanted = predicted("d2", 8).memory.memory_bytes
    peaks = tuple(
        MemoryPeak(rank=rank, tracked_bytes=size, parts_bytes={"parameters": size})
        for rank, size in enumerate((wanted // 4, wanted // 2))
    )
    report = validate(profile, [run_like(tmp_path / "run", "d2", 8, memory=peaks), run_like(tmp_path / "old", "d2", 8)])
    tracked, untracked = (pair.memory for pair in report.pairs if pair.evaluator == "simulate")
    assert tracked is not None
    assert (tracked.predicted_bytes, tracked.measured_bytes) == (wanted, wanted // 2)
    assert tracked.error == pytest.approx(1, rel=1e-3)
    assert untracked is None


def test_error_is_signed_and_names_the_phase_that_explains_it(profile: Path, tmp_path: Path) -> None:
    report = validate(profile, [run_like(tmp_path / "run", "serial", 8, factor=1.5, slow="BW")])
    pair = report.pairs[0]
    parts = predicted("serial", 8).time.phases_s
    assert pair.error == pytest.approx(-0.5 * parts["BW"] / pair.measured_median_s)
    assert pair.accuracy == pytest.approx(1 + pair.error)
    assert pair.phases["BW"].error == pytest.approx(1 / 1.5 - 1)
    assert not pair.covered
    (outlier,) = report.outliers
    assert outlier.phase == pair.explained_by == "BW"
    assert outlier.phase_difference_s == pytest.approx(-0.5 * parts["BW"])


def test_runs_far_off_are_reported_even_inside_their_interval(tmp_path: Path) -> None:
    profile = tmp_path / "wide.json"
    write_profile(profile, make_profile(model_times=model_times(CHAIN, common_sd=0.2)))
    runs = [
        run_like(tmp_path / f"{strategy}-{factor}", strategy, 8, factor=factor, slow="WU", **more)
        for strategy, more in (("serial", {}), ("d2", {"backend": "gloo"}))
        for factor in (1.0, 1.5, 3.0, 6.0, 40.0)
    ]
    report = validate(profile, runs)
    pairs = {pair.run: pair for pair in report.pairs if pair.evaluator == "simulate"}
    held = {run: pair.covered for run, pair in pairs.items() if abs(pair.error) > 0.1}
    assert {outlier.run for outlier in report.far_off} == {run for run, covered in held.items() if covered}
    assert {outlier.run for outlier in report.outliers} == {pair.run for pair in pairs.values() if not pair.covered}
    assert report.far_off
    assert len(held) > len(report.far_off)
    lines = markdown(report).split("## Findings")[1].splitlines()
    told = [line for line in lines if line.startswith("- large error, though inside its interval")]
    assert len(told) == len(report.far_off)
    assert all("most of it is WU" in line for line in told)
    # Of ranks that share a host's memory alone.
    assert {"d2" in line for line in lines if "whose bandwidth may change" in line} == {True}


def pipelined_run(directory: Path, *, idle_factor: float = 1.0, bw_factor: float = 1.0) -> Path:
    """A run of p2 as it was predicted, but for the stages' waiting, and backward of all stages."""
    profile = make_profile(communication=(ring_fit("send_recv"),), model_times=model_times(CHAIN, common_sd=0.001))
    settings = plan_settings(batch=8, micro_batches=4)
    found = Predictor(CostModel(profile=profile, network=CHAIN), evaluator_named("simulate")).predict(
        Configuration(strategy=parse_strategy("p2"), settings=settings)
    )
    parts, idle_s = found.time.phases_s, found.time.breakdown_s["pipeline_idle"] * idle_factor
    row = parts["FW"], parts["BW"] * bw_factor, parts["GE"], parts["WU"]
    path = write_training_run(
        directory, CHAIN, strategy="p2", batch=8, phases_s=[[row] * 6] * 2, micro_batches=4, schedule="gpipe"
    )
    records = [json.loads(line) for line in (path / TRAINING_FILE).read_bytes().splitlines()]
    for record in records:
        record |= {"iteration_s": [sum(row) + idle_s] * 6, "pipeline_idle_s": [idle_s] * 6}
    (path / TRAINING_FILE).write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    write_profile(directory.parent / "pipeline.json", profile)
    return path


def test_pipeline_idle_time_is_named_if_it_dominates_the_error(tmp_path: Path) -> None:
    waits, computes = pipelined_run(tmp_path / "waits", idle_factor=4), pipelined_run(tmp_path / "bw", bw_factor=3)
    report = validate(tmp_path / "pipeline.json", [waits, computes])
    pairs = {pair.run: pair for pair in report.pairs if pair.evaluator == "simulate"}
    of_waits = pairs[str(waits)]
    assert of_waits.idle is not None
    assert of_waits.idle.error == pytest.approx(1 / 4 - 1)
    assert of_waits.explained_by == "pipeline_idle"
    assert pairs[str(computes)].explained_by == "BW"
    assert pairs[str(computes)].idle is not None
    told = {outlier.run: outlier for outlier in (*report.outliers, *report.far_off)}
    measured, predicted_s = of_waits.idle.measured_s, of_waits.idle.predicted_s
    assert told[str(waits)].phase_difference_s == pytest.approx(predicted_s - measured)
    text = markdown(report)
    assert "most of it is idle time of the pipeline" in text
    assert "most of it is BW" in text
    assert "| pipeline_idle |" in text
    assert all(pair.idle is None for pair in report.pairs if pair.evaluator != "simulate")


def test_a_pipeline_without_timed_waiting_is_judged_by_phases(tmp_path: Path) -> None:
    path = pipelined_run(tmp_path / "run", idle_factor=0)
    report = validate(tmp_path / "pipeline.json", [path])
    assert all(pair.idle is None for pair in report.pairs)
    assert "pipeline_idle" not in markdown(report)


def test_a_straggling_rank_is_named_in_the_report(profile: Path, tmp_path: Path) -> None:
    times = phases("d2", 8)
    slow = tuple(2 * seconds for seconds in times)
    held = write_training_run(tmp_path / "held", CHAIN, batch=8, phases_s=[[times] * 12, [times] * 6 + [slow] * 6])
    report = validate(profile, [run_like(tmp_path / "even", "d2", 8), held])
    named = [line for line in report.notes if "rank 1" in line]
    assert len(named) == 1
    assert named[0].startswith(f"{held}: rank 1 computes ")
    assert named[0].endswith("over 1.1 times as long in 50% of iterations")
    assert named[0] in markdown(report)
    assert f"{held}: 50% of iterations had a rank that its peers waited for" in report.notes


def pair(strategy: str, predicted_s: float, measured_s: float, batch: int = 8) -> Pair:
    return Pair(
        **{name: 0 for name in Pair.__struct_fields__}
        | {
            "model": "m",
            "input_shape": (1,),
            "dtype": "fp32",
            "optimizer": "sgd",
            "strategy": strategy,
            "batch": batch,
            "options": {},
            "predicted_s": predicted_s,
            "measured_median_s": measured_s,
        }
    )


def test_ranking_is_within_a_model_and_batch() -> None:
    right = [pair("serial", 1.0, 1.1), pair("d2", 2.0, 2.2), pair("d4", 3.0, 3.3)]
    wrong = [pair("serial", 1.0, 3.0, 16), pair("d2", 2.0, 1.5, 16)]
    alone = [pair("serial", 1.0, 1.0, 32)]
    found = rank([*right, *wrong, *alone])
    assert found.groups == 2
    assert found.rank_correlation == pytest.approx((1 + -1) / 2)
    assert found.top1_regret == pytest.approx((0 + (3.0 / 1.5 - 1)) / 2)
    assert rank(alone).rank_correlation is None


def test_repeated_runs_of_a_strategy_count_once_in_the_ranking() -> None:
    found = rank([pair("serial", 1.0, 1.0), pair("serial", 1.0, 9.0), pair("serial", 1.0, 1.1), pair("d2", 2.0, 2.0)])
    assert found.rank_correlation == pytest.approx(1)
    assert found.top1_regret == 0


def test_reports_are_markdown_csv_and_json_and_never_silently_replaced(profile: Path, tmp_path: Path) -> None:
    report = validate(profile, [run_like(tmp_path / strategy, strategy, 8) for strategy in ("serial", "d2")])
    directory = tmp_path / "report"
    refuse_existing(directory, force=False)
    assert write_report(directory, report) == directory / "report.md"
    text = (directory / "report.md").read_text()
    assert "| chain | d2 | 8 |" in text
    assert "rank correlation 1.00" in text
    rows = list(csv.DictReader(io.StringIO((directory / "pairs.csv").read_text())))
    assert len(rows) == 10
    assert float(rows[0]["phases.BW.predicted_s"]) == pytest.approx(float(rows[0]["phases.BW.measured_s"]))
    stored = json.loads((directory / "report.json").read_text())
    assert set(stored) >= {"pairs", "strategies", "overall"}
    assert msgspec.json.decode((directory / "report.json").read_bytes(), type=Report) == report
    with pytest.raises(UserError, match=r"report.md exists"):
        refuse_existing(directory, force=False)
    refuse_existing(directory, force=True)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"recompute": ("fc1",)}])
def test_accumulating_and_recomputing_runs_are_simulated_and_kept_apart(
    profile: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    rows = [[(1.0, 1.0, 1.0, 1.0)] * 6] * 2
    runs = [
        write_training_run(tmp_path / name, CHAIN, strategy="d2", batch=8, phases_s=rows, **more)
        for name, more in (("plain", {}), ("other", options))
    ]
    report = validate_runs(profile, runs, cluster_path=None, force=False)
    of_runs = {path: [pair for pair in report.pairs if pair.run == str(path)] for path in runs}
    assert {pair.evaluator for pair in of_runs[runs[0]]} > {pair.evaluator for pair in of_runs[runs[1]]} == {"simulate"}
    (pair,) = of_runs[runs[1]]
    assert list(pair.options) == list(options)
    assert "halves" in pair.noise_floor_from
    told = {"accumulate": "d2 (accumulate 2)", "recompute": "d2 (recompute fc1)"}[next(iter(options))]
    lines = markdown(report).splitlines()
    assert [line.split(" | ")[1] for line in lines if line.startswith("| chain |")] == ["d2", told]
