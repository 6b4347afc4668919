"""What ``paradl-bench io`` keeps: raw times of reading, decoding, collating and copying what a model is fed with."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from paradl_bench.core.bounds import Bytes, Count, Index, PositiveCount, Samples, Seconds
from paradl_bench.core.checks import check_aligned

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
    bytes: Annotated[tuple[Bytes, ...], msgspec.Meta(min_length=1)]
    pixels: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    read_s: Samples
    decode_s: Samples
    transform_s: Samples

    def __post_init__(self) -> None:
        check_aligned(self, "bytes", "pixels", "read_s", "decode_s", "transform_s")


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
    samples_s: Samples
    how: CopyHow = ""
    model: str = ""
    calls_per_sample: PositiveCount = 1

    def __post_init__(self) -> None:
        if not self.batch and self.stage != "copy":
            raise ValueError(f"{self.stage}: batch has to be at least 1, not {self.batch}")


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
    gaps_s: Samples


class UnreadableFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that could not be read or decoded (file ``unreadable.jsonl``)."""

    path: str
    why: str
