"""What is fuzzed: readers of foreign files and loaders of our own; any bytes give a result or one error.

A target takes bytes. It raises nothing but the project's own errors, whose text is one line; what it reads can be
written again and reads back the same.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from calibrate.profile import read_profile
from calibrate.reading import read_network
from paradl_bench.measure.importers.catalog import importers
from paradl_bench.measure.importers.importer import Importer, ImportOptions, LogFile, unpacked
from paradl_bench.measure.importers.writing import FileRead, environment_of, numbered, summarise
from paradl_bench.measure.tools.mpi_sweep import read as mpi_read
from paradl_bench.spec.errors import ParadlError
from paradl_bench.spec.measurement import (
    COLLECTIVES_FILE,
    LAYERS_FILE,
    MANIFEST_NAME,
    CollectiveSamples,
    LayerSamples,
    read_manifest,
    read_records,
    read_run,
)

DATA = Path(__file__).parent / "data"
Target = Callable[[bytes], None]

TOLD = ImportOptions(ranks=4, level="node", batch=8, iterations=20, keep=frozenset({"empty", "wrong", "failed"}))
"""Everything is taken that can be: the parser goes as far as it can."""
UNTOLD = ImportOptions()
_SEEDS = {
    "nccl-tests": ("nccl-tests*", "rccl*"),
    "rccl-tests": ("rccl*", "nccl-tests-2.17.log"),
    "osu": ("osu*",),
    "imb": ("imb*",),
    "kineto": ("kineto*",),
    "ssgd-trace": ("ssgd*",),
    "pipedream": ("pipedream*",),
    "paradl-net": ("*.net", "*.plat"),
}


def _import_target(importer: Importer) -> Target:
    def read(content: bytes) -> None:
        for options in (TOLD, UNTOLD):
            with expected_errors():
                log = LogFile(path="a.log", content=unpacked("a.log", content), sha256="0")
                held = importer.read(log, options)
                files = [FileRead(log=log, held=held)]
                environment = environment_of(files, cluster=None, device_name=None, memory_bytes=0, force=False)
                _round_trip(environment, summarise(importer, files), *held.networks, *held.clusters, *held.traces)
                _round_trip(*numbered(held.collectives), *held.layers)

    return read


def _round_trip(*records: msgspec.Struct) -> None:
    for record in records:
        assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


@contextlib.contextmanager
def expected_errors() -> Iterator[None]:
    """Let the project's own errors pass, if their text is one line that can be printed."""
    try:
        yield
    except ParadlError as error:
        text = str(error)
        assert text.strip(), "an error without words"
        text.encode()


class _Folder:
    """A folder whose one file is replaced for every input; in memory where the system has such a place."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        place = memory if os.access(memory, os.W_OK) else None
        self.holder = tempfile.TemporaryDirectory(dir=place)
        self.path = Path(self.holder.name)

    def target(self, name: str, read: Callable[[Path], object], **beside: bytes) -> Target:
        folder = self.path / f"{name}.d"
        folder.mkdir()
        for other, content in beside.items():
            (folder / other.replace("_json", ".json")).write_bytes(content)

        def load(content: bytes) -> None:
            (folder / name).write_bytes(content)
            with expected_errors():
                read(folder / name)

        return load


_FOLDER = _Folder()


def targets() -> dict[str, Target]:
    """Every target by name."""
    manifest = (DATA / "collectives-v1" / MANIFEST_NAME).read_bytes()
    found = {name: _import_target(importer) for name, importer in importers().items()}
    found["mpi4py"] = _import_target(
        Importer(name="mpi4py", reads="a sweep of ours", kind="collectives", read=mpi_read)
    )
    for name, read, beside in (
        ("profile.json", read_profile, {}),
        ("network.json", read_network, {}),
        (MANIFEST_NAME, lambda path: read_manifest(path.parent), {}),
        ("run.json", lambda path: read_run(path.parent), {}),
        (COLLECTIVES_FILE, lambda path: read_records(path.parent, path.name, CollectiveSamples), manifest),
        (LAYERS_FILE, lambda path: read_records(path.parent, path.name, LayerSamples), manifest),
    ):
        held = {"manifest_json": beside} if isinstance(beside, bytes) else {}
        if not (_FOLDER.path / f"{name}.d").exists():
            _LOADERS[name] = _FOLDER.target(name, read, **held)
        found[name] = _LOADERS[name]
    return found


_LOADERS: dict[str, Target] = {}


def seeds(name: str) -> list[bytes]:
    """Files that a target reads well, to start from."""
    if name in _SEEDS:
        return [path.read_bytes() for pattern in _SEEDS[name] for path in sorted((DATA / "imports").glob(pattern))]
    if name == "mpi4py":
        head = b'{"hosts":["a","a"],"device_name":"cpu","versions":{"mpi":"x"}}\n'
        return [head + (DATA / "collectives-v1" / COLLECTIVES_FILE).read_bytes()[:20000]]
    if name == "profile.json":
        return [path.read_bytes() for path in sorted(DATA.glob("profile-v*.json"))]
    return [path.read_bytes()[:20000] for path in sorted(DATA.glob(f"*-v1/{name}"))] or [b"{}"]
