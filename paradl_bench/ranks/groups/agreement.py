"""Small numbers on which the ranks of a measurement agree, exchanged through the process group that is measured."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.rank_place import node_name


def largest(context: RankContext, value: float) -> float:
    """The largest of all ranks' values, on every rank."""
    tensor = torch.tensor([value], dtype=torch.float64, device=context.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=context.group)
    return float(tensor.item())


def everyones(context: RankContext, values: Sequence[float]) -> list[tuple[float, ...]]:
    """Every rank's values, equally many, on every rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=context.device)
    all_of_them = [torch.empty_like(mine) for _ in range(context.ranks)]
    dist.all_gather(all_of_them, mine, group=context.group)
    return [tuple(map(float, row.tolist())) for row in all_of_them]


def of_first(context: RankContext, values: Sequence[int]) -> list[int]:
    """Rank 0's whole numbers on every rank; the others pass equally many, which are ignored."""
    tensor = torch.tensor(list(values), dtype=torch.int64, device=context.device)
    dist.broadcast(tensor, group=context.group, group_src=0)
    return [int(value) for value in tensor.tolist()]


def host_numbers(context: RankContext) -> list[float]:
    """A number for the host of every rank, in the order of ranks."""
    digest = hashlib.sha256(node_name().encode()).digest()
    # 48 bits pass unchanged through the float64 that ranks exchange.
    return [host for (host,) in everyones(context, [float(int.from_bytes(digest[:6], "big"))])]


def ranks_of_hosts(context: RankContext) -> list[int]:
    """How many ranks each host holds, one number a host."""
    return list(Counter(host_numbers(context)).values())
