"""What moves bytes inside of a rank or its host, and what only waits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from paradl_bench.plan.works.work import Sort, Work

CopyDirection = Literal["into", "out", "add", "fetch", "store"]
"""Of gradients: into a bucket, divided by the number of ranks; out of it; added to those of micro-batches before.
Of the optimizer's state: from host memory to the device; back.
"""

COPY_WORDS: Mapping[str, str] = {
    "into": "copies into buckets",
    "out": "copies out of buckets",
    "add": "sums of gradients",
    "fetch": "copies from host memory to the device",
    "store": "copies from the device to host memory",
}
"""What was timed, in words, by direction."""

_COPY_LABELS: dict[CopyDirection, str] = {
    "into": "copy into bucket",
    "out": "copy out of bucket",
    "add": "add gradients up",
    "fetch": "copy the optimizer's state to the device",
    "store": "copy the optimizer's state to host memory",
}


class TensorCopy(Work, frozen=True, kw_only=True):
    """Tensors moved on the compute stream, with one call each.

    Attributes:
        direction: by which measurements are told apart.
    """

    sort: ClassVar[Sort] = Sort.COPY
    sizes: ClassVar[tuple[str, ...]] = ("bytes", "tensors")

    direction: CopyDirection
    bytes: int
    tensors: int

    @property
    def label(self) -> str:
        """By its direction."""
        return _COPY_LABELS[self.direction]


class BucketCopy(TensorCopy, frozen=True, kw_only=True, tag="bucket_copy"):
    """Gradients moved on the compute stream: into a bucket, out of it, or added to those of micro-batches before."""

    kind: ClassVar[str] = "copy of gradients"


class StateCopy(TensorCopy, frozen=True, kw_only=True, tag="state_copy"):
    """The state of an optimizer that lies in host memory, copied to the device for the weight update, and back."""

    kind: ClassVar[str] = "copy of the optimizer's state"


class Wait(Work, frozen=True, kw_only=True, tag="wait"):
    """A timer of so many seconds, that computes nothing: how long a buffer waits for another gradient."""

    kind: ClassVar[str] = "wait for a gradient"
    sort: ClassVar[Sort] = Sort.TIMER

    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds has to be finite and not negative, not {self.seconds}")


class InputRead(Work, frozen=True, kw_only=True, tag="input_read"):
    """Samples read, decoded and collated by the host, for all of its ranks that read."""

    kind: ClassVar[str] = "read a mini-batch"
    sort: ClassVar[Sort] = Sort.INPUT

    samples: int

    @property
    def details(self) -> dict[str, str | int]:
        """How many samples."""
        return {"samples_of_host": self.samples}


class InputCopy(Work, frozen=True, kw_only=True, tag="input_copy"):
    """A rank's mini-batch copied from the host to its device."""

    kind: ClassVar[str] = "copy a mini-batch to the device"
    sort: ClassVar[Sort] = Sort.INPUT
    sizes: ClassVar[tuple[str, ...]] = ("bytes",)

    bytes: int
