"""What is fuzzed: readers of foreign files and of the command line, and loaders of our own."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from regressor_targets import archive_target, values_target

from calibrate.fitting import reading
from calibrate.profile.profile import read_profile
from paradl_bench.api.directory_files import RECORDS
from paradl_bench.core import units
from paradl_bench.core.errors import ParadlError, shown
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import Importer, ImportOptions, LogFile, unpacked
from paradl_bench.importers.training_programs.program import read_launch
from paradl_bench.importers.writing import FileRead, environment_of, numbered, summarise
from paradl_bench.measure.kernels.design import read_design
from paradl_bench.measure.kernels.request import DESIGN_FILE
from paradl_bench.network import graph as network
from paradl_bench.network.kernel import KernelSamples
from paradl_bench.network.replacement.inserted import insert
from paradl_bench.network.replacement.modules import Misfit
from paradl_bench.network.replacement.written import parse_replacement
from paradl_bench.plan.strategy import parse_strategy, parse_strategy_kinds
from paradl_bench.records.measurement import MANIFEST_NAME, read_manifest, read_records
from paradl_bench.records.training.training_record import RUN_NAME, read_run
from paradl_bench.slurm.jobs.plan import PLAN, SUBMITTED, read_plan, read_submitted
from paradl_bench.slurm.jobs.site import read_site
from paradl_bench.tools.mpi_sweep import read as mpi_read
from predict.costs import files as inputs
from predict.validation.runs import read_runs

DATA = Path(__file__).parents[1] / "data"
Target = Callable[[bytes], bool]
"""Takes bytes and returns whether they were refused.

It raises nothing but the project's own errors, whose text is one line that can be printed; what it reads can be written
again and reads back the same.
"""
TOLD = ImportOptions(
    ranks=4,
    level="node",
    batch=8,
    iterations=20,
    mapping=str(DATA / "imports" / "operators.yaml"),
    keep=frozenset({"empty", "wrong", "failed"}),
)
"""Everything is taken that can be: the parser goes as far as it can."""
UNTOLD = ImportOptions()
_OPTIONS = (TOLD, TOLD, UNTOLD)


@contextlib.contextmanager
def expected_errors() -> Iterator[list[str]]:
    """Let the project's own errors pass, if their text can be printed; yields what was refused."""
    refused: list[str] = []
    try:
        yield refused
    except ParadlError as error:
        line = shown(str(error))
        assert line.strip(), "an error without words"
        line.encode()
        refused.append(line)


def _import_target(importer: Importer) -> Target:
    def read(content: bytes) -> bool:
        # Which options: of the input itself, so that a finding repeats.
        options = _OPTIONS[zlib.crc32(content) % len(_OPTIONS)]
        with expected_errors() as refused:
            log = LogFile(path="a.log", content=unpacked("a.log", content), sha256="0")
            held = importer.read(log, options)
            files = [FileRead(log=log, held=held)]
            environment = environment_of(files, cluster=None, device_name=None, memory_bytes=0, force=False)
            _round_trip([environment, summarise(importer, files), *held.networks, *held.clusters, *held.traces])
            _round_trip([*numbered(held.collectives), *held.layers, *numbered(held.kernels)])
        return bool(refused)

    return read


def _round_trip(records: Iterable[msgspec.Struct]) -> None:
    by_kind: dict[type[msgspec.Struct], list[msgspec.Struct]] = {}
    for record in records:
        by_kind.setdefault(type(record), []).append(record)
    for kind, held in by_kind.items():
        assert msgspec.json.decode(msgspec.json.encode(held), type=list[kind]) == held  # type: ignore[valid-type]


class _Folder:
    """A folder whose one file is replaced for every input; in memory where the system has such a place."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        place = memory if os.access(memory, os.W_OK) else None
        self.holder = tempfile.TemporaryDirectory(dir=place)
        self.path = Path(self.holder.name)

    def target(self, name: str, read: Callable[[Path], object], **beside: bytes) -> Target:
        folder = self.path / f"{name}.d"
        folder.mkdir(exist_ok=True)
        for other, content in beside.items():
            (folder / other.replace("_json", ".json")).write_bytes(content)

        def load(content: bytes) -> bool:
            (folder / name).write_bytes(content)
            with expected_errors() as refused:
                found = read(folder / name)
                records = found if isinstance(found, list) else [found]
                _round_trip(record for record in records if isinstance(record, msgspec.Struct))
            return bool(refused)

        return load

    def directory_target(self, name: str, read: Callable[[Path], object]) -> Target:
        """A whole measurement directory, written as one text: ``>>> FILE`` before the content of each file."""
        folder = self.path / f"{name}.d"
        folder.mkdir(exist_ok=True)

        def load(content: bytes) -> bool:
            for old in folder.iterdir():
                old.unlink()
            parts = _FILE_MARK.split(content)
            for file, text in zip(parts[1::2], parts[2::2], strict=True):
                (folder / file.decode()).write_bytes(text)
            with expected_errors() as refused:
                read(folder)
            return bool(refused)

        return load


_FILE_MARK = re.compile(rb"^>>> ([a-z-]{1,40}\.jsonl?)\n", re.MULTILINE)
FOLDER = _Folder()


def _text_target(parse: Callable[[str], object]) -> Target:
    def read(content: bytes) -> bool:
        with expected_errors() as refused:
            # As Python takes what is typed.
            parse(content.decode("utf-8", "surrogateescape"))
        return bool(refused)

    return read


def _strategy(text: str) -> None:
    strategy = parse_strategy(text)
    assert parse_strategy(str(strategy)) == strategy
    assert strategy.ranks >= 1


def _swept(parse: Callable[[str], tuple[int, ...]]) -> Callable[[str], None]:
    def read(text: str) -> None:
        found = parse(text)
        assert found
        assert all(0 < value < 2**63 for value in found)

    return read


def _replacement(text: str) -> None:
    found = parse_replacement(text)
    assert found.pattern
    for written in found.modules:
        with contextlib.suppress(Misfit):
            insert(written, "new", "before", (8, 16, 16))


STRINGS: dict[str, tuple[Callable[[str], object], str]] = {
    "strategy": (_strategy, "d4 f8 c4 s2x2x2 z3d8p2 d4f4 2M4P1D d2p2f2 serial t4"),
    "strategy-kinds": (parse_strategy_kinds, "d+f data+filter serial d+s d+c+p tensor"),
    "size": (units.parse_size, "64M 1GiB 16e9 4096 1.5K 3TB 12b"),
    "sizes": (_swept(units.parse_size_sweep), "1K:64M:2 1K,4K,1M 4:8M 1:1G:1.5"),
    "ranks": (_swept(units.parse_ranks), "16:1024:x2 2:10:2 8 2,4,8 1:64:x1.5"),
    "shape": (_swept(units.parse_shape), "3x224x224 4x128x128x128 1024"),
    "replacement": (
        _replacement,
        "a.*=none b=conv2d(8,4,3x5,2,padding=1x2,bias=false)+relu c=flatten+linear(*,10)+layer_norm(*)+dropout(0.5)"
        " d=max_pool2d(2)+batch_norm(8)+adaptive_avg_pool2d(1) e=conv2d(*,8,3,groups=8)+group_norm(4,*)",
    ),
}
"""What the command line takes, with examples."""


def targets() -> dict[str, Target]:
    """Every target by name."""
    if not _TARGETS:
        _TARGETS.update({name: _import_target(importer) for name, importer in importers().items()})
        sweep = Importer(name="mpi4py", reads="a sweep of ours", kind="collectives", reader=mpi_read)
        _TARGETS["mpi4py"] = _import_target(sweep)
        _TARGETS.update({name: _text_target(parse) for name, (parse, _) in STRINGS.items()})
        _TARGETS.update(_loaders())
    return dict(_TARGETS)


_TARGETS: dict[str, Target] = {}


def _loaders() -> dict[str, Target]:
    readers: dict[str, Callable[[Path], object]] = {
        "profile.json": read_profile,
        "network.json": network.read_network,
        "cluster.yaml": inputs.read_cluster,
        "mapping.yaml": _mapped,
        MANIFEST_NAME: lambda path: read_manifest(path.parent),
        RUN_NAME: lambda path: read_run(path.parent),
    }
    readers |= {
        DESIGN_FILE: read_design,
        "site.yaml": read_site,
        **{f"launch.{suffix}": _launch for suffix in ("args", "toml", "json", "yaml")},
        PLAN: lambda path: read_plan(path.parent),
        SUBMITTED: lambda path: read_submitted(path.parent),
        "regressors.npz": archive_target(FOLDER.path),
        "regressors": values_target(FOLDER.path),
    }
    found = {name: FOLDER.target(name, read) for name, read in readers.items()}
    manifest = (DATA / "collectives-v1" / MANIFEST_NAME).read_bytes()
    for name, kind in RECORDS.items():
        found[name] = FOLDER.target(name, _reader_of(kind), manifest_json=manifest)
    found["measurements"] = FOLDER.directory_target(
        "measurements", lambda folder: reading.read_measurements([folder], force=False)
    )
    found["runs"] = FOLDER.directory_target("runs", lambda folder: read_runs([folder]))
    return found


def _launch(path: Path) -> None:
    """Options that a file of a program that trains says; its strategy is one."""
    _strategy(read_launch(path, 8).launch.as_options["strategy"])


def _mapped(path: Path) -> list[KernelSamples]:
    """Kernels that a mapping finds in a table, and in a JSON file of the same columns."""
    found: list[KernelSamples] = []
    for table in ("operators.csv", "operators.json"):
        log = LogFile(path=table, content=(DATA / "imports" / table).read_bytes(), sha256="0")
        found += importers()["operators"].read(log, ImportOptions(mapping=str(path))).kernels
    return found


def _reader_of(kind: type[msgspec.Struct]) -> Callable[[Path], object]:
    return lambda path: read_records(path.parent, path.name, kind)
