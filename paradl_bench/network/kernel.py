"""A kernel as sweeps measure it and regressors read it: what it is, the sizes of its operands, its least work.

KernelMLP describes a kernel by the sizes of its operands (its Table 3); FLOPs and bytes are added so that a roofline
can be drawn under every time. One shape describes a convolution of a log, of a sweep and of a traced network alike.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paradl_bench.core.bounds import Index, PositiveCount, Seconds, Work
from paradl_bench.core.checks import check_counts, check_not_negative, check_samples

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
        if min(self.sizes.values(), default=0) < 0:
            raise ValueError(f"sizes of {self.kind} have to be at least 0, not {self.sizes}")
        check_not_negative(self, "flops", "bytes", where=self.kind)


class KernelSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one kernel in one block (file ``kernels.jsonl``).

    Attributes:
        calls_per_sample: how many calls each value is the mean of; 1 for raw times.
        reference_s: what a kernel that is always the same took around each sample; empty where none was timed.
    """

    shape: KernelShape
    dtype: str
    block: Index
    samples_s: tuple[Seconds, ...]
    calls_per_sample: PositiveCount = 1
    reference_s: tuple[Seconds, ...] = ()

    def __post_init__(self) -> None:
        where = f"{self.shape.stage} of {self.shape.kind}"
        check_samples(self.samples_s, where)
        check_counts(self, "calls_per_sample", where=where)
        if self.reference_s:
            check_samples(self.reference_s, f"{where}: reference_s")
            if len(self.reference_s) != len(self.samples_s) or min(self.reference_s) <= 0:
                raise ValueError(f"{where}: reference_s has to hold a time above 0 for every sample")
