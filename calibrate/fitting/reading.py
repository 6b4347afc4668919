"""Measurement directories as the fits read them: checked for likeness, with their provenance."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from calibrate.fitting.input_fit import InputRecords
from calibrate.profile.profile import Source
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import PIECE_BYTES, open_regular
from paradl_bench.core.statistics import grouped
from paradl_bench.measure.machine.node_findings import lines_of_nodes
from paradl_bench.measure.stragglers.pace import sweep_pace
from paradl_bench.network.graph import ModelGraph, read_network
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.records.contexts.older import read_contexts
from paradl_bench.records.contexts.swept_groups import swept_groups
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_load import read_load
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.input_record import (
    BATCHES_FILE,
    FILES_FILE,
    LOADER_FILE,
    UNREADABLE_FILE,
    BatchSamples,
    FileSamples,
    LoaderSamples,
    UnreadableFile,
)
from paradl_bench.records.measurement import (
    COLLECTIVES_FILE,
    COPIES_FILE,
    ITERATIONS_FILE,
    LAYERS_FILE,
    NOT_WHOLE,
    UNKNOWN_DEVICE,
    Environment,
    Manifest,
    read_manifest,
    read_records,
    torn_rows,
)
from paradl_bench.records.roofline_record import RATES_FILE, RateSamples
from paradl_bench.records.samples import (
    CollectiveSamples,
    CopySamples,
    IterationSamples,
    LayerSamples,
)

T = TypeVar("T", bound=msgspec.Struct)

_SHOWN_DIFFERENCES = 3
_IN_RECORDS = {f"settings.{name}" for name in ("dtype", "tf32_matmul", "tf32_cudnn", "cudnn_benchmark")}
"""What records say themselves, so that unlike ones do not mix."""
_TORCH = "torch"
"""A version that all programs of this project record, and other tools do not."""
_COMPILER = "compiler"
"""A setting of what was compiled; records say whether."""


class Placed(NamedTuple, Generic[T]):
    """A record and the number of its directory: equal blocks of two directories are two blocks."""

    directory: int
    record: T


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything read from some measurement directories.

    Attributes:
        environments: distinct ones; ``sources`` name theirs by index.
        networks: by model name.
        imported: numbers of the directories that were made of files of other tools.
    """

    sources: tuple[Source, ...]
    environments: tuple[Environment, ...]
    networks: dict[str, ModelGraph]
    layers: tuple[Placed[LayerSamples], ...]
    iterations: tuple[Placed[IterationSamples], ...]
    copies: tuple[Placed[CopySamples], ...]
    collectives: tuple[Placed[CollectiveSamples], ...]
    contexts: tuple[Placed[ContextSamples], ...]
    notes: tuple[str, ...]
    imported: frozenset[int] = frozenset()
    rates: tuple[Placed[RateSamples], ...] = ()
    kernels: tuple[Placed[KernelSamples], ...] = ()
    input: Mapping[str, InputRecords] = field(default_factory=dict)


def read_measurements(directories: Sequence[Path], *, force: bool) -> Measurements:
    """Read directories of layers and collectives; ``force`` merges those measured in different environments.

    Raises:
        UserError: none given, not a measurement, a training run, one given twice, other environments, a wrong record.
    """
    if not directories:
        raise UserError("no measurement directory given; write calibrate fit DIR... -o PROFILE")
    manifests = [_manifest_of(directory) for directory in directories]
    notes = _check_alike(directories, manifests, force=force)
    environments: list[Environment] = []
    sources = []
    for directory, manifest in zip(directories, manifests, strict=True):
        if manifest.environment not in environments:
            environments.append(manifest.environment)
        sources.append(_source(directory, manifest, environments.index(manifest.environment)))
        if not manifest.complete:
            command = " ".join(manifest.command_line)
            notes.append(f"{directory} is incomplete (interrupted?); its measurements are used; to go on: {command}")
        load = sources[-1].host_load
        if load is not None and load.is_busy:
            notes.append(f"{directory} was measured on a busy host: {load.words}; measure it again on a quiet one")
        notes += _torn(directory, manifest)
        notes += [note for file in manifest.imported for note in file.notes if NOT_WHOLE in note]
        if manifest.kind == "collectives" and not manifest.imported:
            sweeps = read_records(directory, COLLECTIVES_FILE, CollectiveSamples)
            pace = sweep_pace(sweeps, read_host_records(directory), _contexts(directory))
            notes += [f"{directory}: {line}" for line in (*lines_of_nodes(directory), *pace.lines())]
    _check_distinct(sources)
    collectives = _records(directories, COLLECTIVES_FILE, CollectiveSamples)
    contexts = [(index, record) for index, place in enumerate(directories) for record in _contexts(place)]
    return Measurements(
        sources=tuple(sources),
        environments=tuple(environments),
        networks=_networks(directories),
        layers=_records(directories, LAYERS_FILE, LayerSamples),
        iterations=_records(directories, ITERATIONS_FILE, IterationSamples),
        copies=_records(directories, COPIES_FILE, CopySamples),
        collectives=collectives,
        contexts=tuple(Placed(*placed) for placed in (*contexts, *swept_groups(collectives))),
        notes=tuple(notes),
        imported=frozenset(index for index, manifest in enumerate(manifests) if manifest.imported),
        rates=_records(directories, RATES_FILE, RateSamples),
        input=_input(directories, manifests),
        kernels=_records(directories, KERNELS_FILE, KernelSamples),
    )


def _torn(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What a killed writer left, and hosts that a requeued job moved to."""
    for name, size in torn_rows(directory).items():
        yield f"{directory}/{name} ends in a partly written row: 1 row of {size} bytes is left out"
    if manifest.also_on:
        hosts = ", ".join(manifest.also_on)
        yield f"{directory} was begun on {manifest.environment.hostname} and continued on {hosts}"


def _manifest_of(directory: Path) -> Manifest:
    manifest = read_manifest(directory)
    if manifest.kind == "training":
        raise UserError(
            f"{directory} holds a training run, and predictions are never fitted to the runs that check them."
            " Give directories of paradl-bench layers and collectives; to use only a run's memory, give it as"
            " --memory-runs"
        )
    return manifest


def _check_alike(directories: Sequence[Path], manifests: Sequence[Manifest], *, force: bool) -> list[str]:
    notes = []
    for directory, manifest in zip(directories[1:], manifests[1:], strict=True):
        differences = _differences(manifests[0], manifest)
        if not differences:
            continue
        text = f"{directories[0]} and {directory} were measured in different environments ({first_few(differences)})"
        if not force:
            # Logs of one cluster differ in hosts, for which a name can stand.
            of_hosts = any(difference.startswith("hostname ") for difference in differences)
            named = manifests[0].imported and manifest.imported and of_hosts
            how = (
                "import both with --cluster NAME if their nodes are alike"
                if named
                else "measure both in one environment"
            )
            raise UserError(f"{text}; {how}, or give --force to merge them anyway")
        notes.append(f"{text}; merged because of --force")
    return notes


def first_few(differences: Sequence[str]) -> str:
    """The first differences of environments, and how many more there are."""
    more = len(differences) - _SHOWN_DIFFERENCES
    return ", ".join(differences[:_SHOWN_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def _differences(one: Manifest, other: Manifest) -> list[str]:
    """What makes two measurements unlike; between kinds or programs, what only one of them records makes none."""
    mine, theirs = one.environment, other.environment
    if one.kind != other.kind or (_TORCH in mine.versions) != (_TORCH in theirs.versions):
        return unlike(mine, theirs)
    if (_COMPILER in mine.settings) != (_COMPILER in theirs.settings):
        mine, theirs = (
            msgspec.structs.replace(side, settings={k: v for k, v in side.settings.items() if k != _COMPILER})
            for side in (mine, theirs)
        )
    return [text for text in mine.differences(theirs) if text.split(" ")[0] not in _IN_RECORDS]


def unlike(one: Environment, other: Environment) -> list[str]:
    """What makes environments of measurements of two kinds unlike; what only one records makes none.

    Layers know no version of MPI, sweeps of MPI none of torch, and a program that says nothing of a device runs on one.
    """
    names = {one.device_name, other.device_name}
    one, other = (
        msgspec.structs.replace(
            side,
            device_name=UNKNOWN_DEVICE if UNKNOWN_DEVICE in names else side.device_name,
            versions={key: side.versions[key] for key in sorted(one.versions.keys() & other.versions.keys())},
            settings={key: side.settings[key] for key in sorted(one.settings.keys() & other.settings.keys())},
        )
        for side in (one, other)
    )
    return [text for text in one.differences(other) if text.split(" ")[0] not in _IN_RECORDS]


def unlike_nearest(known: Iterable[Environment], other: Environment) -> list[str]:
    """What makes an environment unlike the one of several that it is most like, of those that tell most of the same."""
    told = [(-len(env.versions.keys() & other.versions.keys()), unlike(env, other)) for env in known]
    return min(told, key=lambda ranked: (ranked[0], len(ranked[1])), default=(0, []))[1]


def _source(directory: Path, manifest: Manifest, environment: int) -> Source:
    return Source(
        path=str(directory),
        kind=manifest.kind,
        command_line=manifest.command_line,
        created_utc=manifest.created_utc,
        sha256=directory_hash(directory),
        environment=environment,
        complete=manifest.complete,
        host_load=read_load(directory),
    )


def directory_hash(directory: Path) -> str:
    """SHA-256 over names and contents of a directory's files (hidden ones, which are temporary, left out)."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            with open_regular(path) as stream:
                digest.update(f"{name}\0{os.fstat(stream.fileno()).st_size}\0".encode())
                while piece := stream.read(PIECE_BYTES):
                    digest.update(piece)
    return digest.hexdigest()


def _check_distinct(sources: Iterable[Source]) -> None:
    seen: dict[str, str] = {}
    for source in sources:
        if source.sha256 in seen:
            raise UserError(f"{seen[source.sha256]} and {source.path} hold the same measurement; give it once")
        seen[source.sha256] = source.path


def _records(directories: Sequence[Path], name: str, of: type[T]) -> tuple[Placed[T], ...]:
    return tuple(
        Placed(index, record)
        for index, directory in enumerate(directories)
        for record in read_records(directory, name, of)
    )


def _contexts(directory: Path) -> list[ContextSamples]:
    """Collectives in contexts, with arrivals on one clock as far as those of all hosts are known."""
    clocks = HostClocks(read_host_records(directory))
    return [record.aligned(clocks) for record in read_contexts(directory)]


def _input(directories: Sequence[Path], manifests: Sequence[Manifest]) -> dict[str, InputRecords]:
    """What was measured of the input side, by the source that samples were read from."""
    placed = zip(directories, manifests, strict=True)
    of_sources = grouped(placed, lambda place: place[1].arguments.get("source", ""))

    def of(places: Sequence[Path], name: str, kind: type[T]) -> tuple[T, ...]:
        return tuple(record for _, record in _records(places, name, kind))

    read = {
        source: InputRecords(
            of(places, FILES_FILE, FileSamples),
            of(places, BATCHES_FILE, BatchSamples),
            of(places, LOADER_FILE, LoaderSamples),
            of(places, UNREADABLE_FILE, UnreadableFile),
        )
        for source, of_source in of_sources.items()
        for places in [[directory for directory, _ in of_source]]
    }
    return {source: records for source, records in read.items() if any(records)}


def _networks(directories: Sequence[Path]) -> dict[str, ModelGraph]:
    networks: dict[str, tuple[ModelGraph, Path]] = {}
    for directory in directories:
        for path in sorted(directory.glob("network*.json")):
            network = read_network(path)
            known, where = networks.setdefault(network.name, (network, path))
            if not same_work(known, network):
                shapes = ["x".join(map(str, graph.input_shape)) for graph in (known, network)]
                unlike = "with inputs of " + " and ".join(shapes) if shapes[0] != shapes[1] else "as different networks"
                raise UserError(
                    f"{where} and {path}: {network.name} was measured {unlike}; a profile holds one: fit two profiles"
                )
    return {name: network for name, (network, _) in sorted(networks.items())}


def same_work(one: ModelGraph, other: ModelGraph) -> bool:
    """Whether two networks take the same input through the same layers."""
    labels = ("input_shape", "layers", "parameters", "buffers")
    return all(getattr(one, label) == getattr(other, label) for label in labels)
