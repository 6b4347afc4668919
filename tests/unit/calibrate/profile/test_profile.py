"""Reading a profile: every broken one is a user's mistake in one line, older ones are brought to the newest version."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.profile import profile as profile_module
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_time import communication_seconds, pieces_of
from calibrate.profile.profile import read_profile, write_profile
from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.ranks.directories import directory
from paradl_bench.records import measurement
from paradl_bench.records.measurement import read_manifest, read_records, stored_version
from paradl_bench.records.samples import CopySamples

DATA = Path(__file__).parents[3] / "data"
NEWEST = DATA / f"profile-v{profile_module.SCHEMA_VERSION}.json"
CONTENT = NEWEST.read_bytes()
DOCUMENT = json.loads(CONTENT)


def leaves(value: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return [where]
    return [leaf for key, part in items for leaf in leaves(part, (*where, key))]


LEAVES = leaves(DOCUMENT)


def changed(where: tuple[Any, ...], value: Any) -> Any:
    document = copy.deepcopy(DOCUMENT)
    holder = document
    for key in where[:-1]:
        holder = holder[key]
    holder[where[-1]] = value
    return document


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@given(st.integers(0, len(CONTENT) - 3))
def test_a_profile_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.json"
    path.write_bytes(CONTENT[:cut])
    assert "truncated" in refused(path)


@given(st.integers(0, len(CONTENT) - 1), st.integers(0, 255), st.integers(0, 40))
def test_changed_bytes_raise_nothing_but_user_errors(
    tmp_path_factory: pytest.TempPathFactory, start: int, byte: int, count: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.json"
    path.write_bytes(CONTENT[:start] + bytes([byte]) * count + CONTENT[start + 1 :])
    with contextlib.suppress(UserError):
        read_profile(path)


@given(
    st.sampled_from(LEAVES),
    st.sampled_from([math.nan, math.inf, -1.0, -1, None, "x", [], {}, 10**400, True, 1e308, 0]),
)
def test_a_wrong_value_anywhere_raises_nothing_but_user_errors(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[Any, ...], value: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "wrong.json"
    path.write_text(json.dumps(changed(where, value)))
    with contextlib.suppress(UserError):
        read_profile(path)


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        (("layer_times", 3, "time", "median_s"), math.nan, "$.layer_times[3].time.median_s is NaN"),
        (("communication", 0, "alpha_s"), math.inf, "$.communication[0].alpha_s is Infinity"),
        (
            ("layer_times", 3, "time", "median_s"),
            -0.25,
            "Expected `float` >= 0.0 - at `$.layer_times[3].time.median_s`",
        ),
        (("communication", 0, "beta_s_per_byte"), -1e-9, "- at `$.communication[0].beta_s_per_byte`"),
        (("communication", 0, "alpha_s"), 1e300, "<= 1000000000.0 - at `$.communication[0].alpha_s`"),
        (("communication", 0, "covariance"), [[1.0, 0.5], [0.0, 1.0]], "no covariance"),
        (("communication", 0, "covariance"), [[1.0, 2.0], [2.0, 1.0]], "no covariance"),
        (("communication", 0, "bytes_range"), [8, 4], "bytes_range has to rise, not go from 8 to 4"),
        (("layer_times", 0, "batch"), 0, "Expected `int` >= 1 - at `$.layer_times[0].batch`"),
        (("layer_times", 0, "ranks_on_host"), 1 << 62, "- at `$.layer_times[0].ranks_on_host`"),
        (("layer_times", 0, "time", "typical_s"), 1e-300, "at least 1e-15"),
        (("layer_times", 1), DOCUMENT["layer_times"][0], "layer_times[1] is almost the same as layer_times[0]"),
        (("model_times", 0, "remainder_interval"), [0.5, 0.1], "remainder_interval has to rise"),
        (("model_times", 0, "iteration_relative_quantiles"), [1.0, 0.9], "do not fall - at `$.model_times[0]`"),
        (("model_times", 0, "iteration", "typical_s"), 0, "iteration.typical_s is 0"),
        (("layer_times", 0, "batch"), "four", "Expected `int`, got `str` - at `$.layer_times[0].batch`"),
        (("layer_times", 0, "phase"), "forward", "at `$.layer_times[0].phase`"),
        (("model_times", 0, "iteration_relative_quantiles"), [1.0], "at `$.model_times[0]`"),
        (("contexts", 0, "factor"), 0.5, ">= 1.0 - at `$.contexts[0].factor`"),
        (("sources", 0, "environment"), 7, "names environment 7, which the profile does not hold"),
        (("cluster", "levels"), [], "has no levels - at `$.cluster`"),
        (("sources", 0, "colour"), "blue", "unknown field `colour` - at `$.sources[0]`"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(tmp_path: Path, where: tuple[Any, ...], value: Any, expected: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(changed(where, value)))
    assert expected in refused(path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    document = copy.deepcopy(DOCUMENT)
    del document["communication"][0]["alpha_s"]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    assert "missing required field `alpha_s` - at `$.communication[0]`" in refused(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "no valid JSON"),
        (b"[1, 2]", "has no schema_version"),
        (b'"profile"', "has no schema_version"),
        (b"{}", "has no schema_version"),
        (b'{"schema_version": "1"}', "has no schema_version"),
        (b'{"schema_version": true}', "has no schema_version"),
        (b'{"schema_version": 99}', "schema_version 99; this program reads 1 to"),
        (b'{"schema_version": 0}', "schema_version 0"),
        (b"\xff\xfe", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    assert expected in refused(path)


def test_a_missing_profile_or_a_folder_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "absent.json")
    assert "it is a folder" in refused(tmp_path)


def test_a_measurement_is_not_taken_for_a_profile() -> None:
    assert "but the manifest of a measurement: give its directory to calibrate fit" in refused(
        DATA / "layers-v1" / "manifest.json"
    )


def test_an_older_profile_is_migrated_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two more versions existed: one renamed notes from remarks, the next has alphas in seconds, not in ms."""
    newest = profile_module.SCHEMA_VERSION

    def notes_from_remarks(document: dict[str, Any]) -> dict[str, Any]:
        return {**{k: v for k, v in document.items() if k != "remarks"}, "notes": document["remarks"]}

    def alphas_in_seconds(document: dict[str, Any]) -> dict[str, Any]:
        fits = [{**fit, "alpha_s": fit["alpha_s"] / 1000} for fit in document["communication"]]
        return {**document, "communication": fits}

    monkeypatch.setattr(profile_module, "SCHEMA_VERSION", newest + 2)
    migrations = {newest: notes_from_remarks, newest + 1: alphas_in_seconds}
    monkeypatch.setattr(profile_module, "MIGRATIONS", migrations)
    old = {**copy.deepcopy(DOCUMENT), "remarks": ["kept"]}
    del old["notes"]
    for fit in old["communication"]:
        fit["alpha_s"] *= 1000
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(old))
    profile = read_profile(path)
    assert profile.schema_version == newest + 2
    assert profile.notes == ("kept",)
    assert profile.communication[0].alpha_s == pytest.approx(DOCUMENT["communication"][0]["alpha_s"])

    del old["remarks"]
    path.write_text(json.dumps(old))
    assert f"not a valid document of version {newest} (KeyError('remarks'))" in refused(path)


def test_an_older_measurement_is_migrated_record_by_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if version 2 had renamed a field of the copies and one of the manifest."""

    def manifest_of_1(document: dict[str, Any]) -> dict[str, Any]:
        return {**{k: v for k, v in document.items() if k != "command"}, "command_line": document["command"]}

    def record_of_1(name: str, record: dict[str, Any]) -> dict[str, Any]:
        if name != "copies.jsonl":
            return record
        return {**{k: v for k, v in record.items() if k != "size"}, "bytes": record["size"]}

    source = DATA / "layers-v1"
    old = json.loads((source / "manifest.json").read_text())
    old["command"] = old.pop("command_line")
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    copies = [json.loads(line) for line in (source / "copies.jsonl").read_text().splitlines()]
    lines = [{**{k: v for k, v in record.items() if k != "bytes"}, "size": record["bytes"]} for record in copies]
    (tmp_path / "copies.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(measurement, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(measurement, "MIGRATIONS", {1: manifest_of_1})
    monkeypatch.setattr(measurement, "RECORD_MIGRATIONS", {1: record_of_1})
    assert read_manifest(tmp_path).command_line == tuple(old["command"])
    assert stored_version(tmp_path) == 1
    assert read_records(tmp_path, "copies.jsonl", CopySamples)[0].bytes == copies[0]["bytes"]

    (tmp_path / "copies.jsonl").write_text(json.dumps({"model": "toy"}) + "\n")
    with pytest.raises(UserError, match=r"copies\.jsonl line 1, of version 1: 'size'"):
        read_records(tmp_path, "copies.jsonl", CopySamples)


def test_a_measurement_of_an_older_version_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(DATA / "layers-v1")
    measurement.write_manifest(tmp_path, manifest)
    monkeypatch.setattr(measurement, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(directory, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(measurement, "MIGRATIONS", {1: lambda document: document})
    with pytest.raises(UserError, match="was written in format 1, and this program writes format 2"):
        directory.MeasurementDirectory.open(
            tmp_path,
            kind=manifest.kind,
            arguments=manifest.arguments,
            command_line=manifest.command_line,
            environment=manifest.environment,
        )


def test_nothing_is_written_that_could_not_be_read_again(tmp_path: Path) -> None:
    profile = read_profile(NEWEST)
    wrong = msgspec.structs.replace(profile.layer_times[0], block_relative_sd=-1.0)
    with pytest.raises(WorkError, match=r"layer_times\[0\]\.block_relative_sd"):
        write_profile(tmp_path / "p.json", msgspec.structs.replace(profile, layer_times=(wrong,)))
    assert not list(tmp_path.iterdir())


def test_all_times_of_0_are_refused(tmp_path: Path) -> None:
    document = copy.deepcopy(DOCUMENT)
    for entry in document["layer_times"]:
        entry["time"]["typical_s"] = 0.0
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    assert "every time in layer_times is 0" in refused(path)


def fit_of(low: int, high: int, alpha_s: float, beta_s_per_byte: float, algorithm: str = "ring") -> CommunicationFit:
    return CommunicationFit(
        library="gloo",
        operation="all_reduce",
        algorithm=algorithm,
        level="node",
        regime="",
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
        gamma_s_per_byte=0.0,
        covariance=((0.0, 0.0), (0.0, 0.0)),
        bytes_range=(low, high),
        ranks_range=(2, 2),
        residual_relative_median=0.0,
        held_out_relative_error=0.0,
        block_relative_sd=0.0,
        points=3,
    )


def test_regimes_are_chosen_by_size_and_joined_linearly() -> None:
    operation = operations()["all_reduce"]
    fits = [fit_of(4096, 8192, 3e-5, 2e-9), fit_of(1024, 2048, 1e-5, 1e-9)]
    small, large = 2e-5 + 1e-9 * 2048, 6e-5 + 2e-9 * 4096
    found = communication_seconds(operation, fits, 2, [0, 1024, 2048, 3072, 4096, 8192, 1 << 20])
    expected = [
        0.0,
        2e-5 + 1e-9 * 1024,
        small,
        (small + large) / 2,
        large,
        6e-5 + 2e-9 * 8192,
        6e-5 + 2e-9 * (1 << 20),
    ]
    assert found == pytest.approx(expected)


def test_pieces_know_their_own_algorithm() -> None:
    operation = operations()["all_reduce"]
    pieces = pieces_of(operation, [fit_of(4096, 8192, 1e-5, 1e-9), fit_of(1, 2048, 1e-5, 1e-9, "tree")])
    assert [piece.algorithm.name for piece in pieces] == ["tree", "ring"]
    with pytest.raises(UserError, match="unknown algorithm of all_reduce 'rnig': did you mean ring"):
        pieces_of(operation, [fit_of(1, 2, 1e-5, 1e-9, "rnig")])
