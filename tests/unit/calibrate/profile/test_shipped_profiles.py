"""Profiles that come with the tool: their files, their names, and what merging one's own measurements makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic_measurements import ENVIRONMENT, CollectivesSpec, write_collectives

from calibrate.fitting.collectives.communication_spread import with_comparable_scaling
from calibrate.fitting.fit import fit_profile
from calibrate.fitting.merging.merge import merge_profiles, with_archives_beside
from calibrate.kernels.files import archive_beside
from calibrate.profile.profile import Dispatch, Profile, read_profile, write_profile
from calibrate.profile.shipped.catalog import profile_file, shipped_profiles
from paradl_bench.core.errors import UserError
from paradl_bench.records.devices.sheet import device_sheet

ROOT = Path(__file__).parents[4]
DATA = ROOT.parent / "shared" / "data"
SHIPPED = shipped_profiles()
H100 = "NVIDIA H100 80GB HBM3"


def test_every_device_of_the_tables_has_a_profile() -> None:
    assert set(SHIPPED) == {"a100-pcie", "a100-sxm", "b200", "gh200", "h100-sxm", "v100"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_is_small_and_says_whose_it_is(name: str) -> None:
    path = SHIPPED[name]
    assert path.stat().st_size + archive_beside(path).stat().st_size < 1_000_000
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["calibrate"]
    package = {found for pattern in told for found in (ROOT / "calibrate").glob(pattern)}
    assert {path, archive_beside(path)} <= package
    profile = read_profile(path)
    assert profile.published
    publications = {each.name: each for each in profile.published.publications}
    assert all(each.source and each.licence and each.holds for each in publications.values())
    assert profile.devices[0].name in device_sheet(profile.published.device).device_names
    named = {str(each.published).partition(", ")[0] for each in (*profile.kernel_models, *profile.communication)}
    assert named == publications.keys() - {"data sheet"}
    assert profile.published.valid
    assert profile.published.lacks
    assert any("iterations" in line for line in profile.published.accuracy)
    # Fitted numbers alone: no measured layer, no training run, nothing of a host.
    assert not any((profile.layer_times, profile.model_times, profile.memory_runs, profile.network))


@pytest.mark.parametrize("name", SHIPPED)
def test_collectives_left_out_do_not_widen_intervals(name: str) -> None:
    """Those whose times follow no form tell nothing of how far scaling over ranks may be off."""
    fits = read_profile(SHIPPED[name]).communication
    assert with_comparable_scaling(fits) == fits


def test_a_file_of_that_name_comes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert profile_file("h100-sxm") == SHIPPED["h100-sxm"]
    Path("h100-sxm").write_bytes(SHIPPED["v100"].read_bytes())
    assert profile_file("h100-sxm") == Path("h100-sxm")
    assert read_profile("h100-sxm").published == read_profile(SHIPPED["v100"]).published


def test_a_path_that_is_not_there_is_no_name() -> None:
    with pytest.raises(UserError, match=r"h100-sxm\.json"):
        read_profile("h100-sxm.json")
    with pytest.raises(UserError, match=r"unknown file or shipped profile 'h100'.* a100-pcie, a100-sxm, b200"):
        read_profile("h100")


def own_sweep(folder: Path, device_name: str) -> Profile:
    environment = msgspec.structs.replace(ENVIRONMENT, device="cuda", device_name=device_name, hostname="node7")
    spec = CollectivesSpec(library="nccl", operations=("all_reduce",))
    return fit_profile(
        [write_collectives(folder, spec, environment=environment)], command_line=("calibrate", "fit"), force=False
    )


def test_own_measurements_take_the_place_of_published_ones(tmp_path: Path) -> None:
    shipped, own = read_profile("h100-sxm"), own_sweep(tmp_path / "own", H100)
    for profiles, names in (((shipped, own), ["h100-sxm", "own"]), ((own, shipped), ["own", "h100-sxm"])):
        merged = merge_profiles(profiles, names, command_line=("calibrate", "merge"), force=False)
        replaced = [fit for fit in merged.communication if fit.key in {each.key for each in own.communication}]
        assert tuple(replaced) == own.communication
        kept = [fit for fit in merged.communication if fit not in replaced]
        assert kept
        assert all(fit.published for fit in kept)
        assert len(merged.kernel_models) == len(shipped.kernel_models)
        assert any("replaced by your own measurements" in note for note in merged.notes)
        assert merged.published == shipped.published
        merged = with_archives_beside(merged, str(tmp_path / "merged.json"))
        write_profile(tmp_path / "merged.json", merged)
        assert read_profile(tmp_path / "merged.json") == merged


def test_own_products_alone_leave_the_data_sheet_s_roofline(tmp_path: Path) -> None:
    """A table of products reaches a peak and no bandwidth: other layers' rooflines are the sheet's then, as before."""
    shipped, own = read_profile("h100-sxm"), own_sweep(tmp_path / "own", H100)
    dispatch = Dispatch(forward_s=2e-5, backward_s=4e-5, relative_sd=0.1, timed=True)
    device = msgspec.structs.replace(
        own.devices[0], memory_bytes=0, peak_flops=5e13, rates_from="reached by kernels", dispatch=dispatch
    )
    cluster = msgspec.structs.replace(own.cluster, memory_bytes_per_rank=None)
    own = msgspec.structs.replace(own, devices=(device,), cluster=cluster)
    merged = merge_profiles((shipped, own), ["h100-sxm", "own"], command_line=(), force=False)
    sheet = shipped.devices[0]
    assert merged.devices == (msgspec.structs.replace(sheet, dispatch=dispatch, devices_per_host=2),)
    assert merged.cluster.memory_bytes_per_rank == sheet.memory_bytes
    whole = msgspec.structs.replace(device, memory_bandwidth_bytes_per_s=2e12)
    own = msgspec.structs.replace(own, devices=(whole,))
    (kept,) = merge_profiles((shipped, own), ["h100-sxm", "own"], command_line=(), force=False).devices
    assert kept == msgspec.structs.replace(whole, memory_bytes=sheet.memory_bytes)


def test_published_profiles_take_their_own_device_alone(tmp_path: Path) -> None:
    shipped, other = read_profile("h100-sxm"), own_sweep(tmp_path / "own", "NVIDIA L4")
    with pytest.raises(UserError, match="h100-sxm is of NVIDIA H100 80GB HBM3, and own was measured on NVIDIA L4"):
        merge_profiles((shipped, other), ["h100-sxm", "own"], command_line=(), force=False)
    with pytest.raises(UserError, match="h100-sxm and v100 both hold published measurements"):
        merge_profiles((shipped, read_profile("v100")), ["h100-sxm", "v100"], command_line=(), force=False)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the published measurements lie beside the repository")
def test_the_command_makes_the_same_profile_again(tmp_path: Path) -> None:
    """Its regressors to the byte; its fits but for their last digits, which another CPU rounds otherwise."""
    script = ROOT / "benchmarks" / "published" / "shipped_profiles.py"
    command = [sys.executable, str(script), "v100", "--data", str(DATA), "-o", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    made, shipped = tmp_path / "v100.json", SHIPPED["v100"]
    assert archive_beside(made).read_bytes() == archive_beside(shipped).read_bytes()
    (words, numbers), (shipped_words, shipped_numbers) = map(words_and_numbers, (made, shipped))
    assert words == shipped_words
    assert numbers == pytest.approx(shipped_numbers, rel=1e-9, abs=0)


def words_and_numbers(path: Path) -> tuple[Any, list[float]]:
    """A file of JSON with its fractions taken out of it, and these in their order."""
    numbers: list[float] = []

    def taken_out(text: str) -> str:
        numbers.append(float(text))
        return "a fraction"

    return json.loads(path.read_text(), parse_float=taken_out), numbers
