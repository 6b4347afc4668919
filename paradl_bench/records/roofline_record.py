"""What ``paradl-bench doctor --measure`` keeps: raw times of kernels that show a device's rates."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from paradl_bench.core.bounds import (
    Index,
    PositiveBytes,
    PositiveCount,
    PositiveSeconds,
    PositiveWork,
    RankIndex,
    Ranks,
)

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
    sizes: dict[str, Index]
    dtype: str
    work: PositiveWork
    working_set_bytes: PositiveBytes
    ranks_on_host: Ranks
    rank: RankIndex
    block: Index
    samples_s: Annotated[tuple[PositiveSeconds, ...], msgspec.Meta(min_length=1)]
    calls_per_sample: PositiveCount = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks_on_host:
            raise ValueError(f"{self.kernel}: rank has to be below {self.ranks_on_host} ranks, not {self.rank}")
