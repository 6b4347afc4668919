"""What ``paradl-bench io`` keeps: raw times of reading, decoding, collating and copying what a model is fed with."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

FILES_FILE = "files.jsonl"
BATCHES_FILE = "batches.jsonl"
LOADER_FILE = "loader.jsonl"
UNREADABLE_FILE = "unreadable.jsonl"

Condition = Literal["cold", "warm", "not dropped", "not known"]
"""Whether files lay in the page cache: no; yes; yes, though they were to be dropped; the kernel does not say."""
BatchStage = Literal["collate", "copy", "io"]
"""Samples to one batch; the batch to the device; all of a framework's input, where another tool timed no parts."""
CopyHow = Literal["", "pageable", "pinned", "memcpy"]
"""Host memory that a copy starts from; ``memcpy``: there is no device, a copy inside of host memory stands for it."""


def _check_times(where: str, *lists: tuple[float, ...]) -> None:
    for values in lists:
        if not values or not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"{where} needs times, each finite and not negative")
    if len({len(values) for values in lists}) > 1:
        raise ValueError(f"lists of {where} differ in length: one index is one sample")


class FileSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of single files in one block, one process (file ``files.jsonl``); one index is one file.

    Attributes:
        condition: of the reads.
        bytes: of the files as stored. pixels: of the images as decoded.
        decode_s: to pixels in RGB. transform_s: random crop, resizing, flip, to a normalised tensor.
    """

    block: int
    condition: Condition
    bytes: tuple[int, ...]
    pixels: tuple[int, ...]
    read_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    transform_s: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_times("files", self.read_s, self.decode_s, self.transform_s)
        if not len(self.bytes) == len(self.pixels) == len(self.read_s) or min(*self.bytes, *self.pixels) < 0:
            raise ValueError("files need bytes and pixels, one number each, not negative")


class BatchSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of whole batches in one block (file ``batches.jsonl``).

    Attributes:
        batch: samples; 0 of a copy of some size that is no batch. bytes: of the batch as tensors; 0 where not known.
        model: whose input it is, where a tool timed it inside of training; else empty.
        calls_per_sample: how many calls each value is the mean of.
    """

    block: int
    stage: BatchStage
    batch: int
    bytes: int
    samples_s: tuple[float, ...]
    how: CopyHow = ""
    model: str = ""
    calls_per_sample: int = 1

    def __post_init__(self) -> None:
        _check_times(self.stage, self.samples_s)
        if self.batch < (self.stage != "copy") or self.bytes < 0 or self.calls_per_sample < 1:
            raise ValueError("batch and calls_per_sample have to be at least 1, and bytes not negative")


class LoaderSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batches that torch's DataLoader delivered in one block (file ``loader.jsonl``), its files in the page cache.

    Attributes:
        workers: processes; 0 loads in the process itself. start: how they were started; empty without.
        first_s: until the first batch, the start of the workers included.
        gaps_s: from one batch to the next. Several workers deliver in bursts: their sum counts, not their median.
    """

    block: int
    workers: int
    batch: int
    start: Literal["", "fork", "spawn"]
    first_s: float
    gaps_s: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_times("batches of a loader", self.gaps_s)
        _check_times("first batch of a loader", (self.first_s,))
        if self.workers < 0 or self.batch < 1:
            raise ValueError("workers may not be negative, and batch has to be at least 1")


class UnreadableFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that could not be read or decoded (file ``unreadable.jsonl``)."""

    path: str
    why: str
