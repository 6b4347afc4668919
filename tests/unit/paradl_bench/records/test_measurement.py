"""What a measurement directory holds: validated, versioned, and read back with the wrong field named by its path."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import append_lines, encode_lines
from paradl_bench.records import measurement
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.records.emulation import EmulatedNodes, Emulation
from paradl_bench.records.measurement import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Environment,
    Manifest,
    load_versioned,
    read_manifest,
    read_records,
    write_manifest,
)
from paradl_bench.records.samples import CollectiveSamples, IterationSamples, LayerSamples
from paradl_bench.records.training.training_record import TrainingIterations

EMULATED = Emulation(nodes=EmulatedNodes(nodes=2, ranks_per_node=2, link_bytes_per_s=125e6, shaping="tbf"))
ENVIRONMENT = Environment(
    device="cpu",
    device_name="Some CPU",
    device_count=2,
    memory_bytes=8 * 1024**3,
    hostname="node1",
    kernel="Linux 6.1",
    versions={"python": "3.11.7", "torch": "2.13.0"},
    settings={"threads": "1"},
    variables={"OMP_NUM_THREADS": "1"},
    commit="0123abc",
)
MANIFEST = Manifest(
    schema_version=SCHEMA_VERSION,
    kind="layers",
    command_line=("paradl-bench", "layers", "resnet18"),
    arguments={"model": "resnet18", "batch": "8"},
    created_utc="2026-01-02T03:04:05+00:00",
    environment=ENVIRONMENT,
)
LAYER = LayerSamples(
    model="resnet18",
    layer="conv1",
    operation="conv(3x8x8; )",
    phase="FW",
    mode="in_situ",
    batch=8,
    dtype="fp32",
    ranks_on_host=1,
    rank=0,
    block=0,
    samples_s=(0.25, 0.5),
)
TIMES = dict.fromkeys(("fw_s", "bw_s", "wu_s", "fw_layers_s", "bw_layers_s"), (0.5, 0.25))
ITERATIONS = IterationSamples(
    model="resnet18",
    batch=8,
    dtype="fp32",
    optimizer="sgd",
    ranks_on_host=1,
    rank=0,
    block=0,
    **TIMES,
    fw_between_s=(-1e-6, 1e-5),
    bw_between_s=(1e-5, 1e-5),
    fw_instrumented_s=(0.5, 0.5),
    bw_instrumented_s=(0.5, 0.5),
)
COLLECTIVE = CollectiveSamples(
    library="gloo",
    tool="torch",
    operation="all_reduce",
    level="node",
    ranks=2,
    message_bytes=4096,
    dtype="fp32",
    block=0,
    samples_s=((0.5, 0.25), (0.5, 0.5)),
    verified=True,
)
CONTEXT = ContextSamples(
    library="gloo",
    operation="all_reduce",
    level="node",
    ranks=2,
    message_bytes=4096,
    dtype="fp32",
    context="with-compute",
    neighbour="conv2d",
    block=0,
    one_clock=True,
    idle_end_s=((0.5,),),
    start_s=((0.0,),),
    end_s=((1.0,),),
    neighbour_s=((0.75,),),
    neighbour_idle_s=((0.5,),),
)
TRAINING = TrainingIterations(
    rank=0,
    first_iteration=5,
    iteration_s=(1.0, 2.0),
    fw_s=(0.25, 0.5),
    bw_s=(0.5, 1.0),
    exposed_ge_s=(0.0, 0.25),
    wu_s=(0.25, 0.25),
)
RECORDS: list[msgspec.Struct] = [LAYER, ITERATIONS, COLLECTIVE, CONTEXT, TRAINING]


def manifest_as_builtins(folder: Path) -> dict[str, Any]:
    write_manifest(folder, MANIFEST)
    raw = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes())
    assert isinstance(raw, dict)
    return raw


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path / "new", MANIFEST)
    assert read_manifest(tmp_path / "new") == MANIFEST


def test_a_manifest_cut_at_any_byte_is_one_clear_line(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / MANIFEST_NAME
    whole = path.read_bytes()
    for length in range(len(whole.rstrip())):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"manifest\.json") as caught:
            read_manifest(tmp_path)
        assert "\n" not in str(caught.value)


@given(content=st.binary(max_size=64))
def test_any_bytes_are_a_users_mistake(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(UserError):
        read_manifest(folder)


@pytest.mark.parametrize("depth", [100_000])
def test_nesting_without_end_is_a_users_mistake(tmp_path: Path, depth: int) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(b"[" * depth)
    with pytest.raises(UserError, match="no valid JSON"):
        read_manifest(tmp_path)


def test_what_is_no_measurement_directory_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent is no measurement directory: it does not exist"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(UserError, match=r"is no measurement directory: it holds no manifest\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, -1, 10**30])
def test_a_version_that_this_program_does_not_know(tmp_path: Path, version: int) -> None:
    raw = manifest_as_builtins(tmp_path) | {"schema_version": version}
    # A newer version may have fields that this one does not know: it is refused for its version, not for them.
    (tmp_path / MANIFEST_NAME).write_text(_json(raw | {"new_field": 1}))
    with pytest.raises(UserError, match=rf"schema_version {version}; this program reads 1 to {SCHEMA_VERSION}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("version", [None, "1", 1.0, True])
def test_a_document_without_a_version_is_refused(tmp_path: Path, version: object) -> None:
    raw = manifest_as_builtins(tmp_path) | {"schema_version": version}
    (tmp_path / MANIFEST_NAME).write_text(_json(raw))
    with pytest.raises(UserError, match="schema_version"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"kind": "layer"}, r"\$\.kind"),
        ({"command_line": ["a", 3]}, r"\$\.command_line\[1\]"),
        ({"arguments": {"batch": 8}}, r"\$\.arguments\[\.\.\.\]"),
        ({"environment": {"device": "cpu"}}, r"device_name.*\$\.environment"),
        ({"speed": 1}, "unknown field `speed`"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(tmp_path: Path, change: dict[str, Any], where: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(_json(manifest_as_builtins(tmp_path) | change))
    with pytest.raises(UserError, match=rf"manifest\.json: .*{where}"):
        read_manifest(tmp_path)


def test_an_older_version_is_migrated_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "document.json"
    path.write_text('{"schema_version": 1, "time_ms": 5.0}')
    steps: dict[int, measurement.Migration] = {
        1: lambda raw: {"time_s": raw["time_ms"] / 1000},
        2: lambda raw: raw | {"unit": "s"},
    }
    assert load_versioned(path, 3, what="test", migrations=steps) == {"schema_version": 3, "time_s": 0.005, "unit": "s"}
    path.write_text('{"schema_version": 1}')
    with pytest.raises(UserError, match="not a valid document of version 1"):
        load_versioned(path, 3, what="test", migrations=steps)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_read_as_they_were_written(tmp_path: Path, record: msgspec.Struct) -> None:
    write_manifest(tmp_path, MANIFEST)
    append_lines(tmp_path / "records.jsonl", [record, record])
    assert read_records(tmp_path, "records.jsonl", type(record)) == [record, record]


def test_a_file_that_was_not_written_yet_holds_no_records(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_records(tmp_path, "layers.jsonl", LayerSamples) == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9])
def test_no_record_is_written_with_what_is_no_time(record: msgspec.Struct, value: float) -> None:
    labels = [label for label in record.__struct_fields__ if label.endswith("_s") and getattr(record, label)]
    assert labels
    for label in labels:
        if label.endswith("between_s") and value < 0 and math.isfinite(value):
            continue  # a remainder, after the probes' cost is taken off, may fall below zero
        samples = getattr(record, label)
        nested = isinstance(samples[0], tuple)
        wrong = ((value, *samples[0][1:]), *samples[1:]) if nested else (value, *samples[1:])
        with pytest.raises(ValueError, match=rf"Expected `float`.* - at `\$\.{label}(\[0\])+`|ends before it"):
            encode_lines([msgspec.structs.replace(record, **{label: wrong})])


@pytest.mark.parametrize(
    ("record", "change", "why"),
    [
        (LAYER, {"samples_s": ()}, "length >= 1 - at `.*samples_s`"),
        (ITERATIONS, {"bw_between_s": (0.5,)}, "differ in length.*'bw_between_s': 1"),
        (ITERATIONS, {"wu_instrumented_s": (0.5,)}, "differ in length"),
        (COLLECTIVE, {"samples_s": ((0.5, 0.25), (0.5,))}, "not as many samples on every rank"),
        (COLLECTIVE, {"samples_s": ()}, "not as many samples on every rank"),
        (COLLECTIVE, {"samples_s": ((), ())}, "length >= 1 - at `.*samples_s"),
        (CONTEXT, {"neighbour_idle_s": ((0.5, 0.5),)}, "has not 1 calls a repetition"),
        (TRAINING, {"wu_s": (0.5,)}, "differ in length"),
        (TRAINING, {"collectives_issued": (4,)}, "differ in length"),
    ],
)
def test_lists_of_one_index_are_of_one_length(record: msgspec.Struct, change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        encode_lines([msgspec.structs.replace(record, **change)])


def test_a_negative_time_is_named_by_file_and_line(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    append_lines(tmp_path / "layers.jsonl", [LAYER, msgspec.to_builtins(LAYER) | {"samples_s": [-1.0]}])
    with pytest.raises(UserError, match=r"layers\.jsonl line 2: .*>= 0\.0 - at `\$\.samples_s\[0\]`"):
        read_records(tmp_path, "layers.jsonl", LayerSamples)


def test_a_nan_in_a_file_is_named(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "layers.jsonl"
    append_lines(path, [LAYER])
    path.write_text(path.read_text().replace("0.25", "NaN"))
    with pytest.raises(UserError, match=r"layers\.jsonl line 1: \$\.samples_s\[0\] is NaN"):
        read_records(tmp_path, "layers.jsonl", LayerSamples)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"kernel": "Linux 6.2", "commit": None, "variables": {}}, []),
        ({"hostname": "node2"}, ["hostname 'node1' against 'node2'"]),
        ({"device": "cuda", "device_name": "V100"}, ["device 'cpu' against 'cuda'", "device_name 'Some CPU' against"]),
        ({"emulated": EMULATED}, ["emulated 'no' against 'nodes with links of 125 MB/s (tbf)'"]),
        ({"versions": {"python": "3.11.7", "torch": "2.6.0"}}, ["versions.torch '2.13.0' against '2.6.0'"]),
        (
            {"settings": {"threads": "1", "scheduling": "SCHED_OTHER"}},
            ["settings.scheduling not recorded against 'SCHED_OTHER' (ranks shared cores)"],
        ),
        ({"settings": {}}, ["settings.threads '1' against not recorded"]),
        ({"settings": {"threads": "1", "tf32": "on"}}, ["settings.tf32 not recorded against 'on'"]),
    ],
)
def test_environments_that_measure_unlike_things_say_where_they_differ(
    change: dict[str, Any], expected: list[str]
) -> None:
    found = ENVIRONMENT.differences(msgspec.structs.replace(ENVIRONMENT, **change))
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
