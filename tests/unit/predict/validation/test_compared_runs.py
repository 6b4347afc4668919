"""``predict validate --profile-out``: intervals of the profile that it writes count how far runs were off."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from profile_factory import make_network

from calibrate.cli import group as calibrate
from calibrate.profile.compared_runs import prediction_errors
from calibrate.profile.profile import Profile, read_profile, write_profile
from calibrate.report.show import explanation
from paradl_bench.core.statistics import Z90
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from predict.cli import group
from predict.costs.compute.layer_source import of_layers_from, parse_layers
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named
from tests.cases.predicted_runs import PROFILE, run_like

BATCHES = (4, 8, 16)


def runs(folder: Path, factor: float = 1.2) -> list[Path]:
    """Of d2, which took so many times as long as predicted."""
    return [run_like(folder / f"d2-{batch}", "d2", batch, factor=factor) for batch in BATCHES]


def validate(folder: Path, measured: list[Path], *options: str, profile: str = "p.json") -> Result:
    if not (folder / "p.json").exists():
        write_profile(folder / "p.json", PROFILE)
    told = ["validate", "--from-profile", str(folder / profile), *map(str, measured), "-o", str(folder / "report")]
    return CliRunner().invoke(group, [*told, "--force", *options], catch_exceptions=True)


def predicted(profile: Profile, strategy: str, evaluator: str = "simulate") -> Prediction:
    costs = CostModel(profile=profile, network=make_network())
    point = Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=8))
    return Predictor(costs, evaluator_named(evaluator)).predict(point)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With runs, and with the profile that was compared with them."""
    here = tmp_path_factory.mktemp("compared")
    done = validate(here, runs(here), "--profile-out", str(here / "compared.json"))
    assert done.exit_code == 0, done.output
    return here


def test_intervals_count_the_errors_and_predictions_stay(folder: Path) -> None:
    compared = read_profile(folder / "compared.json")
    assert msgspec.structs.replace(compared, compared_runs=msgspec.UNSET) == PROFILE
    before, after = predicted(PROFILE, "d2"), predicted(compared, "d2")
    assert after.iteration_s == before.iteration_s
    assert before.time.interval_s[1] < 1.2 * before.iteration_s < after.time.interval_s[1]
    error = prediction_errors(compared.runs_compared)["data"]
    assert after.provenance.spread_s["compared runs, data"] == pytest.approx(
        Z90 * error.relative_sd * after.iteration_s, rel=0.02
    )


def test_the_largest_error_of_a_nested_strategy_counts(folder: Path) -> None:
    compared = read_profile(folder / "compared.json")
    for factor, larger in ((0.5, "data"), (3.0, "tensor")):
        others = [
            msgspec.structs.replace(
                run,
                sha256=f"{number:064x}",
                configuration=f"t2 {number}",
                strategy="t2",
                measured_s=run.predicted_s * (1 + factor * run.error),
            )
            for number, run in enumerate(compared.runs_compared)
        ]
        both = msgspec.structs.replace(compared, compared_runs=(*compared.runs_compared, *others))
        assert [name for name in predicted(both, "d2t2").provenance.spread_s if name.startswith("compared runs")] == [
            f"compared runs, {larger}"
        ]
    nested = predicted(compared, "d2t2")
    assert "compared runs, data" in nested.provenance.spread_s
    assert any("fewer than 3 configurations were compared of tensor" in line for line in nested.provenance.notes)
    assert "errors of compared runs: beyond 2 ranks" in nested.provenance.extrapolated


def test_other_kinds_and_closed_forms_stay_as_they_are(folder: Path) -> None:
    compared = read_profile(folder / "compared.json")
    for strategy, evaluator in (("t2", "simulate"), ("d2", "paradl"), ("d2", "osf")):
        before, after = (predicted(profile, strategy, evaluator) for profile in (PROFILE, compared))
        assert after.time.interval_s == before.time.interval_s


def test_layers_from_elsewhere_do_not_count_them(folder: Path) -> None:
    compared = read_profile(folder / "compared.json")
    assert of_layers_from(compared, parse_layers("roofline")).runs_compared == ()
    assert of_layers_from(compared, parse_layers("measured")).runs_compared == compared.runs_compared


def test_validating_again_says_that_it_is_no_test(folder: Path) -> None:
    done = validate(folder, runs(folder / "again"), profile="compared.json")
    assert "intervals are no test for 3 runs" in done.output
    assert "intervals hold 3 of 3 runs" not in done.output


def test_comparing_again_changes_nothing(folder: Path) -> None:
    measured = [folder / f"d2-{batch}" for batch in BATCHES]
    target = folder / "twice.json"
    assert validate(folder, measured, "--profile-out", str(target), profile="compared.json").exit_code == 0
    assert read_profile(target) == read_profile(folder / "compared.json")


def test_the_report_suggests_it_when_intervals_hold_too_few(tmp_path: Path) -> None:
    told = " ".join(validate(tmp_path, runs(tmp_path, 2.0)).output.split())
    assert "intervals hold 0 of 3 runs, where 9 of 10 are expected: --profile-out FILE writes a profile" in told
    assert "--profile-out" not in validate(tmp_path, runs(tmp_path / "right", 1.0)).output


def test_the_profile_is_explained(folder: Path) -> None:
    told = json.loads(msgspec.json.encode(explanation(read_profile(folder / "compared.json"))))
    assert told["prediction_errors"]["data"]["configurations"] == 3
    brief, whole = (
        CliRunner().invoke(calibrate, ["show", str(folder / "compared.json"), *more]).output for more in ([], ["--all"])
    )
    told = " ".join(brief.split())
    assert "3 runs over their predictions in the mean, and what that adds to intervals: data +20.0%, 4" in told
    assert "Runs over their predictions, by kind of axis" in whole


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--profile-out", "-"), "--profile-out -: standard output is taken by the report; give a file"),
        (("--profile-out", "{0}/n.json", "--layers", "roofline"), "--profile-out with --layers roofline"),
        (("--profile-out", "{0}/p.json/n.json"), "p.json"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = validate(tmp_path, runs(tmp_path), *(option.format(tmp_path) for option in options))
    assert done.exit_code != 0
    assert said in str(done.exception)
    assert not (tmp_path / "report").exists()
