"""What ``paradl-bench doctor --measure`` keeps: raw times of kernels that show a device's rates."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

RATES_FILE = "rates.jsonl"

Resource = Literal["compute", "memory", "cache"]
"""FLOP/s; bytes/s of what is beyond the caches; bytes/s of what fits into one."""


class RateSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one kernel at one size in one block (file ``rates.jsonl``).

    Attributes:
        kernel: ``matmul``, ``conv``, ``copy`` (one array read, one written) or ``triad`` (two read, one written).
        sizes: of the operands, by name.
        dtype: ``fp32``, ``tf32`` (fp32 operands, TensorFloat-32 products) or ``bf16``.
        work: of one call: FLOPs (a multiply-add counts 2), or bytes read and written (STREAM's count: what a cache
            fetches to write into it is not counted).
        working_set_bytes: of all operands.
        ranks_on_host: that ran the kernel at once; rank: which of them this is.
        samples_s: seconds a call. calls_per_sample: how many calls each value is the mean of.
    """

    resource: Resource
    kernel: str
    sizes: dict[str, int]
    dtype: str
    work: float
    working_set_bytes: int
    ranks_on_host: int
    rank: int
    block: int
    samples_s: tuple[float, ...]
    calls_per_sample: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.work) and self.work > 0):
            raise ValueError(f"work of {self.kernel} has to be finite and above 0, not {self.work}")
        if not self.samples_s or not all(math.isfinite(value) and value > 0 for value in self.samples_s):
            raise ValueError(f"{self.kernel} needs samples, each finite and above 0")
        if self.calls_per_sample < 1 or self.working_set_bytes < 1 or not 0 <= self.rank < self.ranks_on_host:
            raise ValueError(f"{self.kernel}: calls, bytes and ranks have to be at least 1, and rank below ranks")
