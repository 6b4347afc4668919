"""What ``paradl-bench io`` keeps: raw times of reading, decoding, collating and copying what a model is fed with."""

from __future__ import annotations

from typing import Literal

import msgspec

from paradl_bench.core.bounds import Bytes, Count, Index, PositiveCount, Seconds
from paradl_bench.core.checks import check_aligned, check_counts, check_not_negative, check_samples

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


class FileSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of single files in one block, one process (file ``files.jsonl``); one index is one file.

    Attributes:
        condition: of the reads.
        bytes: of the files as stored. pixels: of the images as decoded.
        decode_s: to pixels in RGB. transform_s: random crop, resizing, flip, to a normalised tensor.
    """

    block: Index
    condition: Condition
    bytes: tuple[Bytes, ...]
    pixels: tuple[Count, ...]
    read_s: tuple[Seconds, ...]
    decode_s: tuple[Seconds, ...]
    transform_s: tuple[Seconds, ...]

    def __post_init__(self) -> None:
        labels = ("read_s", "decode_s", "transform_s")
        for label in labels:
            check_samples(getattr(self, label), f"{label} of files")
        check_aligned(self, *labels)
        if not len(self.bytes) == len(self.pixels) == len(self.read_s) or min(*self.bytes, *self.pixels) < 0:
            raise ValueError("files need bytes and pixels, one number each, not negative")


class BatchSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of whole batches in one block (file ``batches.jsonl``).

    Attributes:
        batch: samples; 0 of a copy of some size that is no batch. bytes: of the batch as tensors; 0 where not known.
        model: whose input it is, where a tool timed it inside of training; else empty.
        calls_per_sample: how many calls each value is the mean of.
    """

    block: Index
    stage: BatchStage
    batch: Count
    bytes: Bytes
    samples_s: tuple[Seconds, ...]
    how: CopyHow = ""
    model: str = ""
    calls_per_sample: PositiveCount = 1

    def __post_init__(self) -> None:
        check_samples(self.samples_s, self.stage)
        check_counts(self, "batch", least=0 if self.stage == "copy" else 1, where=self.stage)
        check_counts(self, "bytes", least=0, where=self.stage)
        check_counts(self, "calls_per_sample", where=self.stage)


class LoaderSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batches that torch's DataLoader delivered in one block (file ``loader.jsonl``), its files in the page cache.

    Attributes:
        workers: processes; 0 loads in the process itself. start: how they were started; empty without.
        first_s: until the first batch, the start of the workers included.
        gaps_s: from one batch to the next. Several workers deliver in bursts: their sum counts, not their median.
    """

    block: Index
    workers: Count
    batch: PositiveCount
    start: Literal["", "fork", "spawn"]
    first_s: Seconds
    gaps_s: tuple[Seconds, ...]

    def __post_init__(self) -> None:
        check_samples(self.gaps_s, "gaps_s of a loader")
        check_not_negative(self, "first_s", where="loader")
        check_counts(self, "workers", least=0, where="loader")
        check_counts(self, "batch", where="loader")


class UnreadableFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that could not be read or decoded (file ``unreadable.jsonl``)."""

    path: str
    why: str
