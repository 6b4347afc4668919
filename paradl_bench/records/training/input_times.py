"""What a training run reads: where its samples come from, and seconds of reading them in every iteration."""

from __future__ import annotations

import msgspec

from paradl_bench.core.bounds import Count, Extent, Index, PositiveCount, Samples, Seconds
from paradl_bench.core.checks import check_aligned


class RunInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images that a run trains on.

    Attributes:
        source: folder that is read, or ``synthetic``. files: images in it.
        crop: pixels of a sample's sides. workers: of each rank's loader; 0 reads in the process that trains.
        preset: how input and gradient exchange overlap
            (:mod:`~paradl_bench.strategies.frameworks.presets`).
    """

    source: str
    files: PositiveCount
    crop: Extent
    workers: Count
    preset: str


class InputTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Input of timed iterations on one rank; one index is one iteration.

    Attributes:
        waited_s: from the start of the iteration until its mini-batch is on the device.
        copied_s: of it, from the moment at which the mini-batch has been read; empty on a CPU, which copies nothing.
        worker: that read the mini-batch, from 0 on; empty where the process that trains did.
        read_s, decode_s, transform_s, collate_s: what reading it took, in whichever process did, whenever that was.
    """

    waited_s: Samples
    read_s: Samples
    decode_s: Samples
    transform_s: Samples
    collate_s: Samples
    copied_s: tuple[Seconds, ...] = ()
    worker: tuple[Index, ...] = ()

    def __post_init__(self) -> None:
        check_aligned(self, "waited_s", "read_s", "decode_s", "transform_s", "collate_s", "copied_s", "worker")
