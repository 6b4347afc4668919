"""Measurement directories: created once, appended to, resumed after an interruption, never overwritten silently."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.measurement import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Environment,
    Manifest,
    MeasurementKind,
    read_manifest,
    read_records,
    stored_version,
    write_manifest,
)
from paradl_bench.spec.network import Network
from paradl_bench.spec.storage import append_lines, encode_pretty, write_bytes_atomically

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class MeasurementDirectory:
    """A measurement directory that is open for appending.

    Attributes:
        resumed: whether it held measurements of the same command before.
    """

    path: Path
    manifest: Manifest
    resumed: bool

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        kind: MeasurementKind,
        arguments: dict[str, str],
        command_line: tuple[str, ...],
        environment: Environment,
    ) -> MeasurementDirectory:
        """Create the directory, or go on in one that the same command left.

        Raises:
            UserError: the path holds something else, a measurement of other arguments, or one from another machine.
        """
        refuse_unusable(path)
        if (path / MANIFEST_NAME).exists():
            manifest = read_manifest(path)
            _check_same(path, manifest, kind, arguments, environment)
            return cls(path, manifest, True)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            kind=kind,
            command_line=command_line,
            arguments=arguments,
            created_utc=now_utc(),
            environment=environment,
        )
        write_manifest(path, manifest)
        return cls(path, manifest, False)

    def append(self, file_name: str, records: Iterable[msgspec.Struct]) -> None:
        """Append records to a JSON-lines file, synchronised to disk."""
        append_lines(self.path / file_name, records)

    def records(self, file_name: str, of: type[T]) -> list[T]:
        """Records appended so far, by this and by earlier, interrupted runs."""
        return read_records(self.path, file_name, of)

    def finish(self) -> None:
        """Mark the measurement complete."""
        if not self.manifest.complete:
            self.manifest = msgspec.structs.replace(self.manifest, complete=True)
            write_manifest(self.path, self.manifest)


def refuse_unusable(path: Path) -> None:
    """Refuse what can be no measurement directory, as a command does before it starts ranks.

    Raises:
        UserError: a file, or a directory that holds something else.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; -o takes a directory")
    if path.is_dir() and any(path.iterdir()) and not (path / MANIFEST_NAME).exists():
        raise UserError(f"{path} is not empty and holds no measurement; give an empty or new directory")


def _check_same(
    path: Path, manifest: Manifest, kind: MeasurementKind, arguments: dict[str, str], environment: Environment
) -> None:
    written = stored_version(path)
    if written != SCHEMA_VERSION:
        raise UserError(
            f"{path} was written in format {written}, this program writes {SCHEMA_VERSION}; give another one"
        )
    if manifest.kind != kind:
        raise UserError(f"{path} holds a measurement of {manifest.kind}, not of {kind}; give another directory")
    names = sorted(manifest.arguments.keys() | arguments.keys())
    for name in names:
        old, new = manifest.arguments.get(name), arguments.get(name)
        if old != new:
            raise UserError(f"{path} was measured with {name} {old}, not {new}; give another directory")
    different = manifest.environment.differences(environment)
    if different:
        raise UserError(f"{path} was measured elsewhere ({different[0]}); give another directory")


def write_network(directory: Path, network: Network) -> None:
    """Keep the graph that was measured: ``network-resnet18.json``, with _ for what a file name can't hold."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in network.name)
    write_bytes_atomically(directory / f"network-{name}.json", encode_pretty(network))


def now_utc() -> str:
    """The time now, ISO 8601 in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
