"""Rows that several ranks have sorted, in one order: blocks of a rank and a matrix each, put in the other order."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rows_by_group(ends: torch.Tensor) -> torch.Tensor:
    """How many rows each matrix of a grouped product has, in int64, from where they end."""
    return ends.detach().to(torch.int64).diff(prepend=ends.new_zeros(1, dtype=torch.int64)).contiguous()


def in_columns(rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Blocks of so many rows each, which stand one line after the other, column after column; other memory."""
    blocks = torch.split(rows, [size for line in sizes for size in line])
    columns = len(sizes[0])
    return torch.cat([blocks[line * columns + column] for column in range(columns) for line in range(len(sizes))])
