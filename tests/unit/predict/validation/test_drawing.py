"""Runs drawn beside their predictions: what each bar holds, and what is refused."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner
from predicted_runs import PROFILE, run_like, validate

from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal import pictures
from paradl_bench.core.terminal.pictures import refuse_undrawable
from predict.cli import group
from predict.validation.shown.drawing import REST, Bars, bars_of, draw_bars
from predict.validation.shown.report import csv_row
from predict.validation.validation_report import Report, pairs_of


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(path, PROFILE)
    return path


@pytest.fixture(scope="module")
def report(profile: Path) -> Report:
    folder = profile.parent
    factors = {"one": 1.0, "two": 1.1, "three": 1.5}
    runs = [run_like(folder / name, "d2", 8, factor=factor) for name, factor in factors.items()]
    return validate(profile, [*runs, run_like(folder / "serial", "serial", 8)])


def rows_of(report: Report) -> list[dict[str, object]]:
    return [csv_row(pair) for pair in pairs_of(report.pairs, "simulate")]


def test_a_bar_is_the_median_of_its_runs(report: Report) -> None:
    pairs = [pair for pair in pairs_of(report.pairs, "simulate") if pair.strategy == "d2"]
    (bars,) = [bars for bars in bars_of(rows_of(report)) if bars.configuration.startswith("d2")]
    assert bars.measured.iteration_s == statistics.median(pair.measured_median_s for pair in pairs)
    assert bars.measured.parts_s["BW"] == statistics.median(pair.phases["BW"].measured_s for pair in pairs)
    assert bars.predicted.spread_s == pairs[0].interval_s
    assert bars.accuracy == pytest.approx(1 - 0.1 / 1.1, abs=1e-6)
    assert len(bars_of(rows_of(report))) == 2


def test_parts_of_a_bar_add_up_to_the_iteration(report: Report) -> None:
    for bars in bars_of(rows_of(report)):
        for side in (bars.predicted, bars.measured):
            assert REST in side.parts_s
            assert sum(side.parts_s.values()) == pytest.approx(side.iteration_s, rel=1e-9)


def test_every_part_and_spread_is_drawn_to_scale(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("predict.validation.shown.drawing.write_figure", lambda figure, *_, **__: drawn.append(figure))
    bars = bars_of(rows_of(report))
    draw_bars(bars, "unused.png", force=False)
    axes = drawn[0].axes[0]
    tops = {}
    for patch in axes.patches:
        tops[round(patch.get_x(), 3)] = patch.get_y() + patch.get_height()
    expected = sorted(side.iteration_s for one in bars for side in (one.predicted, one.measured))
    assert sorted(tops.values()) == pytest.approx(expected)
    assert sorted(line.get_ydata()[1] for line in axes.lines) == pytest.approx(
        sorted(side.spread_s[1] for one in bars for side in (one.predicted, one.measured))
    )


def test_memory_is_drawn_of_runs_that_tracked_it(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("predict.validation.shown.drawing.write_figure", lambda figure, *_, **__: drawn.append(figure))
    without = bars_of(rows_of(report))
    side = without[0].measured
    held = type(side)(iteration_s=1.0, parts_s={"FW": 1.0}, spread_s=(0.9, 1.1), peak_bytes=2.0**31)
    one = Bars(model=without[0].model, configuration="d2", predicted=held, measured=held)
    draw_bars([one, *(bars for bars in without if bars.measured.peak_bytes is None)], "unused.png", force=False)
    above, below = (axes for axes in drawn[0].axes if axes.get_visible())
    assert "memory" in below.get_ylabel()
    assert [patch.get_height() for patch in below.patches] == [2.0, 2.0]
    assert len(above.patches) > 2


@pytest.mark.parametrize("suffix", pictures.DRAWN)
def test_validate_draws_what_its_file_is_called(suffix: str, profile: Path, report: Report, tmp_path: Path) -> None:
    run = run_like(tmp_path / "run", "d2", 8)
    picture = tmp_path / f"runs{suffix}"
    arguments = [
        "validate",
        "--from-profile",
        str(profile),
        str(run),
        "-o",
        str(tmp_path / "r"),
        "--plot",
        str(picture),
    ]
    assert CliRunner().invoke(group, arguments, catch_exceptions=False).exit_code == 0
    content = picture.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>"}[suffix])
    with pytest.raises(UserError, match="exists"):
        CliRunner().invoke(group, [*arguments[:5], str(tmp_path / "s"), *arguments[6:]], catch_exceptions=False)
    assert not (tmp_path / "s").exists()


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has to end in \.png, \.svg, \.html"):
        refuse_undrawable(str(tmp_path / "runs.pdf"))
    with pytest.raises(UserError, match="both write to"):
        refuse_undrawable(str(tmp_path / "runs.png"), str(tmp_path / "runs.png"))
