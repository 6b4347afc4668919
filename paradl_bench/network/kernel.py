"""A kernel as sweeps measure it and regressors read it: what it is, the sizes of its operands, its least work.

KernelMLP describes a kernel by the sizes of its operands (its Table 3); FLOPs and bytes are added so that a roofline
can be drawn under every time. One shape describes a convolution of a log, of a sweep and of a traced network alike.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paradl_bench.core.bounds import Index, PositiveCount, PositiveSeconds, Samples, Work
from paradl_bench.core.checks import check_aligned

KERNELS_FILE = "kernels.jsonl"

KernelStage = Literal["FW", "BW", "BW_input", "BW_weight", "WU", "D2D", "H2D"]
"""FW, BW and its two halves, weight update of an optimizer, and copies inside a device and from the host to it."""


class KernelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a regressor knows of one kernel.

    Attributes:
        kind: the layer kind (``conv``, ``linear``, ...), ``optimizer`` or ``copy``.
        sizes: operand sizes by name, the batch among them; the same names for all kernels of a kind and stage.
        settings: what else picks a kernel and is no number (``{"function": "relu"}``).
        flops: of the call; a multiply-add counts 2.
        bytes: that the call has to read and write at least, parameters included.
    """

    kind: str
    stage: KernelStage
    sizes: dict[str, Index]
    settings: dict[str, str] = {}
    flops: Work = 0.0
    bytes: Work = 0.0

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("a kernel needs a kind")


class KernelSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one kernel in one block (file ``kernels.jsonl``).

    Attributes:
        calls_per_sample: how many calls each value is the mean of; 1 for raw times.
        reference_s: of older sweeps, what a kernel that is always the same took around each sample; nothing reads it.
    """

    shape: KernelShape
    dtype: str
    block: Index
    samples_s: Samples
    calls_per_sample: PositiveCount = 1
    reference_s: tuple[PositiveSeconds, ...] = ()

    def __post_init__(self) -> None:
        check_aligned(self, "samples_s", "reference_s")
