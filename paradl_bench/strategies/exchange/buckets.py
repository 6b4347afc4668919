"""Which tensors DistributedDataParallel sends together: torch's assignment to buckets, and what it broadcasts at once.

Source: torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size, rebuild_buckets) and comm.cpp
(broadcast_coalesced), torch/nn/parallel/distributed.py (_ddp_init_helper).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paradl_bench.network.graph import Tensor

BROADCAST_BYTES = 250 * 1024 * 1024
"""How much torch broadcasts at once (``broadcast_bucket_size`` in distributed.py)."""


def assign_buckets(
    tensors: Sequence[Tensor], limits_bytes: Sequence[int], *, in_order_of_arrival: bool
) -> list[list[int]]:
    """Buckets of indices into ``tensors``.

    Tensors of one dtype are taken in order; a bucket closes when its size *reaches* its limit, so that no tensor is
    split and a bucket can be larger than its limit. The limits are used in turn, the last one for all further buckets.

    Args:
        limits_bytes: of the first, second, ... bucket of each dtype.
        in_order_of_arrival: true when ``tensors`` are in the order in which gradients arrive (rebuilt buckets): buckets
            stay in the order in which they closed, and what is left open follows. Otherwise buckets are ordered by
            their first tensor.
    """
    closed: list[list[int]] = []
    open_buckets: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    used: dict[str, int] = {}
    for index, tensor in enumerate(tensors):
        key = tensor.dtype
        open_buckets.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + tensor.bytes
        if open_bytes[key] >= limits_bytes[min(used.get(key, 0), len(limits_bytes) - 1)]:
            closed.append(open_buckets.pop(key))
            open_bytes[key] = 0
            used[key] = used.get(key, 0) + 1
    buckets = closed + list(open_buckets.values())
    return buckets if in_order_of_arrival else sorted(buckets, key=min)


def broadcast_buckets(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(bytes, tensors) of each broadcast that sends ``tensors`` coalesced, in the order in which they are issued."""
    if not tensors:
        return []
    buckets = assign_buckets(tensors, [BROADCAST_BYTES], in_order_of_arrival=False)
    return [(total_bytes(tensors[i] for i in bucket), len(bucket)) for bucket in buckets]


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum of the tensors' sizes."""
    return sum(tensor.bytes for tensor in tensors)
