"""``paradl-bench io``: what it takes to feed a model with images, part by part, and through torch's DataLoader.

Parts (reading, decoding, transforms, collation, the copy to the device) are timed in one process that is pinned to a
core, as ranks are. The loader gets every core that the command was allowed, since its workers are to use them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.command_line import Progress, progress, say
from paradl_bench.measure.input.batches import measure_batches
from paradl_bench.measure.input.cores import on_cores
from paradl_bench.measure.input.files import TimedFiles, time_files
from paradl_bench.measure.input.folder import IMAGES_FOLDER, SYNTHETIC, find_images
from paradl_bench.measure.input.images import make_images, remove_images
from paradl_bench.measure.input.loader import measure_loader
from paradl_bench.measure.opening import open_directory
from paradl_bench.ranks.clocks import Clock, clock_for
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.groups.process_groups import RankContext
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
from paradl_bench.records.measurement import argument_texts


class InputRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``paradl-bench io`` is asked to measure.

    Attributes:
        source: a folder of images, or ``synthetic``, which ``keep`` leaves in the measurement directory.
        samples: files that are timed; the loader goes round them.
        loader_batches: at least so many behind the first, of every number of workers, in each block.
    """

    source: str
    device: str
    batches: tuple[int, ...]
    workers: tuple[int, ...]
    samples: int
    crop: int
    blocks: int
    loader_batches: int
    start: Literal["fork", "spawn"]
    keep: bool = False
    seed: int = 0

    def arguments(self) -> dict[str, str]:
        """Settings that two runs have to share for one to resume the other."""
        names = ("source", "samples", "crop", "blocks", "loader_batches", "start", "seed", "batches", "workers")
        return argument_texts(self, *names)


@dataclass(slots=True)
class _Run:
    """One measurement under way."""

    request: InputRequest
    context: RankContext
    cores: frozenset[int]
    directory: MeasurementDirectory
    clock: Clock
    paths: list[Path]
    unreadable: dict[Path, str] = field(default_factory=dict)

    @property
    def readable(self) -> list[Path]:
        return [path for path in self.paths if path not in self.unreadable]


def measure_input(
    request: InputRequest, context: RankContext, cores: frozenset[int], output: Path, command_line: tuple[str, ...]
) -> None:
    """Measure in this process; ``cores`` are those of the loader and its workers.

    Raises:
        UserError: no folder or image, a directory of something else, or no file that can be decoded.
        WorkError: images can't be written, or a worker of the loader died.
    """
    images = [] if request.source == SYNTHETIC else find_images(Path(request.source))
    settings = {"crop": str(request.crop), **context.settings}
    directory = open_directory(output, "input", request.arguments(), command_line, request.device, settings)
    done = _finished(directory)
    steps = [step for step in _steps(request) if step not in done]
    if directory.resumed:
        say(f"going on in {directory.path}: {len(steps)} of {len(_steps(request))} steps are left")
    with progress("io", len(steps) + request.samples * (not images and bool(steps))) as bar:
        if images or not steps:
            paths = random.Random(request.seed).sample(images, min(request.samples, len(images)))
        else:
            paths = _made(request, output / IMAGES_FOLDER, bar)
        run = _Run(request, context, cores, directory, clock_for(context.device), paths)
        run.unreadable = {Path(item.path): item.why for item in directory.records(UNREADABLE_FILE, UnreadableFile)}
        for step in steps:
            bar.describe(" ".join(map(str, step)))
            _measure(run, step)
            bar.advance()
    directory.finish()
    if not images and not request.keep:
        remove_images(paths, output / IMAGES_FOLDER)


def _made(request: InputRequest, folder: Path, bar: Progress) -> list[Path]:
    paths = []
    bar.describe("making images")
    for path in make_images(folder, request.samples, request.seed):
        paths.append(path)
        bar.advance()
    return paths


_Step = tuple[Literal["files", "batches", "loader"], int, int, int]
"""(what, block, workers, batch)."""


def _steps(request: InputRequest) -> list[_Step]:
    steps: list[_Step] = []
    for block in range(request.blocks):
        loaders: list[_Step] = [
            ("loader", block, count, batch) for count in request.workers for batch in request.batches
        ]
        random.Random(request.seed + block).shuffle(loaders)
        # Which files can be decoded is found out by the first step.
        steps += [("files", block, 0, 0), ("batches", block, 0, 0), *loaders]
    return steps


def _finished(directory: MeasurementDirectory) -> set[_Step]:
    done: set[_Step] = {("files", record.block, 0, 0) for record in directory.records(FILES_FILE, FileSamples)}
    done |= {("batches", record.block, 0, 0) for record in directory.records(BATCHES_FILE, BatchSamples)}
    loaded = directory.records(LOADER_FILE, LoaderSamples)
    return done | {("loader", record.block, record.workers, record.batch) for record in loaded}


def _measure(run: _Run, step: _Step) -> None:
    what, block, workers, batch = step
    request = run.request
    if what == "files":
        _measure_files(run, block)
    elif what == "batches":
        device, clock = run.context.device, run.clock
        records = measure_batches(run.readable, request.batches, request.crop, device, clock, block, request.seed)
        run.directory.append(BATCHES_FILE, records)
    else:
        with on_cores(run.cores):
            record = measure_loader(
                run.readable,
                workers=workers,
                batch=batch,
                crop=request.crop,
                least_batches=request.loader_batches,
                start=request.start,
                pinned=request.device == "cuda",
                block=block,
                seed=request.seed,
            )
        run.directory.append(LOADER_FILE, [record])


def _measure_files(run: _Run, block: int) -> None:
    request = run.request
    order = list(run.paths)
    random.Random(request.seed * 1000 + block).shuffle(order)
    passes: list[TimedFiles] = []
    for cold in (True, False):
        passes.append(time_files(order, cold=cold, crop=request.crop, seed=request.seed + block))
        order = [path for path in order if path not in passes[-1].unreadable]
    new = {path: why for timed in passes for path, why in timed.unreadable.items() if path not in run.unreadable}
    run.unreadable |= new
    if new:
        run.directory.append(UNREADABLE_FILE, [UnreadableFile(path=str(path), why=why) for path, why in new.items()])
    if not run.readable:
        path, why = next(iter(run.unreadable.items()))
        raise UserError(f"none of {len(run.paths)} files can be decoded, the first being {path}: {why}")
    run.directory.append(FILES_FILE, [timed.record(block) for timed in passes])
