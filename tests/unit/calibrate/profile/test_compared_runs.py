"""What errors of compared runs say of a further prediction, by kind of axis."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from calibrate.fitting.merging.merge import merge_profiles
from calibrate.profile.compared_runs import ComparedRun, prediction_errors
from calibrate.profile.emulated_profile import emulated
from calibrate.profile.profile import Profile, read_profile, write_profile
from calibrate.statistics.blocks import student_90
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from paradl_bench.plan.strategy import parse_strategy
from tests.cases.predicted_runs import PROFILE


def run(strategy: str, error: float, number: int, *, relative_sd: float = 0.02, configuration: str = "") -> ComparedRun:
    """A run that took so much longer than predicted."""
    return ComparedRun(
        path=f"runs/{number}",
        sha256=f"{number:064x}",
        configuration=configuration or f"{number:016x}",
        model="chain",
        strategy=strategy,
        ranks=parse_strategy(strategy).ranks,
        batch=8,
        measured_s=1.0 + error,
        predicted_s=1.0,
        relative_sd=relative_sd,
    )


@pytest.mark.parametrize("count", [3, 6, 20])
@pytest.mark.parametrize(("known_sd", "unknown_sd"), [(0.05, 0.0), (0.05, 0.05), (0.02, 0.1), (0.0, 0.1)])
def test_nine_of_ten_further_runs_lie_inside(count: int, known_sd: float, unknown_sd: float) -> None:
    """Errors drawn from a normal distribution, whose deviation the intervals know a part of."""
    draw = np.random.default_rng(count)
    inside = []
    for errors in draw.normal(0.0, math.hypot(known_sd, unknown_sd), size=(1500, count + 1)).clip(-0.9):
        *compared, further = errors.tolist()
        runs = [run("f2", error, number, relative_sd=known_sd) for number, error in enumerate(compared)]
        added = prediction_errors(runs)["filter"].relative_sd
        inside.append(abs(further) <= Z90 * math.hypot(known_sd, added))
    assert 0.86 <= np.mean(inside) <= 0.96


def test_the_sd_is_what_intervals_had_not_expected() -> None:
    runs = [run("f2", error, number, relative_sd=0.03) for number, error in enumerate((0.04, 0.06, 0.08, 0.1))]
    found = prediction_errors(runs)["filter"]
    square = (0.04**2 + 0.06**2 + 0.08**2 + 0.1**2) / 4
    # Student's quantile of four degrees of freedom is 2.132.
    assert found.relative_sd == pytest.approx(2.132 / Z90 * math.sqrt(square - 0.03**2), rel=1e-3)
    assert (found.configurations, found.ranks) == (4, 2)
    assert (found.mean, found.root_mean_square, found.expected) == pytest.approx((0.07, math.sqrt(square), 0.03))


def test_an_error_that_was_expected_hides_no_other() -> None:
    runs = [run("d2", 0.5, number, relative_sd=0.05) for number in range(9)]
    (alone,) = prediction_errors(runs).values()
    (both,) = prediction_errors([*runs, run("d2", -0.8, 9, relative_sd=5.0)]).values()
    assert 0.9 * alone.relative_sd < both.relative_sd < 1.1 * alone.relative_sd


def test_errors_are_as_large_as_then_expected() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        known = draw.uniform(0.01, 0.2, size=8)
        errors = draw.normal(0.0, np.hypot(known, 0.1)).clip(-0.9)
        pairs = zip(errors.tolist(), known.tolist(), strict=True)
        runs = [run("d2", error, number, relative_sd=sd) for number, (error, sd) in enumerate(pairs)]
        found = prediction_errors(runs)["data"].relative_sd / (student_90(8) / Z90)
        if found:
            assert np.mean(errors**2 / (known**2 + found**2)) == pytest.approx(1.0, rel=1e-9)
        else:
            assert np.mean(errors**2 / known**2) <= 1


def test_expected_errors_add_nothing() -> None:
    runs = [run("d2", error, number, relative_sd=0.05) for number, error in enumerate((0.03, -0.04, 0.02))]
    assert prediction_errors(runs)["data"].relative_sd == 0


def test_fewer_than_three_configurations_add_nothing() -> None:
    repeated = [run("c2", 0.2, number, configuration="same") for number in range(5)]
    runs = [*repeated, run("c2", 0.2, 6)]
    found = prediction_errors(runs)["channel"]
    assert (found.configurations, found.relative_sd) == (2, 0)


def test_a_repeated_configuration_counts_once_by_its_median() -> None:
    repeated = [run("c2", error, number, configuration="same") for number, error in enumerate((0.1, 0.1, 0.9))]
    found = prediction_errors([*repeated, run("c2", 0.1, 3), run("c2", 0.1, 4)])["channel"]
    assert (found.configurations, found.mean) == (3, pytest.approx(0.1))


def test_a_nested_run_counts_for_each_of_its_kinds() -> None:
    found = prediction_errors([run("d2f2", 0.1, 0), run("serial", 0.1, 1)])
    assert {kind: error.configurations for kind, error in found.items()} == {"data": 1, "filter": 1, "serial": 1}


def compared() -> Profile:
    return msgspec.structs.replace(PROFILE, compared_runs=(run("f2", 0.1, 0), run("d2", 0.0, 1)))


def test_a_profile_keeps_its_compared_runs(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", compared())
    assert read_profile(tmp_path / "p.json") == compared()
    write_profile(tmp_path / "none.json", PROFILE)
    assert "compared_runs" not in (tmp_path / "none.json").read_text()


def test_a_run_can_be_compared_once() -> None:
    with pytest.raises(ValueError, match=r"compared_runs\[1\] is almost the same as compared_runs\[0\]"):
        msgspec.structs.replace(PROFILE, compared_runs=(run("f2", 0.1, 0), run("f2", 0.2, 0)))


@pytest.mark.parametrize(
    ("field", "value"), [("measured_s", 0), ("predicted_s", -1), ("strategy", "q2"), ("ranks", 0), ("ranks", 7)]
)
def test_a_wrong_run_in_a_profile_is_refused(field: str, value: object, tmp_path: Path) -> None:
    raw = msgspec.to_builtins(compared())
    raw["compared_runs"][1][field] = value
    (tmp_path / "p.json").write_bytes(msgspec.json.encode(raw))
    with pytest.raises(UserError, match=r"compared_runs"):
        read_profile(tmp_path / "p.json")


def test_profiles_of_other_predictions_hold_none_of_them() -> None:
    assert emulated(compared(), 2.0).runs_compared == ()
    other = msgspec.structs.replace(PROFILE, layer_times=(), model_times=(), copies=(), communication=(), network={})
    merged = merge_profiles([compared(), other], ["a.json", "b.json"], command_line=(), force=True)
    assert merged.runs_compared == ()
    assert any(note.startswith("compared runs of a.json are left out") for note in merged.notes)
