"""The commands that ``random_kill.py`` kills, and what is whole of their results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from calibrate.cli import main as calibrate  # noqa: E402
from calibrate.profile.profile import read_profile  # noqa: E402
from paradl_bench.cli import main as paradl_bench  # noqa: E402
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples  # noqa: E402
from paradl_bench.records.input_record import FILES_FILE, LOADER_FILE, FileSamples, LoaderSamples  # noqa: E402
from paradl_bench.records.measurement import COLLECTIVES_FILE, ITERATIONS_FILE, LAYERS_FILE, read_manifest, read_records  # noqa: E402
from paradl_bench.records.samples import CollectiveSamples, IterationSamples, LayerSamples  # noqa: E402
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, read_run  # noqa: E402
from predict.cli import main as predict  # noqa: E402

RANKS = 2
_BLOCKS = 4
_SIZES = (1024, 16384, 262144)
_ITERATIONS = 200
_MODEL = "cosmoflow"
_SAMPLE = ("--input-shape", "4x8x8x8")
_KERNELS = ("kernels", "--samples", "12", "--blocks", "2", "--kinds", "conv,linear", "--kernel-limit", "0.01s")
_INPUT = ("io", "synthetic", "--samples", "6", "--blocks", "2", "--batch", "2", "--workers", "0,1", "--crop", "32")
_IMPORTED = 4000
"""Rows: an import of few is over before a kill falls on it."""


class Lost(Exception):
    """Something that was measured is gone, cannot be read, or cannot be gone on with."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """A command that is killed.

    Attributes:
        arguments: without ``-o``.
        check_whole: raises where a finished result is not complete, each point once.
        loads_itself: it is started as a user does, since threads that it starts don't outlive a fork.
    """

    name: str
    arguments: tuple[str, ...]
    check_whole: Callable[[Path], None]
    ranks: int = RANKS
    main: Callable[[], None] = paradl_bench
    loads_itself: bool = False


def whole_layers(directory: Path) -> None:
    """Every block of every rank once."""
    keys = [(record.rank, record.block) for record in read_records(directory, ITERATIONS_FILE, IterationSamples)]
    _expect(sorted(keys), [(rank, block) for rank in range(RANKS) for block in range(_BLOCKS)])


def whole_sweep(directory: Path) -> None:
    """Every point once."""
    records = read_records(directory, COLLECTIVES_FILE, CollectiveSamples)
    keys = [(record.operation, record.message_bytes, record.block) for record in records]
    expected = [
        (name, size, block) for name in ("all_gather", "all_reduce") for size in _SIZES for block in range(_BLOCKS)
    ]
    _expect(sorted(keys), expected)


def whole_training(directory: Path) -> None:
    """Every iteration of every rank once, and its loss."""
    for rank in range(RANKS):
        own = [r for r in read_records(directory, TRAINING_FILE, TrainingIterations) if r.rank == rank]
        indices = [record.first_iteration + i for record in own for i in range(len(record.iteration_s))]
        _expect(indices, list(range(_ITERATIONS)))
    _expect(len(read_run(directory).losses), _ITERATIONS)


def whole_layer_rows(directory: Path) -> None:
    """As :func:`whole_layers`, and each row of a layer once."""
    whole_layers(directory)
    records = read_records(directory, LAYERS_FILE, LayerSamples)
    keys = [
        (r.model, r.layer, r.operation, r.phase, r.mode, r.batch, r.rank, r.block, r.ranks_on_host) for r in records
    ]
    _expect(len(keys), len(set(keys)))


def whole_kernels(directory: Path) -> None:
    """Every kernel once in each block, and some."""
    keys = [(str(r.shape), r.dtype, r.block) for r in read_records(directory, KERNELS_FILE, KernelSamples)]
    _expect((bool(keys), len(keys)), (True, len(set(keys))))


def whole_input(directory: Path) -> None:
    """Every step of every block once."""
    files = [(record.condition, record.block) for record in read_records(directory, FILES_FILE, FileSamples)]
    loaded = [
        (record.block, record.workers, record.batch) for record in read_records(directory, LOADER_FILE, LoaderSamples)
    ]
    _expect((len(files), len(loaded)), (len(set(files)), len(set(loaded))))
    _expect((bool(files), bool(loaded)), (True, True))


def whole_import(directory: Path) -> None:
    """Every row of the log once."""
    sizes = [record.message_bytes for record in read_records(directory, COLLECTIVES_FILE, CollectiveSamples)]
    _expect((len(sizes), len(set(sizes))), (_IMPORTED, _IMPORTED))
    _expect(read_manifest(directory).complete, True)


def whole_predictions(path: Path) -> None:
    """All of the predictions."""
    _expect(len(json.loads(path.read_text())), 1)


def _expect(found: object, expected: object) -> None:
    if found != expected:
        raise Lost(f"found {found}, expected {expected}")


def subjects(measured: Path) -> Iterator[Subject]:
    """The commands; ``calibrate fit`` reads what ``layers`` and ``collectives`` left in ``measured``."""
    layers = ("layers", _MODEL, "--batch", "2", *_SAMPLE, "--ranks-on-host", str(RANKS))
    yield Subject(
        name="layers",
        arguments=(*layers, "--blocks", str(_BLOCKS), "--iterations", "3", "--isolated", "none"),
        check_whole=whole_layer_rows,
    )
    sizes = ",".join(map(str, _SIZES))
    sweep = ("collectives", "--ranks", str(RANKS), "--ops", "all_gather,all_reduce", "--sizes", sizes)
    yield Subject(
        name="collectives",
        arguments=(*sweep, "--blocks", str(_BLOCKS), "--point-seconds", "0.05"),
        check_whole=whole_sweep,
    )
    yield Subject(
        name="train",
        arguments=(
            *("train", _MODEL, "--strategy", f"d{RANKS}", "--batch", "4", *_SAMPLE),
            *("--iterations", str(_ITERATIONS)),
        ),
        check_whole=whole_training,
    )
    yield Subject(
        name="calibrate",
        arguments=("fit", str(measured / "layers"), str(measured / "collectives"), "--force"),
        check_whole=lambda path: _expect(bool(read_profile(path).layer_times), True),
        ranks=1,
        main=calibrate,
        loads_itself=True,
    )
    yield from _of_one_process(measured)


def _of_one_process(measured: Path) -> Iterator[Subject]:
    log = measured / "osu.log"
    rows = "".join(f"{8 + 8 * number} {1.5 + number / 1000}\n" for number in range(_IMPORTED))
    log.write_text(f"# OSU MPI Allreduce Latency Test v7.0\n# Size       Avg Latency(us)\n{rows}")
    yield Subject(
        name="import",
        arguments=("import", "osu", str(log), "--ranks", "4", "--level", "node"),
        check_whole=whole_import,
        ranks=1,
    )
    yield Subject(name="kernels", arguments=_KERNELS, check_whole=whole_kernels, ranks=1)
    yield Subject(name="io", arguments=_INPUT, check_whole=whole_input, ranks=1)
    profile = measured / "profile.json"
    yield Subject(
        name="merge",
        arguments=("merge", str(profile), str(measured / "other.json"), "--force"),
        check_whole=lambda path: _expect(bool(read_profile(path).layer_times), True),
        ranks=1,
        main=calibrate,
    )
    yield Subject(
        name="predict",
        arguments=(
            *("--from-profile", str(profile), "--model", _MODEL, "--batch", "2", "--strategy"),
            *("serial", "--force"),
        ),
        check_whole=whole_predictions,
        ranks=1,
        main=predict,
    )
