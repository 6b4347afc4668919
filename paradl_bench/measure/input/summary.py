"""What ``paradl-bench io`` shows at once: seconds a sample of every part, and samples a second of the loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.frames import print_rows
from paradl_bench.core.statistics import sorted_groups
from paradl_bench.core.terminal.command_line import open_console, write_output
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_bytes, format_seconds
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
from paradl_bench.records.measurement import read_records

_SHOWN_UNREADABLE = 5
_CONDITIONS = {
    "cold": "from disk, dropped from the page cache before",
    "warm": "from the page cache",
    "not dropped": "the page cache could NOT be dropped, so files count as cached",
    "not known": "the kernel does not say whether the page cache was dropped",
}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one part, median and interquartile range; ``unit`` is what takes them: a sample, a batch, a copy."""

    part: str
    unit: str
    median_s: float
    iqr_s: float
    samples: int
    rate: str


class Loader(msgspec.Struct, frozen=True, kw_only=True):
    """Samples a second with so many workers, and lowest and highest of the blocks."""

    workers: int
    batch: int
    samples_per_s: float
    blocks_samples_per_s: tuple[float, float]
    first_s: float


class InputRow(msgspec.Struct, frozen=True, kw_only=True):
    """One part, or the loader with so many workers; what belongs to the other is missing."""

    part: str
    unit: str
    median_s: float | None = None
    iqr_s: float | None = None
    samples: int | None = None
    workers: int | None = None
    batch: int | None = None
    samples_per_s: float | None = None
    first_s: float | None = None


class InputSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of the input side at a glance."""

    parts: tuple[Part, ...]
    loaders: tuple[Loader, ...]
    unreadable: tuple[UnreadableFile, ...]


def summarise_input(directory: Path) -> InputSummary:
    """Statistics of a measurement directory."""
    files = read_records(directory, FILES_FILE, FileSamples)
    batches = read_records(directory, BATCHES_FILE, BatchSamples)
    loaded = read_records(directory, LOADER_FILE, LoaderSamples)
    return InputSummary(
        parts=(*_file_parts(files), *_batch_parts(batches)),
        loaders=tuple(_loaders(loaded)),
        unreadable=tuple(read_records(directory, UNREADABLE_FILE, UnreadableFile)),
    )


def _file_parts(files: Sequence[FileSamples]) -> Iterator[Part]:
    for condition, words in _CONDITIONS.items():
        read = [record for record in files if record.condition == condition]
        if read:
            seconds = np.concatenate([record.read_s for record in read])
            speed = sum(sum(record.bytes) for record in read) / seconds.sum()
            yield _part(f"read, {words}", "sample", seconds, f"{speed / 1e6:.4g} MB/s")
    if files:
        pixels = sum(sum(record.pixels) for record in files)
        for label in ("decode", "transform"):
            seconds = np.concatenate([getattr(record, f"{label}_s") for record in files])
            yield _part(label, "sample", seconds, f"{pixels / seconds.sum() / 1e6:.4g} Mpixel/s")


def _batch_parts(batches: Sequence[BatchSamples]) -> Iterator[Part]:
    groups = sorted_groups(batches, lambda record: (record.stage, record.how, record.batch, record.bytes))
    for (stage, how, batch, size), records in groups.items():
        seconds = np.concatenate([record.samples_s for record in records])
        words = {"memcpy": "copy within host memory (a CPU copies to no device)"}.get(how, f"{stage} {how}".strip())
        unit = f"batch of {batch}, {format_bytes(size)}" if batch else format_bytes(size)
        speed = f"{size / np.median(seconds) / 1e9:.4g} GB/s" if size and np.median(seconds) else ""
        yield _part(words, unit, seconds, speed)


def _part(name: str, unit: str, seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]], rate: str) -> Part:
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return Part(
        part=name, unit=unit, median_s=float(median), iqr_s=float(high - low), samples=int(seconds.size), rate=rate
    )


def _loaders(loaded: Sequence[LoaderSamples]) -> Iterator[Loader]:
    groups = sorted_groups(loaded, lambda record: (record.workers, record.batch))
    for (workers, batch), records in groups.items():
        rates = [batch * len(record.gaps_s) / sum(record.gaps_s) for record in records]
        yield Loader(
            workers=workers,
            batch=batch,
            samples_per_s=float(np.median(rates)),
            blocks_samples_per_s=(min(rates), max(rates)),
            first_s=float(np.median([record.first_s for record in records])),
        )


def _input_rows(summary: InputSummary) -> Iterator[InputRow]:
    for part in summary.parts:
        yield InputRow(part=part.part, unit=part.unit, median_s=part.median_s, iqr_s=part.iqr_s, samples=part.samples)
    for loader in summary.loaders:
        yield InputRow(
            part="loader",
            unit="sample",
            workers=loader.workers,
            batch=loader.batch,
            samples_per_s=loader.samples_per_s,
            first_s=loader.first_s,
        )


def print_input(directory: Path, *, as_json: bool) -> None:
    """Print a measurement of the input side, as tables or as asked for."""
    summary = summarise_input(directory)
    if print_rows(InputRow, _input_rows(summary)):
        return
    if as_json:
        write_output("-", encode_pretty(summary))
        return
    console = open_console()
    parts = [
        (part.part, part.unit, format_seconds(part.median_s), format_seconds(part.iqr_s), str(part.samples), part.rate)
        for part in summary.parts
    ]
    console.print(table(("part", "of a", "median", "spread", "samples", "rate"), parts))
    loaders = []
    for loader in summary.loaders:
        low, high = loader.blocks_samples_per_s
        rate = f"{loader.samples_per_s:.4g}", f"{low:.4g} to {high:.4g}", format_seconds(loader.first_s)
        loaders.append((str(loader.workers), str(loader.batch), *rate))
    console.print(table(("workers", "batch", "samples/s", "of blocks", "first batch after"), loaders))
    if summary.unreadable:
        console.print(f"{len(summary.unreadable)} files could not be read or decoded, and are left out:")
        for item in summary.unreadable[:_SHOWN_UNREADABLE]:
            console.print(f"  {item.path}: {item.why}")
    console.print(f"wrote {directory}; next: calibrate fit {directory} ... -o PROFILE")
