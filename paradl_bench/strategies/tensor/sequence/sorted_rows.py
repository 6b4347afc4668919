"""Rows that each rank has sorted of its own tokens: of all ranks in one order, for products with features of experts.

Every rank has as many rows, wherever its router sends them. How many of them are for each expert it tells the others,
and so rows of all ranks are put in the order of experts, and what was made of them back in that of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paradl_bench.core.errors import WorkError
from paradl_bench.strategies.running.group_functions import Group, move_rows
from paradl_bench.strategies.splitting.blocks_of_rows import in_columns, rows_by_group

_TOLD = "_paradl_ends_of_all"
"""Attribute of a rank's own ends: :class:`_Told`. So every forward, of a micro-batch or again, has its own."""
_Sizes = Sequence[Sequence[int]]


class _Told(NamedTuple):
    """What ranks told each other.

    Attributes:
        sizes: per rank, the rows for each expert. ends: where each expert's rows end, of all ranks.
    """

    sizes: _Sizes
    ends: torch.Tensor


def gathered_rows(rows: torch.Tensor, ends: torch.Tensor, group: Group) -> torch.Tensor:
    """Rows of all ranks, in the order of experts; the host waits for their numbers. The gradient is reduce-scattered.

    Args:
        ends: where each expert's rows end, of this rank's.
    """
    sent = rows_by_group(ends)
    # Over groups that move nothing all ranks have what this one has, and not whatever memory held.
    received = sent.repeat(group.size)
    group.all_gather(received, sent)
    by_rank = received.view(group.size, -1)
    sizes = by_rank.tolist()
    setattr(ends, _TOLD, _Told(sizes, by_rank.sum(0).cumsum(0).to(ends.dtype)))
    return move_rows(rows, lambda own: _gather(own, sizes, group), lambda made: _scatter(made, sizes, group), group)


def scattered_rows(made: torch.Tensor, ends: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's rows of the sum of what ranks made of all rows; the gradient is all-gathered."""
    sizes = _told(ends).sizes
    return move_rows(made, lambda rows: _scatter(rows, sizes, group), lambda own: _gather(own, sizes, group), group)


def ends_of_all(ends: torch.Tensor) -> torch.Tensor:
    """Where each expert's rows end among those that were gathered."""
    return _told(ends).ends


def _told(ends: torch.Tensor) -> _Told:
    told: _Told | None = getattr(ends, _TOLD, None)
    if told is None:
        raise WorkError(
            "rows of experts came without the numbers that ranks told each other: run without --sequence-parallel on"
        )
    return told


def _gather(own: torch.Tensor, sizes: _Sizes, group: Group) -> torch.Tensor:
    arrived = own.new_empty(group.size * own.shape[0], *own.shape[1:])
    group.all_gather(arrived.view(-1), own.contiguous().view(-1))
    return in_columns(arrived, sizes)


def _scatter(rows: torch.Tensor, sizes: _Sizes, group: Group) -> torch.Tensor:
    by_rank = in_columns(rows, list(zip(*sizes, strict=True)))
    received = rows.new_empty(rows.shape[0] // group.size, *rows.shape[1:])
    group.reduce_scatter(received.view(-1), by_rank.view(-1))
    return received
