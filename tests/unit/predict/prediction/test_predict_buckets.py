"""``predict buckets``: the grid, its best, and the groupings beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from profile_factory import free_copies, make_network, make_profile, ring_fit, with_compute

from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from predict.cli import group
from predict.prediction.buckets.advice import BucketAdvice, parse_caps, print_advice
from predict.prediction.interval import Interval, Timed, gain_band

NETWORK = make_network((256, 512, 512, 512, 32))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Exchanges whose start is worth some waiting, slowed down beside compute, and copies that take time."""
    made = make_profile(
        NETWORK,
        communication=(ring_fit(alpha_s=4e-4),),
        contexts=(with_compute(1.2, 1.3),),
        copies=free_copies(beta_s_per_byte=1e-10),
    )
    write_profile(tmp_path / "p.json", made)
    return tmp_path / "p.json"


def asked(profile: Path, *options: str) -> Any:
    arguments = ["--from-profile", str(profile), "--model", "chain", *options]
    return CliRunner().invoke(group, ["buckets", *arguments])


def test_the_bucket_grid_equals_predict_and_marks_the_shortest(profile: Path) -> None:
    result = asked(profile, "--strategy", "d2", "--batch", "16", "--caps", "4,0.25,1,0.25", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    names = ["torch's default", "bucket_cap_mb 0.25", "bucket_cap_mb 1", "bucket_cap_mb 4"]
    names += ["layer by layer", "adaFusion", "MG-WFBP"]
    assert [row["grouping"] for row in rows] == names
    grid = rows[:4]
    for row in grid:
        options = ["--from-profile", str(profile), "--model", "chain", "--strategy", "d2", "--batch", "16", "--json"]
        options += ["--bucket-cap-mb", str(row["bucket_cap_mb"])] if row["bucket_cap_mb"] else []
        (found,) = json.loads(CliRunner().invoke(group, options).output)
        assert (row["iteration_s"], row["interval_s"]) == (found["iteration_s"], found["interval_s"])
        assert row["overlap_s"] < row["iteration_s"]
    assert [row["grouping"] for row in rows if row["best"]] == [
        min(grid, key=lambda row: row["iteration_s"])["grouping"]
    ]
    assert len({row["iteration_s"] for row in grid}) > 1


def test_groupings_outside_ddps_settings_have_only_free_overlap(profile: Path) -> None:
    rows = json.loads(asked(profile, "--strategy", "d2", "--batch", "16", "--json").output)
    layers, ada, _ = rows[-3:]
    assert layers["all_reduces"] == 4
    assert layers["largest_bytes"] == 4 * (512 * 512 + 512)
    assert ada["iteration_s"] is None
    assert ada["overlap_s"] <= layers["overlap_s"]
    osf = ["--from-profile", str(profile), "--model", "chain", "--strategy", "d2", "--batch", "16"]
    (found,) = json.loads(CliRunner().invoke(group, [*osf, "--evaluator", "osf", "--fusion", "ada", "--json"]).output)
    assert ada["overlap_s"] == found["iteration_s"]


def test_the_table_names_the_best_and_what_it_gains(profile: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = asked(profile, "--strategy", "d2,d4", "--batch", "16", "--evaluator", "osf", "-o", str(target))
    assert result.exit_code == 0, result.output
    for text in ("buckets of d2, batch 16: osf", "buckets of d4, batch 16: osf", "adaFusion", "best of the grid: "):
        assert text in result.output
    rows = json.loads(target.read_text())
    assert {row["strategy"] for row in rows} == {"d2", "d4"}
    assert all(row["iteration_s"] == row["overlap_s"] for row in rows if row["iteration_s"] is not None)
    again = asked(profile, "--strategy", "d2", "--batch", "16", "-o", str(target))
    assert "exists; give --force" in str(again.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--strategy", "f2"), "buckets belong to data parallelism on at least 2 ranks, not to f2"),
        (("--strategy", "serial"), "buckets belong to data parallelism on at least 2 ranks, not to serial"),
        (("--strategy", "d2", "--evaluator", "csf"), "--evaluator csf has no buckets: give simulate or osf"),
        (("--strategy", "d2", "--bucket-cap-mb", "5"), "--bucket-cap-mb: predict buckets tries several groupings"),
        (("--strategy", "d2", "--fusion", "ada"), "--fusion: predict buckets tries several groupings"),
        (("--strategy", "d2", "--caps", "1,much"), "'much' is not a size in MiB"),
        (("--strategy", "d2", "--dataset-samples", "100"), "--dataset-samples: predict buckets compares iterations"),
        (("--strategy", "d2", "--io-seconds", "1"), "predict buckets compares exchanges without the input"),
        (("--strategy", "d2", "--scaling", "strong"), "--scaling is for the rank counts of --ranks"),
    ],
)
def test_mistakes_are_one_line(profile: Path, options: tuple[str, ...], message: str) -> None:
    result = asked(profile, "--batch", "16", *options)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_each_bucket_point_reports_its_assumptions_and_omissions(profile: Path) -> None:
    result = asked(profile, "--strategy", "data", "--ranks", "2,3,4", "--scaling", "strong", "--batch", "16")
    assert result.exit_code == 0, result.output
    assert "left out: strategy d3: batch 16 does not split evenly over 3 ranks" in result.output
    alike = "the straggler factor assumes that ranks are slow independently of each other"
    free = "osf assumes that overlap and copies are free and that all ranks are equally fast"
    beyond = "extrapolated: all_reduce beyond 2 ranks"
    assert [result.stdout.count(line) for line in (alike, free, beyond)] == [2, 2, 1]
    assert "scaling factor" not in result.stdout
    rows = json.loads(asked(profile, "--strategy", "d4", "--batch", "16", "--caps", "8", "--json").output)
    assert [alike in row["notes"] for row in rows] == [True, True, False, False, False]
    assert all(free in row["notes"] for row in rows)
    assert all("all_reduce beyond 2 ranks" in row["extrapolated"] for row in rows)


def test_gains_are_over_the_default_and_reported_if_clear(profile: Path) -> None:
    options = ("--strategy", "d2", "--batch", "16", "--caps", "0.25,1,4")
    rows = json.loads(asked(profile, *options, "--json").output)
    default, *grid = rows[:4]
    assert (default["gain"], *default["gain_interval"]) == (0.0, pytest.approx(0.0), pytest.approx(0.0))
    for row in grid:
        assert row["gain"] == pytest.approx(default["iteration_s"] / row["iteration_s"] - 1)
        assert row["gain_interval"][0] <= row["gain"] <= row["gain_interval"][1]
    assert all(row["gain"] is None for row in rows[4:])
    words = " ".join(asked(profile, *options).stdout.split())
    assert ("no cap is clearly faster" in words) == (not any(row["gain_interval"][0] > 0 for row in grid))


def advice_of(name: str, iteration_s: float, gain: float, low: float, *, best: bool = False) -> BucketAdvice:
    return BucketAdvice(
        strategy="d2",
        batch=8,
        evaluator="simulate",
        grouping=name,
        all_reduces=1,
        largest_bytes=1,
        iteration_s=iteration_s,
        overlap_s=1.0,
        gain=gain,
        gain_interval=(low, gain + 0.1),
        best=best,
    )


@pytest.mark.parametrize(
    ("lows", "ending"),
    [
        ((0.01, -0.1), "faster than torch's default"),
        ((-0.1, -0.1), "no cap is clearly faster than torch's default"),
        (
            (-0.1, 0.01),
            "which is not certain; bucket_cap_mb 2 is clearly faster, 5.00% (90%: +1.00% to +15.00%) faster",
        ),
    ],
)
def test_a_gain_is_clear_where_its_interval_holds_gains_alone(
    lows: tuple[float, float], ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        advice_of("torch's default", 1.0, 0.0, 0.0),
        advice_of("bucket_cap_mb 1", 1 / 1.1, 0.1, lows[0], best=True),
        advice_of("bucket_cap_mb 2", 1 / 1.05, 0.05, lows[1]),
    ]
    print_advice(rows)
    words = " ".join(capsys.readouterr().out.split())
    assert ending in words
    assert words.count("clear") == (0 if lows[0] > 0 else ending.count("clear"))


def timed(iteration_s: float, moved: dict[str, tuple[float, float]], own_s: float, unexplained_s: float) -> Timed:
    return Timed(iteration_s, Interval(0.0, 0.0, {}, moved, own_s, (unexplained_s,)))


def test_a_gain_keeps_only_errors_its_sides_do_not_share() -> None:
    alike = {"machine": (1.1, 0.9)}
    assert gain_band(timed(1.0, alike, 0.05, 0.02), timed(1.0, alike, 0.05, 0.02)) == pytest.approx((0.0, 0.0))
    # A machine that is a tenth slower is so for both; the exchange of one of them is its own.
    slow, fast = timed(2.0, {"machine": (2.2, 1.8)}, 0.0, 0.0), {"machine": (1.1, 0.9), "exchange": (1.05, 0.95)}
    low, high = gain_band(timed(1.0, fast, 0.0, 0.0), slow)
    assert (low, high) == pytest.approx((2 / 1.05 - 1, 2 / 0.95 - 1))
    # 0.1 s of layers in both, and 0.1 s of remainder in both: from 2 / 1 to 2.1 / 1.1 and 1.9 / 0.9.
    layers = gain_band(timed(1.0, {}, 0.1, 0.0), timed(2.0, {}, 0.1, 0.0))
    assert layers == pytest.approx((2.1 / 1.1 - 1, 1.9 / 0.9 - 1))
    assert gain_band(timed(1.0, {}, 0.0, 0.1), timed(2.0, {}, 0.0, 0.1)) == pytest.approx((2.1 / 1.1 - 1, 1.0))


def test_errors_larger_than_an_iteration_leave_a_gain_finite() -> None:
    # Both lose all of themselves at once: that says nothing about which is faster.
    low, high = gain_band(timed(1.0, {}, 2.5, 0.0), timed(2.0, {}, 2.5, 0.0))
    assert (low, high) == pytest.approx((4.5 / 3.5 - 1, 1.0))
    alone = gain_band(timed(1.0, {"exchange": (9.0, -9.0)}, 0.0, 0.0), timed(2.0, {}, 0.0, 0.0))
    assert alone == pytest.approx((2 / 9 - 1, 2 / 1e-3 - 1))


def test_caps_rise_and_have_no_repeats() -> None:
    assert parse_caps("25,1, 2.5,1") == (1.0, 2.5, 25.0)
    for text in ("", "0", "nan", "-1", "inf"):
        with pytest.raises(UserError, match="--caps"):
            parse_caps(text)
