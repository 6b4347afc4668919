"""Measurement directories: created once, appended to, resumed after an interruption, never overwritten silently."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import append_lines, append_together, cut_torn_line, undo_unfinished
from paradl_bench.core.files.storage import encode_pretty, file_name, write_bytes_atomically
from paradl_bench.core.terminal.command_line import say
from paradl_bench.network.graph import ModelGraph
from paradl_bench.ranks.directories.host_watch import HostWatch
from paradl_bench.ranks.directories.writer_lock import is_lock, lock_for_writing, refuse_locked, release
from paradl_bench.records.emulation import words_of_emulation
from paradl_bench.records.hosts.host_load import LOAD_FILE, HostLoad, read_load
from paradl_bench.records.measurement import (
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

T = TypeVar("T", bound=msgspec.Struct)

_LAST_STRETCH_S = 0.5
"""Seconds at least of the stretch that ends a measurement: the kernel counts time in hundredths."""


@dataclass(slots=True)
class MeasurementDirectory:
    """A measurement directory that is open for appending.

    Attributes:
        watch: looks at what else the host does; None where another process writes, or all is measured.
    """

    path: Path
    manifest: Manifest
    resumed: bool
    watch: HostWatch | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        kind: MeasurementKind,
        arguments: dict[str, str],
        command_line: tuple[str, ...],
        environment: Environment,
        alone: bool = True,
        watch: bool = False,
    ) -> MeasurementDirectory:
        """Create the directory, or go on in one that the same command left; rows that were not written whole are cut.

        Args:
            alone: whether this process is to be the only one that writes there; False for a rank that adds to what
                rank 0 writes.
            watch: note what else the host does from now on until the end, and say at once where it is busy.

        Raises:
            UserError: the path holds something else, a measurement of other arguments, or one from another machine, or
                another process writes there.
        """
        _refuse_foreign(path)
        if alone:
            lock_for_writing(path)
        if (path / MANIFEST_NAME).exists():
            manifest = read_manifest(path)
            try:
                manifest = _check_same(path, manifest, kind, arguments, environment)
            except UserError:
                release(path)
                raise
            if alone:
                _clear(path)
            return cls(path, manifest, True)._watched(watch)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            kind=kind,
            command_line=command_line,
            arguments=arguments,
            created_utc=now_utc(),
            environment=environment,
        )
        write_manifest(path, manifest)
        return cls(path, manifest, False)._watched(watch)

    def _watched(self, watch: bool) -> MeasurementDirectory:
        if watch and not self.manifest.complete:
            self.watch = HostWatch()
            load = self.watch.before()
            if load is not None and load.is_busy:
                say(f"this host is busy: {load.words}. This makes measurements slower, and they are marked")
            self._note(load)
        return self

    def _note(self, load: HostLoad | None) -> None:
        if load is not None:
            append_lines(self.path / LOAD_FILE, [load])

    def append(self, file_name: str, records: Iterable[msgspec.Struct]) -> None:
        """Append records to a JSON-lines file, synchronised to disk: all of them, or none where it is killed."""
        self.append_together({file_name: records})

    def append_together(self, records: Mapping[str, Iterable[msgspec.Struct]]) -> None:
        """As :meth:`append`, to several files, given by name."""
        append_together(self.path, records)
        if self.watch is not None:
            self._note(self.watch.stretch())

    def records(self, file_name: str, of: type[T]) -> list[T]:
        """Records appended so far, by this and by earlier, interrupted runs."""
        return read_records(self.path, file_name, of)

    def finish(self) -> None:
        """Mark the measurement complete."""
        if not self.manifest.complete:
            if self.watch is not None:
                self._note(self.watch.stretch(at_least_s=_LAST_STRETCH_S))
                load = read_load(self.path)
                if load is not None and load.is_busy:
                    warns = "predict validate" if self.manifest.kind == "training" else "calibrate fit"
                    say(f"{self.path} was measured on a busy host: {load.words}; {warns} will warn of it")
            self.manifest = msgspec.structs.replace(self.manifest, complete=True)
            write_manifest(self.path, self.manifest)
        release(self.path)


def refuse_unusable(path: Path, kind: MeasurementKind, arguments: dict[str, str] | None = None) -> None:
    """Refuse what can be no directory of this measurement, as a command does before it starts ranks.

    Args:
        arguments: of the measurement; None where the ranks alone know them all.

    Raises:
        UserError: a file, a directory that holds something else or another measurement, or one that another process
            writes.
    """
    _refuse_foreign(path)
    refuse_locked(path)
    if (path / MANIFEST_NAME).exists():
        manifest = read_manifest(path)
        _check_asked(path, manifest, kind, manifest.arguments if arguments is None else arguments)


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; -o takes a directory")
    if not path.is_dir() or (path / MANIFEST_NAME).exists():
        return
    # What a process left that was killed before it wrote the manifest may be there.
    if not all(is_lock(file) or _is_temporary(file) for file in path.iterdir()):
        raise UserError(f"{path} is not empty and holds no measurement; give an empty or new directory")


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.suffix == ".tmp"


def _clear(path: Path) -> None:
    """Remove what a killed process left half written, and say what has to be measured again."""
    undone = undo_unfinished(path)
    if undone:
        say(f"{path}: a point was only partly written; its {undone} bytes are dropped and it is measured again")
    for file in sorted(path.iterdir()):
        if _is_temporary(file):
            with contextlib.suppress(OSError):
                file.unlink()
        elif file.suffix == ".jsonl" and os.access(file, os.W_OK):
            cut = cut_torn_line(file)
            if cut:
                say(
                    f"{file}: its last row was only partly written; its {cut} bytes are dropped and it is measured"
                    " again"
                )


def _check_asked(path: Path, manifest: Manifest, kind: MeasurementKind, arguments: dict[str, str]) -> None:
    written = stored_version(path)
    if written != SCHEMA_VERSION:
        raise UserError(
            f"{path} was written in format {written}, and this program writes format {SCHEMA_VERSION}; give"
            " another directory"
        )
    if manifest.kind != kind:
        raise UserError(f"{path} holds a measurement of {manifest.kind}, not of {kind}; give another directory")
    for name in sorted(manifest.arguments.keys() | arguments.keys()):
        old, new = manifest.arguments.get(name), arguments.get(name)
        if old != new:
            raise UserError(f"{path} was measured with {name} {old}, not {new}; give another directory")


def _check_same(
    path: Path, manifest: Manifest, kind: MeasurementKind, arguments: dict[str, str], environment: Environment
) -> Manifest:
    """The manifest to go on with."""
    _check_asked(path, manifest, kind, arguments)
    different = manifest.environment.differences(environment)
    moved = [text for text in different if text.startswith("hostname ")]
    # A job of Slurm's that is requeued may get another node of the same kind.
    in_jobs = all("SLURM_JOB_ID" in place.variables for place in (manifest.environment, environment))
    if different and different == moved and in_jobs:
        return _moved(path, manifest, environment.hostname)
    if different:
        raise UserError(f"{path} was measured elsewhere ({different[0]}); give another directory")
    return manifest


def _moved(path: Path, manifest: Manifest, hostname: str) -> Manifest:
    """Note the host on which a measurement goes on."""
    if hostname not in manifest.also_on:
        say(f"{path} was begun on {manifest.environment.hostname} and continues on {hostname}; its manifest says so")
        manifest = msgspec.structs.replace(manifest, also_on=(*manifest.also_on, hostname))
        write_manifest(path, manifest)
    return manifest


def emulation_noted(path: Path) -> str:
    """What of a measurement was emulated, in a line; empty for what was real, and for records without a manifest.

    Raises:
        UserError: as :func:`~paradl_bench.records.measurement.read_manifest`.
    """
    if not (path / MANIFEST_NAME).exists():
        return ""
    return words_of_emulation(read_manifest(path).environment.emulated)


def write_network(directory: Path, network: ModelGraph) -> None:
    """Keep the graph that was measured: ``network-resnet18.json``, with _ for what a file name can't hold."""
    write_bytes_atomically(directory / f"network-{file_name(network.name)}.json", encode_pretty(network))


def now_utc() -> str:
    """The time now, ISO 8601 in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
