"""From what files of other tools held to one measurement directory, with where each number comes from.

A directory is one environment: files whose tools name unlike devices or library versions do not go into one, unless
forced. What a log does not say (memory, kernel) is left at 0 or empty, never filled in from the machine that imports.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import msgspec.yaml

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import encode_lines
from paradl_bench.core.files.storage import encode_pretty, file_name, read_whole, write_bytes_atomically
from paradl_bench.core.units import counted
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.records.cluster import NODE
from paradl_bench.records.input_record import BATCHES_FILE, BatchSamples
from paradl_bench.records.measurement import (
    COLLECTIVES_FILE,
    DROPPED_FILE,
    LAYERS_FILE,
    NOT_WHOLE,
    TRACE_FILE,
    UNKNOWN_DEVICE,
    DroppedRow,
    Environment,
    ImportedFile,
    is_complete,
    read_manifest,
)
from paradl_bench.records.samples import CollectiveSamples, LayerSamples

T = TypeVar("T", bound=msgspec.Struct)
_POINT: dict[type[msgspec.Struct], tuple[str, ...]] = {
    CollectiveSamples: ("library", "tool", "operation", "level", "ranks", "message_bytes", "dtype", "buffers"),
    LayerSamples: ("model", "layer", "operation", "phase", "batch", "rank"),
    KernelSamples: ("shape", "dtype"),
    BatchSamples: ("stage", "model", "batch"),
}
"""Fields that tell what is measured; records that agree in them differ in their block."""


class NotRead(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was left out, and why."""

    file: str
    why: str


class ImportSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What ``paradl-bench import --json`` prints; ``rows`` are those of all files that were read."""

    files: tuple[ImportedFile, ...]
    rows: int
    dropped: tuple[DroppedRow, ...]
    notes: tuple[str, ...]
    not_read: tuple[NotRead, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRead:
    """A file and what it held; ``refused`` says why nothing could be read of it."""

    log: LogFile
    held: Imported
    refused: str = ""


def read_files(importer: Importer, logs: Sequence[LogFile], options: ImportOptions) -> list[FileRead]:
    """Read every file by one importer; of several, those that are none of the format are refused one by one.

    Raises:
        UserError: no file is of the format, two files are equal, a log does not say where its ranks were, or a
            network lacks layers and is not to be kept so.
    """
    seen: dict[str, str] = {}
    files = []
    for log in logs:
        try:
            if log.refused:
                raise NotOfFormat(log.refused)
            held = importer.read(log, options)
        except NotOfFormat as error:
            files.append(FileRead(log=log, held=Imported(), refused=str(error)))
            continue
        if log.sha256 and log.sha256 in seen:
            raise UserError(f"{seen[log.sha256]} and {log.path} hold the same bytes; give them once")
        seen[log.sha256] = log.path
        if any(not record.level for record in held.collectives):
            raise UserError(
                f"{log.path} does not say whether ranks shared a host: give --level node if they did, else --level"
                " system"
            )
        alone = sum(record.ranks <= 1 for record in held.collectives)
        if alone:
            held.notes.append(
                f"{log.path}: {counted(alone, 'row')} of one rank, which sends nothing: calibrate fit leaves them out"
            )
        if held.networks and held.lost_layers:
            _check_whole(log, held, options)
        files.append(FileRead(log=log, held=held))
    if files and all(file.refused for file in files):
        more = f" (nor could {len(files) - 1} more be read)" if len(files) > 1 else ""
        raise UserError(f"{files[0].refused}{more}")
    return files


def _check_whole(log: LogFile, held: Imported, options: ImportOptions) -> None:
    first, count = held.lost_layers[0], len(held.lost_layers)
    if "incomplete" not in options.keep:
        raise UserError(
            f"{log.path} line {first.line}: {first.why}; without it the network is"
            f" incomplete{f' ({count} such lines)' if count > 1 else ''}: correct the file, or give --keep"
            " incomplete"
        )
    names = ", ".join(network.name for network in held.networks)
    held.notes.append(
        f"{log.path}: {names} {NOT_WHOLE}: rows of layers were dropped, line {first.line} first ({count} in all);"
        " predictions lack these layers"
    )


def summarise(importer: Importer, files: Sequence[FileRead]) -> ImportSummary:
    """What was read and what was not."""
    return ImportSummary(
        files=tuple(_imported_file(importer, file) for file in files if not file.refused),
        not_read=tuple(NotRead(file=file.log.path, why=file.refused) for file in files if file.refused),
        rows=sum(file.held.rows for file in files),
        dropped=tuple(
            DroppedRow(file=file.log.path, line=item.line, text=item.text, why=item.why)
            for file in files
            for item in file.held.dropped
        ),
        notes=tuple(dict.fromkeys(note for file in files for note in file.held.notes)),
    )


def _imported_file(importer: Importer, file: FileRead) -> ImportedFile:
    versions = file.held.versions
    # Tables of kernels name what they were measured with, not the version of what wrote them.
    first = "" if importer.kind == "kernels" else next(iter(versions.values()), "")
    return ImportedFile(
        path=file.log.path,
        sha256=file.log.sha256,
        format=importer.name,
        tool_version=versions.get(importer.name, first),
        command_lines=tuple(file.held.command_lines),
        rows=file.held.rows,
        dropped=len(file.held.dropped),
        notes=tuple(file.held.notes),
    )


def environment_of(
    files: Sequence[FileRead], *, cluster: str | None, device_name: str | None, memory_bytes: int, force: bool
) -> Environment:
    """The one environment that the files were written in, as far as they say.

    Args:
        cluster: name that stands for the hosts; without it a lone host's name does.

    Raises:
        UserError: files of unlike devices or versions, without ``force``.
    """
    if not force:
        _check_alike(files)
    devices = sorted({name for file in files for name in file.held.device_names})
    hosts = sorted({name for file in files for name in file.held.hosts})
    collectives = [record for file in files for record in file.held.collectives]
    on_node = [record.ranks if record.level == NODE else record.ranks_per_node for record in collectives]
    return Environment(
        device=next((file.held.device for file in files if file.held.device), "cuda"),
        device_name=device_name or " and ".join(devices) or UNKNOWN_DEVICE,
        device_count=max([1, *(file.held.ranks_per_host for file in files), *on_node]),
        memory_bytes=memory_bytes,
        hostname=cluster or (hosts[0] if len(hosts) == 1 else ""),
        kernel="",
        versions=_joined([file.held.versions for file in files]),
        settings=_joined([file.held.settings for file in files]),
        variables=_joined([file.held.variables for file in files]),
    )


def _joined(mappings: Sequence[dict[str, str]]) -> dict[str, str]:
    names = sorted({name for values in mappings for name in values})
    return {name: " and ".join(sorted({values[name] for values in mappings if name in values})) for name in names}


def _check_alike(files: Sequence[FileRead]) -> None:
    first: dict[str, tuple[str, str]] = {}
    for file in files:
        facts = {f"version of {name}": value for name, value in file.held.versions.items()}
        if file.held.device_names:
            facts["device"] = " and ".join(sorted(file.held.device_names))
        for what, value in facts.items():
            known, where = first.setdefault(what, (value, file.log.path))
            if known != value:
                raise UserError(
                    f"{where} and {file.log.path} were written in different environments ({what} {known!r} against"
                    f" {value!r}); import them apart, or give --force to merge them anyway"
                )


def write_import(
    output: Path,
    importer: Importer,
    files: Sequence[FileRead],
    *,
    environment: Environment,
    command_line: tuple[str, ...],
    arguments: dict[str, str],
) -> ImportSummary:
    """Write a measurement directory; the manifest says at the end that it is complete.

    Where an import was killed, or its disk was full, the same command writes all of its files again. Where the very
    same is there already, nothing is written: the import may have been killed behind its last write.

    Raises:
        UserError: another import is there already, or nothing was read that a directory could hold.
        WorkError: the disk is full or the folder can't be written.
    """
    summary = summarise(importer, files)
    contents = _contents(files, summary)
    if is_complete(output):
        manifest = read_manifest(output)
        same = (manifest.imported, manifest.environment) == (summary.files, environment)
        if same and _holds(output, contents):
            return summary
        raise UserError(f"{output} exists already; give an empty or new directory")
    directory = MeasurementDirectory.open(
        output, kind=importer.kind, arguments=arguments, command_line=command_line, environment=environment
    )
    for name, content in contents.items():
        write_bytes_atomically(output / name, content)
    directory.manifest = msgspec.structs.replace(
        directory.manifest, command_line=command_line, environment=environment, imported=summary.files
    )
    directory.finish()
    return summary


def _holds(directory: Path, contents: dict[str, bytes]) -> bool:
    """Whether these files are there, byte for byte."""
    for name, content in contents.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != len(content):
            return False
        if read_whole(path, most_bytes=len(content)) != content:
            return False
    return True


def _contents(files: Sequence[FileRead], summary: ImportSummary) -> dict[str, bytes]:
    """What is written, by the file's name."""
    records: dict[str, Sequence[msgspec.Struct]] = {
        COLLECTIVES_FILE: numbered([record for file in files for record in file.held.collectives]),
        LAYERS_FILE: numbered([record for file in files for record in file.held.layers]),
        KERNELS_FILE: numbered([record for file in files for record in file.held.kernels]),
        BATCHES_FILE: numbered([record for file in files for record in file.held.batches]),
    }
    documents = {f"network-{file_name(network.name)}.json": encode_pretty(network) for network in _networks(files)}
    clusters = [cluster for file in files for cluster in file.held.clusters]
    documents |= {f"cluster-{file_name(cluster.name)}.yaml": msgspec.yaml.encode(cluster) for cluster in clusters}
    # A trace's sums alone are nothing that is fitted.
    if not (any(records.values()) or documents):
        raise UserError(_nothing(summary, [file.held.left_out for file in files if file.held.left_out]))
    rows: dict[str, Sequence[msgspec.Struct]] = {
        **records,
        TRACE_FILE: [trace for file in files for trace in file.held.traces],
        DROPPED_FILE: summary.dropped,
    }
    return documents | {name: encode_lines(held) for name, held in rows.items() if held}


def _nothing(summary: ImportSummary, left_out: Sequence[Sequence[str]]) -> str:
    names = ", ".join(file.path for file in summary.files)
    if left_out:
        more = f" (and so of {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        return f"no file could be used: {'; '.join(left_out[0])}{more}"
    if not summary.dropped:
        return f"{names}: nothing that could be used" + (f" ({summary.notes[0]})" if summary.notes else "")
    why, count = Counter(item.why for item in summary.dropped).most_common(1)[0]
    first = next(item for item in summary.dropped if item.why == why)
    return f"{names}: no row could be used; {count} were dropped, first {first.file} line {first.line}: {why}"


def _networks(files: Sequence[FileRead]) -> list[ModelGraph]:
    networks: dict[str, tuple[ModelGraph, str]] = {}
    for file in files:
        for network in file.held.networks:
            if network.name in networks:
                raise UserError(f"{networks[network.name][1]} and {file.log.path} both describe {network.name}")
            networks[network.name] = network, file.log.path
    return [network for network, _ in networks.values()]


def numbered(records: Sequence[T]) -> list[T]:
    """Records with their block: a point that several runs measured has a block a run."""
    met: Counter[object] = Counter()
    result = []
    for record in records:
        point: object = operator.attrgetter(*_POINT[type(record)])(record)
        if isinstance(record, KernelSamples):
            point = msgspec.json.encode(point)  # sizes are no key of a dict
        result.append(msgspec.structs.replace(record, block=met[point]))
        met[point] += 1
    return result
