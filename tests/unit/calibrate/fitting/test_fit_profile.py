"""From measurement directories to a profile: what is merged, refused, kept as provenance, and said."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import msgspec
import pytest
from synthetic_measurements import ENVIRONMENT, CollectivesSpec, LayersSpec, network, write_collectives, write_layers

from calibrate.cli import main
from calibrate.fitting.fit import fit_profile
from calibrate.fitting.reading import directory_hash
from calibrate.profile.profile import SCHEMA_VERSION, Profile, read_profile, write_profile
from calibrate.report.diff import compare
from calibrate.report.explanation import model_sums, weaknesses
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.records.measurement import Environment, Manifest, read_manifest, write_manifest

COMMAND = ("calibrate", "fit", "...")
SMALL = CollectivesSpec(operations=("all_reduce",), sizes=(1024, 16384, 262144, 4194304), blocks=3, calls=4)
OTHER = dataclasses.replace(SMALL, operations=("broadcast",))
TOY_AND_WIDE = (network(), network("wide", 32))


def fit(*directories: Path, force: bool = False) -> Profile:
    return fit_profile(directories, command_line=COMMAND, force=force)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Two models at two batches, alone and on two ranks, with collectives beside compute."""
    root = tmp_path_factory.mktemp("measured")
    spec = LayersSpec(networks=TOY_AND_WIDE, batches=(2, 4), blocks=3)
    return fit(
        write_layers(root / "alone", spec),
        write_layers(root / "two", dataclasses.replace(spec, ranks_on_host=2, seed=1)),
        write_collectives(root / "sweep", dataclasses.replace(SMALL, slowdowns=(1.5, 2.0))),
    )


def elsewhere(**changes: object) -> Environment:
    return msgspec.structs.replace(ENVIRONMENT, **changes)


def test_a_profile_holds_what_was_measured(whole: Profile) -> None:
    assert whole.schema_version == SCHEMA_VERSION
    assert sorted(whole.network) == ["toy", "wide"]
    assert {(t.batch, t.ranks_on_host) for t in whole.layer_times} == {(2, 1), (4, 1), (2, 2), (4, 2)}
    assert len(whole.model_times) == 8
    assert {(c.direction, c.ranks_on_host) for c in whole.copies} == {("into", 1), ("out", 1), ("into", 2), ("out", 2)}
    assert [f.operation for f in whole.communication] == ["all_reduce"]
    assert whole.contexts[0].neighbour_factor == pytest.approx(1.5, rel=0.05)
    assert whole.cluster.levels[0].name == "node"
    assert whole.cluster.levels[0].ranks == ENVIRONMENT.device_count
    assert whole.cluster.memory_bytes_per_rank == ENVIRONMENT.memory_bytes / 2
    assert whole.devices[0].peak_flops is not None
    assert whole.notes == ()
    assert [source.kind for source in whole.sources] == ["layers", "layers", "collectives"]


def test_a_profile_survives_writing_and_reading(whole: Profile, tmp_path: Path) -> None:
    write_profile(tmp_path / "one.json", whole)
    assert read_profile(tmp_path / "one.json") == whole
    write_profile(tmp_path / "two.json", read_profile(tmp_path / "one.json"))
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_the_same_measurements_give_the_same_profile(tmp_path: Path) -> None:
    directories = [write_layers(tmp_path / "layers"), write_collectives(tmp_path / "sweep", SMALL)]
    one, other = fit(*directories), fit(*directories)
    assert msgspec.structs.replace(one, created_utc="") == msgspec.structs.replace(other, created_utc="")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hostname": "node2"}, "hostname 'node1' against 'node2'"),
        ({"device_name": "Other CPU"}, "device_name 'Example CPU' against 'Other CPU'"),
        ({"versions": {**ENVIRONMENT.versions, "torch": "2.14.0"}}, "versions.torch '2.13.0' against '2.14.0'"),
        ({"settings": {**ENVIRONMENT.settings, "threads": "2"}}, "settings.threads '1' against '2'"),
    ],
)
def test_unlike_environments_are_refused_unless_forced(tmp_path: Path, change: dict[str, object], named: str) -> None:
    here = write_layers(tmp_path / "here")
    there = write_collectives(tmp_path / "there", SMALL, environment=elsewhere(**change))
    with pytest.raises(UserError, match="different environments") as caught:
        fit(here, there)
    assert named in str(caught.value)
    assert "--force" in str(caught.value)
    merged = fit(here, there, force=True)
    assert named in merged.notes[0]
    assert len(merged.environments) == 2
    assert [source.environment for source in merged.sources] == [0, 1]


def test_environment_unknown_to_a_tool_does_not_make_it_unlike(tmp_path: Path) -> None:
    of_mpi = {
        "versions": {"python": ENVIRONMENT.versions["python"], "mpi": "Open MPI v4.1.4"},
        "settings": {"tool": "imb"},
    }
    layers = write_layers(tmp_path / "layers")
    gloo = write_collectives(tmp_path / "gloo", SMALL)
    mpi = write_collectives(tmp_path / "mpi", OTHER, environment=elsewhere(device_name="unknown", **of_mpi))
    assert fit(layers, gloo, mpi).notes == fit(layers, gloo).notes
    other_python = {**of_mpi, "versions": {"python": "3.12.0", "mpi": "Open MPI v4.1.4"}}
    for index, change in enumerate(
        ({**of_mpi, "hostname": "node2"}, {**of_mpi, "device_name": "Other CPU"}, other_python)
    ):
        there = write_collectives(tmp_path / f"other{index}", OTHER, environment=elsewhere(**change))
        with pytest.raises(UserError, match="different environments"):
            fit(layers, there)
        with pytest.raises(UserError, match="different environments"):
            fit(gloo, there)


def test_environments_may_differ_in_things_that_change_no_kernel(tmp_path: Path) -> None:
    here = write_layers(tmp_path / "here")
    settings = {**ENVIRONMENT.settings, "dtype": "bf16"}
    same = elsewhere(kernel="6.2.0", commit="fedcba", variables={}, settings=settings)
    there = write_layers(tmp_path / "there", LayersSpec(dtype="bf16", seed=1), environment=same)
    assert fit(here, there).notes == ()


def test_an_incomplete_directory_is_used_and_said(tmp_path: Path) -> None:
    profile = fit(write_layers(tmp_path / "layers", complete=False))
    assert not profile.sources[0].complete
    assert "is incomplete" in profile.notes[0]
    assert "paradl-bench layers toy --batch 4 -o layers" in profile.notes[0]
    assert weaknesses(profile)[0].text.endswith("was not finished")


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = write_layers(tmp_path / "layers", complete=False)
    samples = [time.time.samples for time in fit(path).layer_times]
    with open(path / "layers.jsonl", "ab") as stream:
        stream.write(b'{"model":"toy","layer":"co')
    assert [time.time.samples for time in fit(path).layer_times] == samples
    cut = f"{path}/layers.jsonl ends in a partly written row: 1 row of 26 bytes is left out"
    assert cut in fit(path).notes


def test_training_runs_are_never_fitted(tmp_path: Path) -> None:
    path = write_layers(tmp_path / "run")
    write_manifest(path, msgspec.structs.replace(read_manifest(path), kind="training"))
    with pytest.raises(UserError, match="never fitted to the runs that check them"):
        fit(path, force=True)


def test_the_same_measurement_twice_is_refused(tmp_path: Path) -> None:
    path = write_layers(tmp_path / "layers")
    with pytest.raises(UserError, match="hold the same measurement; give it once"):
        fit(path, path)


def test_a_model_measured_at_two_input_shapes_is_refused(tmp_path: Path) -> None:
    larger = msgspec.structs.replace(network(), input_shape=(3, 32, 32))
    paths = [write_layers(tmp_path / "a"), write_layers(tmp_path / "b", LayersSpec(networks=(larger,), seed=1))]
    with pytest.raises(UserError, match="toy was measured with inputs of 3x16x16 and 3x32x32; a profile holds one"):
        fit(*paths)


def test_no_directory_or_an_empty_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no measurement directory given"):
        fit()
    with pytest.raises(UserError, match="does not exist"):
        fit(tmp_path / "absent")
    with pytest.raises(UserError, match=r"holds no manifest\.json"):
        fit(tmp_path)
    few = write_collectives(tmp_path / "few", dataclasses.replace(SMALL, sizes=(1024, 2048)))
    with pytest.raises(UserError, match=r"no measurements that can be fitted .*a fit needs 3"):
        fit(few)


def test_a_broken_record_is_named_by_file_line_and_field(tmp_path: Path) -> None:
    path = write_layers(tmp_path / "layers")
    record = json.loads((path / "layers.jsonl").read_text().splitlines()[0])
    append_lines(path / "layers.jsonl", [record | {"samples_s": [0.1, -0.2]}])
    with pytest.raises(UserError, match=r"layers\.jsonl line 51: .*>= 0\.0 - at `\$\.samples_s\[1\]`"):
        fit(path)


def test_a_network_file_that_is_cut_is_named(tmp_path: Path) -> None:
    path = write_layers(tmp_path / "layers")
    file = path / "network-toy.json"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"network .*network-toy\.json: Input data was truncated"):
        fit(path)


def test_a_model_without_its_network_is_said(tmp_path: Path) -> None:
    path = write_layers(tmp_path / "layers")
    (path / "network-toy.json").unlink()
    assert fit(path).notes == ("toy was measured, but no directory holds its network file",)


def test_the_hash_follows_every_byte_but_not_temporary_files(tmp_path: Path) -> None:
    path = write_layers(tmp_path / "layers")
    before = directory_hash(path)
    (path / ".layers.jsonl.tmp").write_bytes(b"half")
    assert directory_hash(path) == before
    with open(path / "copies.jsonl", "ab") as stream:
        stream.write(b"\n")
    assert directory_hash(path) != before


def test_outer_levels_are_as_large_as_collectives_spanned_them(tmp_path: Path) -> None:
    spec = dataclasses.replace(SMALL, ranks=(2,), seed=1)
    paths = [
        write_collectives(tmp_path / "node", spec),
        write_collectives(tmp_path / "rack", dataclasses.replace(spec, level="rack", ranks=(8,))),
    ]
    levels = fit(*paths).cluster.levels
    assert [(level.name, level.ranks) for level in levels] == [("node", 2), ("rack", 8)]


def test_layers_add_up_in_the_explanation(whole: Profile) -> None:
    sums = {(s.model, s.batch, s.ranks_on_host): s for s in model_sums(whole)}
    one = sums["toy", 4, 1]
    assert (one.layers_measured, one.layers) == (5, 5)
    assert one.fw_layers_s == pytest.approx(5 * 4e-4, rel=0.02)
    assert one.sum_s == pytest.approx(one.iteration_s, rel=0.02)


def test_weaknesses_say_what_is_missing_first(tmp_path: Path) -> None:
    found = weaknesses(fit(write_layers(tmp_path / "layers", LayersSpec(unexplained_s=1e-3))))
    assert [weakness.kind for weakness in found] == sorted(
        (weakness.kind for weakness in found), key=["missing", "inaccurate", "untested"].index
    )
    assert found[0].text == "no collectives were measured, so only serial training can be predicted"
    assert any("of the iteration is not explained by its parts" in weakness.text for weakness in found)
    assert any("only local batch 4 was measured" in weakness.text for weakness in found)


def test_a_profile_misses_only_what_was_never_measured(whole: Profile) -> None:
    missing = [weakness for weakness in weaknesses(whole) if weakness.kind == "missing"]
    assert ["after-compute" in missing[0].command, "groups=2" in missing[1].command] == [True, True]
    assert len(missing) == 2


def test_two_profiles_differ_where_something_moved(tmp_path: Path) -> None:
    sweep = write_collectives(tmp_path / "sweep", SMALL)
    before = fit(write_layers(tmp_path / "a", LayersSpec(drift=0.01)), sweep)
    after = fit(write_layers(tmp_path / "b", LayersSpec(drift=0.01, layer_s=2e-4, seed=1)), sweep)
    same = compare(before, before)
    assert same.moved == ()
    assert same.compared > 10
    moved = compare(before, after)
    assert {m.what.split(" ")[0] for m in moved.moved} >= {"FW", "BW", "iteration"}
    assert not any("all_reduce" in m.what for m in moved.moved)
    assert all(abs(m.relative) > m.interval_relative for m in moved.moved)
    gone = compare(before, fit(sweep))
    assert gone.only_in_first
    assert gone.only_in_second == ()


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["calibrate", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


def test_fit_show_and_diff_at_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = str(write_layers(tmp_path / "layers", LayersSpec(networks=TOY_AND_WIDE)))
    sweep = str(write_collectives(tmp_path / "sweep", dataclasses.replace(SMALL, slowdowns=(1.5, 2.0))))
    profile = str(tmp_path / "profile.json")
    code, out, err = run(capsys, monkeypatch, "fit", layers, sweep, "-o", profile)
    assert (code, out) == (0, "")
    assert "layer times of toy, wide; gloo all_reduce" in err
    assert read_profile(Path(profile)).command_line == ("calibrate", "fit", layers, sweep, "-o", profile)

    code, out, _ = run(capsys, monkeypatch, "show", profile, "--all")
    assert code == 0
    for expected in ("toy", "all_reduce", "ring", "remainder", "with-compute", "Weak points"):
        assert expected in out
    code, out, _ = run(capsys, monkeypatch, "show", profile, "--json")
    assert code == 0
    assert json.loads(out)["communication"][0]["algorithm"] == "ring"

    code, out, _ = run(capsys, monkeypatch, "diff", profile, profile)
    assert code == 0
    assert "0 of " in out
    code, out, _ = run(capsys, monkeypatch, "diff", profile, profile, "--json")
    assert json.loads(out)["moved"] == []


def test_nothing_is_overwritten_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = str(write_layers(tmp_path / "layers"))
    target = tmp_path / "profile.json"
    target.write_text("mine")
    code, _, err = run(capsys, monkeypatch, "fit", layers, "-o", str(target))
    assert code == 2
    assert "exists; give --force" in err
    assert target.read_text() == "mine"
    code, _, _ = run(capsys, monkeypatch, "fit", layers, "-o", str(target), "--force")
    assert code == 0
    read_profile(target)


def test_a_profile_and_json_cannot_share_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capsys, monkeypatch, "fit", str(tmp_path), "-o", "-", "--json")
    assert code == 2
    assert "standard output" in err


def test_what_was_fitted_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = str(write_layers(tmp_path / "layers"))
    target = str(tmp_path / "profile.json")
    code, out, _ = run(capsys, monkeypatch, "fit", layers, "-o", target, "--json")
    assert code == 0
    printed = json.loads(out)
    assert printed["profile"] == target
    assert printed["models"][0]["model"] == "toy"


def test_schemas_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "schema", "manifest")
    assert code == 0
    assert set(json.loads(out)["$defs"]["Manifest"]["properties"]) == set(Manifest.__struct_fields__)
    code, _, err = run(capsys, monkeypatch, "schema", "profil")
    assert code == 2
    assert "did you mean profile" in err
