"""Formats stay readable: each version that was ever written loads, and what is written does not drift."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from calibrate.fitting.fit import fit_profile
from calibrate.profile import profile as profile_module
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.profile import Profile, encode_profile, read_profile
from calibrate.profile.schema import FORMATS, schema_of
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records import measurement
from paradl_bench.records.measurement import read_manifest, read_records
from paradl_bench.records.training.training_record import RUN_NAME, TRAINING_FILE, TrainingIterations, TrainingRun

DATA = Path(__file__).parents[2] / "data"
PROFILE_VERSIONS = range(1, profile_module.SCHEMA_VERSION + 1)
MEASUREMENT_VERSIONS = range(1, measurement.SCHEMA_VERSION + 1)


@pytest.mark.parametrize("version", PROFILE_VERSIONS)
def test_a_profile_of_every_version_loads(version: int) -> None:
    profile = read_profile(DATA / f"profile-v{version}.json")
    assert profile.schema_version == profile_module.SCHEMA_VERSION
    for part in ("network", "layer_times", "model_times", "copies", "communication", "contexts", "sources"):
        assert getattr(profile, part), f"{part} is empty: the test case has to hold some of everything"


def test_writing_the_newest_version_gives_the_same_bytes() -> None:
    path = DATA / f"profile-v{profile_module.SCHEMA_VERSION}.json"
    assert encode_profile(read_profile(path)) == path.read_bytes()


@pytest.mark.parametrize("version", MEASUREMENT_VERSIONS)
def test_measurements_of_every_version_are_read_and_fitted(version: int) -> None:
    directories = [DATA / f"{kind}-v{version}" for kind in ("layers", "collectives")]
    profile = fit_profile(directories, command_line=("calibrate", "fit"), force=False)
    assert profile.layer_times
    assert profile.model_times
    assert profile.copies
    assert profile.communication[0].operation == "all_reduce"
    assert profile.contexts
    assert profile.notes == ()


@pytest.mark.parametrize("version", MEASUREMENT_VERSIONS)
def test_training_runs_of_every_version_are_read(version: int) -> None:
    directory = DATA / f"training-v{version}"
    assert read_manifest(directory).kind == "training"
    assert len(read_records(directory, TRAINING_FILE, TrainingIterations)) == 2
    run = msgspec.json.decode((directory / RUN_NAME).read_bytes(), type=TrainingRun)
    assert run.issued == run.planned


def test_every_older_version_has_its_migration() -> None:
    assert set(profile_module.MIGRATIONS) == set(PROFILE_VERSIONS) - {profile_module.SCHEMA_VERSION}
    older = set(MEASUREMENT_VERSIONS) - {measurement.SCHEMA_VERSION}
    assert set(measurement.MIGRATIONS) == older
    assert set(measurement.RECORD_MIGRATIONS) == older


def test_fits_of_the_test_case_name_algorithms_that_there_are() -> None:
    for fit in read_profile(DATA / "profile-v1.json").communication:
        assert fit.algorithm in operations()[fit.operation].algorithms


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_schema_describes_every_field(name: str) -> None:
    schema = schema_of(name)
    assert json.dumps(schema)
    described = schema["$defs"][FORMATS[name].__name__]
    assert set(described["properties"]) == set(FORMATS[name].__struct_fields__)
    assert described["additionalProperties"] is False


def test_a_profile_refers_to_the_schemas_of_its_parts() -> None:
    schema = schema_of("profile")
    assert {Profile.__name__, CommunicationFit.__name__, "ModelGraph", "Cluster", "Summary"} <= set(schema["$defs"])


def test_version_1_takes_medians_for_typical_times() -> None:
    raw = json.loads((DATA / "profile-v1.json").read_text())
    assert "typical_s" not in raw["layer_times"][0]["time"]
    profile = read_profile(DATA / "profile-v1.json")
    for old, new in zip(raw["layer_times"], profile.layer_times, strict=True):
        assert new.time.typical_s == new.time.median_s == old["time"]["median_s"]
    assert profile.model_times[0].wu.typical_s == raw["model_times"][0]["wu"]["median_s"]


def test_version_2_has_no_times_of_shards() -> None:
    assert read_profile(DATA / "profile-v2.json").shard_times == ()
    assert [time.shard for time in read_profile(DATA / "profile-v3.json").shard_times] == ["f2"]
