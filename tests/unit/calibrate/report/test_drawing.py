"""Drawings of a profile's collectives: one PNG each, with what was measured in it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from synthetic_measurements import CollectivesSpec, collective_samples

from calibrate.fitting.collectives.communication_fit import fit_communication
from calibrate.profile.collectives.communication_time import communication_seconds, spread_s
from calibrate.profile.profile import Profile, read_profile
from calibrate.report.drawing import draw_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.collectives.catalog import operations

DATA = Path(__file__).parents[3] / "data"


@pytest.fixture(scope="module")
def profile() -> Profile:
    fits = fit_communication(collective_samples(CollectivesSpec(ranks=(2, 4))), operations()).fits
    return msgspec.structs.replace(read_profile(DATA / "profile-v3.json"), communication=fits)


def test_every_collective_is_drawn_with_its_points(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    paths = draw_profile(profile, tmp_path / "png")
    assert [path.name for path in paths] == ["gloo-all_reduce-node.png", "gloo-broadcast-node.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    above, below = figures[0].axes
    assert "gloo all_reduce, level node" in above.get_title()
    errors = sorted(
        abs(point.held_out_s / point.measured_s - 1)
        for fit in profile.communication
        if fit.operation == "all_reduce"
        for point in fit.measured
    )
    assert above.get_title().endswith(f"in the median, {errors[-1]:.1%} at most")
    assert above.get_xscale() == above.get_yscale() == "log"
    labels = [text.get_text() for text in above.get_legend().get_texts()]
    assert labels == ["2 ranks", "4 ranks", "fit, with 90% interval of the line"]
    drawn = {tuple(xy) for line in above.lines if line.get_label().endswith("ranks") for xy in line.get_xydata()}
    fit = profile.communication[0]
    assert drawn == {(point.message_bytes, point.measured_s) for point in fit.measured}
    residuals = {round(float(y), 6) for line in below.lines[:-1] for y in line.get_ydata()}
    assert {round(100 * (point.held_out_s / point.measured_s - 1), 6) for point in fit.measured} <= residuals


def test_the_spread_is_that_of_parameters_and_drift(profile: Profile) -> None:
    fit = profile.communication[0]
    operation = operations()["all_reduce"]
    seconds = float(communication_seconds(operation, [fit], 2, 4096))
    (aa, ab), (_, bb) = fit.covariance
    variance = 4 * aa + 2 * 2 * 4096 * ab + 4096**2 * bb
    assert spread_s(operation, [fit], 2, 4096) ** 2 == pytest.approx(variance + (seconds * fit.block_relative_sd) ** 2)


def test_what_can_not_be_drawn_is_said(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no measured points"):
        draw_profile(msgspec.structs.replace(profile, communication=()), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot draw into"):
        draw_profile(profile, tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'paradl\[plots\]'"):
        draw_profile(profile, tmp_path)


@pytest.mark.parametrize("library", ["../../evil", "/tmp/paradl-evil", "..", "a/b"])
def test_drawings_stay_in_their_directory(profile: Profile, tmp_path: Path, library: str) -> None:
    renamed = tuple(msgspec.structs.replace(fit, library=library) for fit in profile.communication)
    inside = tmp_path / "a" / "b" / "png"
    paths = draw_profile(msgspec.structs.replace(profile, communication=renamed), inside)
    assert len(paths) == 2
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(paths)
    assert {path.parent for path in paths} == {inside}
