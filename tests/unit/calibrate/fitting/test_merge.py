"""Profiles put together: all of both, where it is from, and nothing that both hold."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from synthetic_measurements import ENVIRONMENT, CollectivesSpec, LayersSpec, network, write_collectives, write_layers

from calibrate.cli import group
from calibrate.fitting.fit import fit_profile
from calibrate.fitting.merging.merge import merge_profiles
from calibrate.profile.profile import SCHEMA_VERSION, Profile, encode_profile, read_profile, write_profile
from calibrate.report.diff import compare
from paradl_bench.core.errors import UserError


def fitted(*directories: Path) -> Profile:
    return fit_profile(directories, command_line=("test",), force=False)


def merged(*profiles: Profile, force: bool = False) -> Profile:
    names = [f"{index}.json" for index in range(len(profiles))]
    return merge_profiles(profiles, names, command_line=("test",), force=force)


def test_two_partial_profiles_are_as_one_fit_of_both(tmp_path: Path) -> None:
    layers = write_layers(tmp_path / "layers")
    sweep = write_collectives(tmp_path / "sweep", CollectivesSpec(operations=("all_reduce",)))
    whole, found = fitted(layers, sweep), merged(fitted(layers), fitted(sweep))
    assert {source.path for source in found.sources} == {str(layers), str(sweep)}
    for source in found.sources:
        (same,) = [each for each in whole.sources if each.sha256 == source.sha256]
        assert found.environments[source.environment] == whole.environments[same.environment]
    difference = compare(whole, found)
    assert difference.compared > 10
    assert (difference.moved, difference.only_in_first, difference.only_in_second) == ((), (), ())
    assert found.communication_choices == whole.communication_choices
    assert {level.name for level in found.cluster.levels} == {level.name for level in whole.cluster.levels}
    path = tmp_path / "merged.json"
    write_profile(path, found)
    assert read_profile(path) == found


def test_merge_takes_an_operation_from_the_profile_with_more_samples(tmp_path: Path) -> None:
    wide = network("other")
    first = fitted(write_layers(tmp_path / "a", LayersSpec(blocks=3)))
    second = fitted(write_layers(tmp_path / "b", LayersSpec(networks=(wide,), blocks=6, seed=1)))
    found = merged(first, second)
    assert found.copies == first.copies
    assert any(
        "copies of into 1 rank on the host: 0.json and 1.json differ; taken from 0.json" in note for note in found.notes
    )
    assert {time.model for time in found.model_times} == {"toy", "other"}
    assert set(found.layer_times) == set(second.layer_times)


@pytest.mark.parametrize("what", ["model", "fit", "network", "environment"])
def test_what_both_hold_or_is_unlike_is_refused(tmp_path: Path, what: str) -> None:
    one = fitted(write_layers(tmp_path / "a")) if what != "fit" else fitted(write_collectives(tmp_path / "a"))
    if what == "fit":
        other = fitted(write_collectives(tmp_path / "b", CollectivesSpec(seed=1)))
        message = (
            "both hold communication of gloo all_reduce node, with different numbers: fit their directories together"
        )
    elif what == "network":
        other = fitted(write_layers(tmp_path / "b", LayersSpec(networks=(network(width=16),))))
        message = "different networks of toy"
    elif what == "environment":
        elsewhere = msgspec.structs.replace(ENVIRONMENT, hostname="node2")
        other = fitted(write_collectives(tmp_path / "b", environment=elsewhere))
        message = "different environments .hostname 'node1' against 'node2'.; give --force"
    else:
        other = fitted(write_layers(tmp_path / "b", LayersSpec(seed=1)))
        message = "both hold model times of toy 4 fp32 sgd 1"
    with pytest.raises(UserError, match=message):
        merged(one, other)
    if what == "network":
        return
    found = merged(one, other, force=True)
    assert any("because of --force" in note for note in found.notes)
    assert len(found.sources) == 2
    if what == "fit":
        assert found.communication == one.communication
    if what == "environment":
        assert {found.environments[source.environment].hostname for source in found.sources} == {"node1", "node2"}


def test_the_command_writes_a_profile_that_is_read(tmp_path: Path) -> None:
    write_profile(tmp_path / "a.json", fitted(write_layers(tmp_path / "layers")))
    write_profile(tmp_path / "b.json", fitted(write_collectives(tmp_path / "sweep")))
    names = [str(tmp_path / name) for name in ("a.json", "b.json")]
    result = CliRunner().invoke(group, ["merge", *names, "-o", str(tmp_path / "c.json")])
    assert result.exit_code == 0, result.output
    profile = read_profile(tmp_path / "c.json")
    assert profile.layer_times
    assert profile.communication
    with pytest.raises(UserError, match="at least two profiles"):
        group.main(["merge", names[0], "-o", str(tmp_path / "d.json")], standalone_mode=False)


def test_what_two_profiles_have_of_one_measurement_is_kept_once(tmp_path: Path) -> None:
    layers, sweep = write_layers(tmp_path / "layers"), write_collectives(tmp_path / "sweep")
    one, other = fitted(layers), fitted(layers, sweep)
    found = merged(one, other, one)
    assert {source.sha256 for source in found.sources} == {source.sha256 for source in other.sources}
    assert len(found.sources) == 2
    assert (found.layer_times, found.communication) == (one.layer_times, other.communication)
    assert not any("because of --force" in note for note in found.notes)


def test_profiles_of_every_version_are_merged_with_the_newest(tmp_path: Path) -> None:
    data = Path(__file__).parents[3] / "data"
    sweep = fitted(write_collectives(tmp_path / "sweep"))
    for version in range(1, SCHEMA_VERSION + 1):
        old = msgspec.structs.replace(read_profile(data / f"profile-v{version}.json"), communication=())
        found = merge_profiles([old, sweep], ["old", "new"], command_line=(), force=True)
        assert found.schema_version == SCHEMA_VERSION
        assert found.communication == sweep.communication
        assert found.layer_times == old.layer_times
        path = tmp_path / f"{version}.json"
        write_profile(path, found)
        assert encode_profile(read_profile(path)) == encode_profile(found)
