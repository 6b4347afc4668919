"""Profiles from Python: fit, merge and diff as the commands do, tables as frames."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from synthetic_measurements import CollectivesSpec, LayersSpec, write_collectives, write_layers

import calibrate
from calibrate.api import CalibratedProfile
from calibrate.cli import group
from paradl_bench.core.errors import UserError

DATA = Path(__file__).parents[3] / "data"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("measured")
    layers, collectives = place / "layers", place / "collectives"
    write_layers(layers, LayersSpec())
    write_collectives(collectives, CollectivesSpec())
    return layers, collectives


def numbers(path: Path) -> object:
    """All of a profile but when and how it was made."""
    held = json.loads(path.read_text())
    return {name: value for name, value in held.items() if name not in ("created_utc", "command_line")}


def test_a_fit_is_that_of_the_command(measured: tuple[Path, Path], tmp_path: Path) -> None:
    found = calibrate.fit(measured, tmp_path / "python.json")
    words = ["fit", *map(str, measured), "-o", str(tmp_path / "command.json")]
    assert CliRunner().invoke(group, words, standalone_mode=False).exception is None
    assert numbers(found.path) == numbers(tmp_path / "command.json")
    assert found.profile.command_line[:2] == ("calibrate", "fit")
    with pytest.raises(UserError, match="exists"):
        calibrate.fit(measured, tmp_path / "python.json")
    again = calibrate.fit(measured[0], tmp_path / "python.json", force=True)
    assert "communication" not in again.tables


def test_a_merge_is_that_of_the_command(measured: tuple[Path, Path], tmp_path: Path) -> None:
    parts = [calibrate.fit(path, tmp_path / f"{path.name}.json").path for path in measured]
    found = calibrate.merge(parts, tmp_path / "python.json")
    words = ["merge", *map(str, parts), "-o", str(tmp_path / "command.json")]
    assert CliRunner().invoke(group, words, standalone_mode=False).exception is None
    assert numbers(found.path) == numbers(tmp_path / "command.json")
    with pytest.raises(UserError, match="at least two"):
        calibrate.merge(parts[:1], tmp_path / "one.json")


def test_a_difference_is_that_of_the_command(measured: tuple[Path, Path], tmp_path: Path) -> None:
    first = calibrate.fit(measured, tmp_path / "first.json")
    faster = msgspec.structs.replace
    fits = tuple(faster(fit, alpha_s=2 * fit.alpha_s) for fit in first.profile.communication)
    second = tmp_path / "second.json"
    second.write_bytes(msgspec.json.encode(faster(first.profile, communication=fits)))
    found = calibrate.diff(first.path, second)
    told = json.loads(CliRunner().invoke(group, ["diff", str(first.path), str(second), "--json"]).output)
    assert json.loads(msgspec.json.encode(found.difference)) == told
    frame = found.to_frame()
    assert frame["relative"].to_list() == [row["relative"] for row in told["moved"]]
    assert frame["relative"].max() > 0.9
    with pytest.raises(UserError, match="unknown order 'size'"):
        calibrate.diff(first.path, second, order="size")  # type: ignore[arg-type]


@pytest.mark.parametrize("version", range(1, 7))
def test_every_table_of_a_profile_is_a_frame(version: int) -> None:
    profile = CalibratedProfile(DATA / f"profile-v{version}.json")
    assert profile.tables["communication"]
    frames = {name: profile.to_frame(name) for name in profile._TABLES}
    assert {name: len(frame) for name, frame in frames.items() if len(frame)} == profile.tables
    times = profile.profile.layer_times
    assert frames["layer_times"]["time_median_s"].to_list() == [entry.time.median_s for entry in times]
    fits = profile.profile.communication
    assert frames["communication"]["bytes_range_high"].to_list() == [fit.bytes_range[1] for fit in fits]
    assert set(profile._columns) <= set(frames["communication"].columns)


def test_fits_of_collectives_are_plain_columns(measured: tuple[Path, Path], tmp_path: Path) -> None:
    found = calibrate.fit(measured, tmp_path / "profile.json")
    frame, fits = found.to_frame("communication"), found.profile.communication
    assert [name for name, dtype in frame.dtypes.items() if dtype == "object"] == []
    assert not {"measured", "outliers", "covariance"} & set(frame.columns)
    assert frame["covariance_01"].to_list() == [fit.covariance[0][1] for fit in fits]
    assert (frame["covariance_11"] ** 0.5).to_list() == [fit.covariance[1][1] ** 0.5 for fit in fits]
    assert frame["inner_covariance_00"].isna().all()


def test_fits_are_drawn_one_below_the_other(measured: tuple[Path, Path], tmp_path: Path) -> None:
    found = calibrate.fit(measured, tmp_path / "profile.json")
    figure = found.plot()
    assert len(figure.subfigs) == len({fit.key for fit in found.profile.communication})
    assert all(axes.has_data() for axes in figure.get_axes())


def test_unknown_tables_and_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown table of a profile 'layers'"):
        CalibratedProfile(DATA / "profile-v6.json").to_frame("layers")
    with pytest.raises(UserError, match="no/such"):
        calibrate.diff("no/such", "no/other")
    with pytest.raises(UserError, match="no/such"):
        calibrate.fit("no/such", tmp_path / "profile.json")
