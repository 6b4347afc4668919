"""What a measurement directory holds: a manifest with the environment, and JSON lines of raw samples.

Format history (this file owns it):

    1  first format

A new version adds a line here and a function to ``MIGRATIONS`` and ``RECORD_MIGRATIONS``; a test case of the old one is
kept under tests/data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from paradl_bench.core.bounds import Bytes, Count, Index, PositiveCount, SchemaVersion
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.documents import foreign_document, validation_text
from paradl_bench.core.files.json_lines import read_lines, torn_bytes
from paradl_bench.core.files.storage import (
    MOST_DOCUMENT_BYTES,
    check_keys,
    encode_pretty,
    not_a_number,
    read_json,
    read_whole,
    write_bytes_atomically,
)
from paradl_bench.records.emulation import Emulation, kind_of_emulation

T = TypeVar("T", bound=msgspec.Struct)
SCHEMA_VERSION = 1
Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: dict[int, Migration] = {}
"""By version n: makes a manifest of version n + 1 of one of version n (decoded JSON)."""

RECORD_MIGRATIONS: dict[int, Callable[[str, dict[str, Any]], dict[str, Any]]] = {}
"""By version n: from a file's name and one of its records of version n, the record of version n + 1."""

MANIFEST_NAME = "manifest.json"
LAYERS_FILE = "layers.jsonl"
ITERATIONS_FILE = "iterations.jsonl"
COPIES_FILE = "copies.jsonl"
COLLECTIVES_FILE = "collectives.jsonl"
TRACE_FILE = "trace.jsonl"
DROPPED_FILE = "dropped.jsonl"
UNKNOWN_DEVICE = "unknown"
"""Name of a device that a log or a tool does not tell."""
MeasurementKind = Literal["layers", "collectives", "training", "kernels", "input", "roofline"]
PhaseName = Literal["FW", "BW", "BW_input", "BW_weight", "WU", "GE", "FWBW"]
"""FWBW: forward and backward together, where a file of another tool has only their sum."""
Mode = Literal["in_situ", "isolated"]


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a measurement was made.

    Attributes:
        device: ``cpu`` or ``cuda``.
        device_name, device_count, memory_bytes: of one device (for a CPU the host's memory, and cores as devices).
            0 bytes where a log of another tool does not say.
        hostname: of the host, or the cluster whose nodes are taken as alike (``PARADL_CLUSTER``). kernel: of the host.
        versions: python, torch, torchvision, cuda, nccl, driver, ... as far as present.
        settings: what changes a kernel: threads, pinning, TF32, cudnn.benchmark, allocator thresholds.
        variables: NCCL_*, CUDA_*, OMP_*, MALLOC_*, GLOO_* and Slurm variables that were set.
        commit: of the working tree that measured, where known.
        emulated: what was emulated (layers that slept, nodes on one host) or simulated; false where nothing was.
    """

    device: str
    device_name: str
    device_count: PositiveCount
    memory_bytes: Bytes
    hostname: str
    kernel: str
    versions: dict[str, str]
    settings: dict[str, str]
    variables: dict[str, str] = {}
    commit: str | None = None
    emulated: Emulation | bool = False

    def __post_init__(self) -> None:
        if self.emulated is True:
            raise ValueError("emulated has to say what was emulated, or be false")

    @property
    def computing(self) -> Environment:
        """The same with layers that compute: what of it was real, or emulated in another way."""
        emulated = self.emulated
        kept = emulated.computing if isinstance(emulated, Emulation) else emulated
        return msgspec.structs.replace(self, emulated=kept)

    def differences(self, other: Environment) -> list[str]:
        """What differs and makes measurements unlike: device, host, versions, settings; empty if they may be merged."""
        differing = [
            f"{label} {getattr(self, label)!r} against {getattr(other, label)!r}"
            for label in ("device", "device_name", "hostname")
            if getattr(self, label) != getattr(other, label)
        ]
        kinds = [kind_of_emulation(environment.emulated) for environment in (self, other)]
        differing += [f"emulated {kinds[0]!r} against {kinds[1]!r}"] if kinds[0] != kinds[1] else []
        for label in ("versions", "settings"):
            mine, theirs = getattr(self, label), getattr(other, label)
            differing += [
                f"{label}.{key} {_setting(mine.get(key))} against {_setting(theirs.get(key))}"
                for key in sorted(mine.keys() | theirs.keys())
                if mine.get(key) != theirs.get(key)
            ]
        return differing


_SCHEDULING = {
    "SCHED_BATCH": "each rank had a core",
    "SCHED_OTHER": "ranks shared cores",
    "SCHED_RR": "ranks of emulated nodes took turns",
}
"""What a policy of Linux's scheduler says of the ranks that had it."""


def _setting(value: str | None) -> str:
    """A setting's value as it is written, and what it means where its name does not tell."""
    if value is None:
        return "not recorded"
    return f"{value!r} ({_SCHEDULING[value]})" if value in _SCHEDULING else repr(value)


NOT_WHOLE = "is not whole"
"""Stands in an imported file's note on networks that lack layers, behind ``PATH: NAMES ``; profiles keep that note."""


def networks_not_whole(note: str) -> tuple[str, ...]:
    """Names of the networks that a note says lack layers; none where it speaks of something else."""
    head, marker, _ = note.partition(f" {NOT_WHOLE}: ")
    return tuple(head.rpartition(": ")[2].split(", ")) if marker else ()


class ImportedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of another tool that a measurement directory was made of.

    Attributes:
        path: as it was given. sha256: of its bytes.
        format: the importer that read it (``nccl-tests``).
        tool_version: of the tool that wrote it, as it says itself; empty where it does not.
        command_lines: of the tool, as the file holds them, one a run.
        rows: of its tables that were read. dropped: those that were not, each with its reason in ``dropped.jsonl``.
        notes: what its reader should know, in words.
    """

    path: str
    sha256: str
    format: str
    tool_version: str
    command_lines: tuple[str, ...]
    rows: Count
    dropped: Count
    notes: tuple[str, ...] = ()


class DroppedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of an imported file that was not taken (file ``dropped.jsonl``): the first line that holds it, and why."""

    file: str
    line: Index
    text: str
    why: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Head of a measurement directory.

    Attributes:
        kind: which files to expect.
        command_line: as typed, to be repeated.
        arguments: the resolved settings; a directory is resumed only under equal ones.
        created_utc: ISO 8601.
        complete: false while the command runs, and after an interruption.
        imported: files of other tools that this was read from; empty for what was measured here.
        also_on: further hosts on which it went on, where Slurm gave a requeued job another node of the same kind.
    """

    schema_version: SchemaVersion
    kind: MeasurementKind
    command_line: tuple[str, ...]
    arguments: dict[str, str]
    created_utc: str
    environment: Environment
    complete: bool = False
    imported: tuple[ImportedFile, ...] = ()
    also_on: tuple[str, ...] = ()


def argument_texts(request: object, *names: str) -> dict[str, str]:
    """Attributes of a request as a manifest's arguments; entries of a tuple stand between commas."""
    values = {name: getattr(request, name) for name in names}
    return {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in values.items()
    }


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a measurement directory atomically."""
    write_bytes_atomically(directory / MANIFEST_NAME, encode_pretty(manifest))


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read and validate the manifest of a measurement directory, of this or an older version.

    Raises:
        UserError: no such directory, no manifest, a newer version, or a wrong field (named by its path).
    """
    directory = Path(directory)
    path = directory / MANIFEST_NAME
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is no directory: give the one that paradl-bench wrote")
    if not directory.is_dir():
        raise UserError(f"{directory} is no measurement directory: it does not exist")
    if not path.is_file():
        raise UserError(f"{directory} is no measurement directory: it holds no {MANIFEST_NAME}")
    raw = load_versioned(path, SCHEMA_VERSION, what="measurement", migrations=MIGRATIONS)
    try:
        return msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {validation_text(error, Manifest)}") from None


def is_complete(directory: Path) -> bool:
    """Whether a measurement has come to its end; not one that is not there, or can't be read."""
    try:
        return read_manifest(directory).complete
    except UserError:
        return False


def load_versioned(
    path: Path, newest: int, *, what: str, migrations: Mapping[int, Migration] | None = None
) -> dict[str, Any]:
    """Decode a JSON document that carries ``schema_version`` and bring it to the newest version.

    Args:
        what: the noun for errors ("profile", "measurement").
        migrations: for each older version n, what makes a document of n + 1 of one of n.

    Raises:
        UserError: unreadable, not JSON (truncated), no object, no version, a NaN, or a newer version.
    """
    if (path / MANIFEST_NAME).exists():
        raise UserError(
            f"{path} is no {what}, but a measurement: make a profile of it by calibrate fit {path} -o PROFILE"
        )
    content = read_whole(path, what=what, most_bytes=MOST_DOCUMENT_BYTES)
    try:
        raw = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        mistake = not_a_number(content)
        raise UserError(f"{what} {path}: {mistake or f'no valid JSON (truncated?): {error}'}") from None
    check_keys(content, raw, f"{what} {path}")
    if mistake := foreign_document(raw, what):
        raise UserError(f"{path} is no {what}, but {mistake}")
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if type(version) is not int:
        raise UserError(f"{what} {path} has no schema_version: it was not written by this program")
    if not 1 <= version <= newest:
        raise UserError(
            f"{what} {path} has schema_version {version}; this program reads 1 to {newest}: install a newer paradl"
        )
    try:
        for older in range(version, newest):
            raw = (migrations or {})[older](raw) | {"schema_version": older + 1}
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{what} {path}: not a valid document of version {version} ({error!r})") from None
    return cast(dict[str, Any], raw)


class _Versioned(msgspec.Struct):
    schema_version: int


def stored_version(directory: Path) -> int:
    """Format version that a measurement directory was written in.

    Raises:
        UserError: as :func:`read_manifest`.
    """
    path = directory / MANIFEST_NAME
    read_manifest(directory)
    return read_json(path, _Versioned).schema_version


def torn_rows(directory: Path) -> dict[str, int]:
    """Files of a measurement directory whose last row was not written whole, and how many bytes of it there are.

    Such a row is left out wherever the file is read, and cut off when the same command goes on.
    """
    torn = {path.name: torn_bytes(path) for path in sorted(directory.glob("*.jsonl"))}
    return {name: size for name, size in torn.items() if size}


def read_records(directory: Path, name: str, of: type[T]) -> list[T]:
    """Records of one JSON-lines file of a measurement directory of this or an older version; an absent file holds none.

    Raises:
        UserError: a whole line is no valid record; the message names file, line and field.
    """
    path = directory / name
    if not path.exists():
        return []
    version = stored_version(directory) if (directory / MANIFEST_NAME).exists() else SCHEMA_VERSION
    if version == SCHEMA_VERSION:
        return list(read_lines(path, of)[0])
    records = []
    for number, line in enumerate(read_lines(path, dict[str, Any])[0], start=1):
        try:
            for older in range(version, SCHEMA_VERSION):
                line = RECORD_MIGRATIONS[older](name, line)
            records.append(msgspec.convert(line, of))
        except (msgspec.ValidationError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path} line {number}, of version {version}: {error}") from None
    return records
