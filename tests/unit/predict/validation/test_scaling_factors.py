"""Baselines beside runs where they apply, and measured scaling factors beside predicted ones."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from golden_cases import CLUSTERS, IMAGES, RUNS
from predicted_runs import CHAIN, PROFILE, predicted, run_like, validate
from profile_factory import make_profile, ring_fit, with_doctor, write_training_run

from calibrate.profile.profile import write_profile
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.cluster import Cluster, Level
from paradl_bench.strategies.data.fusion.rules import Fusion
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.validation.shown.report import markdown, print_report, write_report
from predict.workload import Configuration, evaluator_named

EVALUATORS = ("simulate", "paradl", "csf", "osf", "dag")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.json", PROFILE)
    return tmp_path / "profile.json"


def timed(path: Path, seconds: float, strategy: str, batch: int, **more: object) -> Path:
    """A run each of whose iterations takes so long."""
    ranks = parse_strategy(strategy).ranks
    rows = [(0.5 * seconds, 0.5 * seconds, 0.0, 0.0)] * 12
    return write_training_run(path, CHAIN, strategy=strategy, ranks=ranks, batch=batch, phases_s=[rows] * ranks, **more)


def test_osf_groups_gradients_as_the_run_did(profile: Path, tmp_path: Path) -> None:
    report = validate(profile, [run_like(tmp_path / "run", "d2", 8)])
    costs = CostModel(profile=PROFILE, network=CHAIN, fusion=Fusion(rule="ddp"))
    point = Configuration(strategy=parse_strategy("d2"), settings=PlanSettings(batch=8))
    for name in ("osf", "dag"):
        (pair,) = (pair for pair in report.pairs if pair.evaluator == name)
        expected_s = Predictor(costs, evaluator_named(name)).predict(point).iteration_s
        assert pair.predicted_s == pytest.approx(expected_s)
        assert pair.error == pytest.approx(expected_s / pair.measured_median_s - 1)


def test_a_factor_is_one_rank_over_all_of_them(profile: Path, tmp_path: Path) -> None:
    serial = [timed(tmp_path / f"serial-{at}", at, "serial", 4) for at in (3.0, 5.0, 4.0)]
    elsewhere = timed(tmp_path / "whole", 9.0, "serial", 8)
    report = validate(profile, [timed(tmp_path / "d2", 5.0, "d2", 8), *serial, elsewhere])
    (found,) = report.scaling_factors
    assert (found.strategy, found.ranks, found.local_batch) == ("d2", 2, 4)
    assert found.serial_runs == tuple(map(str, serial))
    assert found.measured == pytest.approx(4.0 / 5.0)
    assert tuple(found.by_evaluator) == EVALUATORS
    for name, factor in found.by_evaluator.items():
        ratio = predicted("serial", 4, name).iteration_s
        of_two = {pair.evaluator: pair.predicted_s for pair in report.pairs if pair.strategy == "d2"}
        assert factor.predicted == pytest.approx(ratio / of_two[name])
        assert factor.error == pytest.approx(factor.predicted / 0.8 - 1)
    assert report.serial_runs_wanted == ()


def test_the_factor_of_csf_is_the_papers(profile: Path, tmp_path: Path) -> None:
    """CSF = T_comp / (T_comp + t(sum of g)), with the weight update, which both iterations have, on both sides."""
    runs = [run_like(tmp_path / "serial", "serial", 4), run_like(tmp_path / "d2", "d2", 8)]
    (found,) = validate(profile, runs).scaling_factors
    parts = predicted("serial", 4, "csf").time.phases_s
    exchanged_s = 2 * 1 * 50e-6 + 2 * (1 / 2) * CHAIN.parameter_bytes * 1e-9
    alone_s = sum(parts.values())
    assert found.by_evaluator["csf"].predicted == pytest.approx(alone_s / (alone_s + exchanged_s))


@pytest.mark.parametrize(
    "change", [{"optimizer": "adam"}, {"batch": 8}, {"network_digest": "other"}, {"accumulate": 2}], ids=str
)
def test_an_unlike_serial_run_is_no_reference(tmp_path: Path, change: dict[str, object]) -> None:
    adam = [msgspec.structs.replace(time, optimizer="adam") for time in PROFILE.model_times]
    write_profile(tmp_path / "p.json", msgspec.structs.replace(PROFILE, model_times=(*PROFILE.model_times, *adam)))
    serial = timed(tmp_path / "serial", 1.0, "serial", **{"batch": 4, **change})  # type: ignore[arg-type]
    report = validate(tmp_path / "p.json", [serial, timed(tmp_path / "d2", 1.0, "d2", 8)], force=True)
    assert report.scaling_factors == ()
    (line,) = report.serial_runs_wanted
    assert f"no measured scaling factor of {tmp_path / 'd2'}" in line


def test_the_command_that_measures_a_serial_run_is_said_once(profile: Path, tmp_path: Path) -> None:
    runs = [timed(tmp_path / name, 1.0, "d2", 8, bucket_cap_bytes=1024**2) for name in ("a", "b")]
    report = validate(profile, runs)
    (line,) = report.serial_runs_wanted
    assert line == (
        f"no measured scaling factor of {runs[0]}, {runs[1]}: no serial run has as many samples a rank; measure it: "
        "paradl-bench train chain --sequence 64 --strategy serial --batch 4 --optimizer sgd --dtype fp32 -o DIR"
    )
    assert line in markdown(report).replace("\\", "")


def test_what_does_not_apply_is_said_once(tmp_path: Path) -> None:
    fits = tuple(map(ring_fit, ("all_reduce", "all_gather", "send_recv")))
    write_profile(tmp_path / "p.json", msgspec.structs.replace(PROFILE, communication=fits))
    runs = [timed(tmp_path / f"{name}-{again}", 1.0, name, 8) for name in ("f2", "p2", "d2") for again in "ab"]
    report = validate(tmp_path / "p.json", runs)
    closed, by_flops = report.not_applicable
    assert closed == "not applicable to f2, p2: csf, osf, dag"
    assert by_flops.startswith("not applicable: --evaluator flops needs the peak FLOP/s of a rank")
    assert {pair.evaluator for pair in report.pairs if pair.strategy == "p2"} == {"simulate", "paradl"}


def test_flops_stand_beside_runs_where_a_peak_is_known(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", with_doctor(PROFILE))
    runs = [timed(tmp_path / "serial", 1.0, "serial", 4), timed(tmp_path / "d2", 1.0, "d2", 8)]
    report = validate(tmp_path / "p.json", runs)
    assert report.not_applicable == ()
    assert set(report.overall) == {*EVALUATORS, "flops"}
    assert report.scaling_factors[0].by_evaluator["flops"].predicted < 1


def test_text_and_files_hold_the_factors(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = validate(profile, [timed(tmp_path / "serial", 4.0, "serial", 4), timed(tmp_path / "d2", 5.0, "d2", 8)])
    path = write_report(tmp_path / "report", report)
    assert "| chain | d2 | 4 | 1 | 0.800 |" in path.read_text()
    (written,) = json.loads((tmp_path / "report" / "report.json").read_bytes())["scaling_factors"]
    assert written["measured"] == pytest.approx(0.8)
    print_report(report, path, "table")
    assert "Scaling factor" in capsys.readouterr().out


def test_committed_runs_say_what_is_missing(tmp_path: Path) -> None:
    """Of an emulated cluster: d8 is data parallel and has no serial run beside it; d2f4 and p8 have no closed form."""
    runs = [CLUSTERS / "2x4" / name for name in RUNS]
    network = trace_network(load_model(IMAGES, (3, 32, 32)))
    fits = tuple(map(ring_fit, ("all_reduce", "all_gather", "broadcast", "send_recv")))
    levels = (Level(name="node", ranks=4), Level(name="system", ranks=8))
    known = make_profile(network, communication=fits, cluster=Cluster(name="2x4", levels=levels))
    write_profile(tmp_path / "p.json", known)
    report = validate(tmp_path / "p.json", runs, force=True)
    of_d8 = [pair.evaluator for pair in report.pairs if pair.strategy == "d8"]
    assert {"osf", "dag", "csf"} <= set(of_d8)
    assert report.scaling_factors == ()
    (line,) = report.serial_runs_wanted
    assert "small_vgg-d8: no serial run" in line
    assert line.endswith(", emulated as that run is")
    assert "not applicable to d2f4, p8: csf, osf, dag" in report.not_applicable
