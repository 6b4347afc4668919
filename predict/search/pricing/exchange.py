"""Seconds from the start of a rank's last backward to the end of its exchange of gradients, of many candidates at once.

The first bucket is sent when it is full, one bucket follows the other, and the last is not full before backward ends:

    X = max(backward + last bucket, backward from when the first bucket is full + all buckets)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paradl_bench.strategies.exchange.options import bucket_limits
from predict.costs.sourced import Floats, Ints
from predict.search.pricing.groups import GroupCosts

_SMALLEST_BYTES = 4.0


class Exchanges(NamedTuple):
    """Of one cut into stages: what the candidates need that differ in what they share, or in their link.

    Attributes:
        bounds: index of the first layer of each rank's first stage, and of that behind the last.
        filled: the layer whose backward fills the first bucket, or ends the stage. every, last: seconds of all
            buckets, and of the last. All of shape (numbers of what they need, bucket sizes, ranks).
    """

    bounds: Ints
    filled: Ints
    every: Floats
    last: Floats

    def seconds(self, backward: Floats, row: Ints, which: Ints) -> Floats:
        """Of shape (candidates, bucket sizes, ranks).

        Args:
            backward: of shape (rows, layers). row: of each candidate. which: what each needs; those of a row
                need of the same part.
        """
        before = np.concatenate([np.zeros((len(backward), 1)), np.cumsum(backward, axis=1)], axis=1)
        ends = before[:, None, self.bounds[1:]]
        part = np.empty(len(backward), np.int64)
        part[row] = which
        ready = ends - before[np.arange(len(backward))[:, None, None], self.filled[part]]
        exchange_s = (ends - before[:, None, self.bounds[:-1]])[row] + self.last[which]
        return np.asarray(np.maximum(exchange_s, ready[row] + self.every[which], out=exchange_s))


class Buckets:
    """Buckets of gradients, of any size and for any part of a network, whose bytes are of shape (parts, layers)."""

    def __init__(self, groups: GroupCosts, gradient_bytes: Ints, caps_mb: Sequence[float | None]) -> None:
        self._groups, self._gradient_bytes = groups, gradient_bytes
        self._limits = np.array([bucket_limits(cap) for cap in caps_mb], float)

    def stage_bytes(self, bounds: Ints) -> Floats:
        """Of stages that begin and end there; of shape (parts, stages)."""
        above = self._above()
        return np.asarray(above[:, bounds[1:]] - above[:, bounds[:-1]], float)

    def exchanges(self, bounds: Ints, parts: Ints, links: Ints) -> Exchanges:
        """Of stages that begin and end there, for each part of the network over a link; arrays of one shape."""
        sizes = self.stage_bytes(bounds)[parts][:, None, :]
        count, full, last = _bucket_bytes(sizes, self._limits[:, :1], self._limits[:, 1:])
        of_one = np.rint(np.stack([full, np.maximum(last, _SMALLEST_BYTES)]))
        seconds = np.where(sizes > 0, self._groups.seconds_over(links[:, None, None], of_one), 0.0)
        return Exchanges(bounds, self._filled(bounds)[parts], count * seconds[0], seconds[1])

    def _filled(self, bounds: Ints) -> Ints:
        """By what layer the first bucket is full; of shape (parts, bucket sizes, ranks)."""
        firsts, size = np.unique(self._limits[:, 0], return_inverse=True)
        above = self._above()
        sought = above[:, None, bounds[1:]] - firsts[:, None]
        at_layer = [
            np.searchsorted(part_above, of_part, side="right") - 1
            for part_above, of_part in zip(above, sought, strict=True)
        ]
        return np.asarray(np.clip(np.array(at_layer), bounds[:-1], bounds[1:] - 1)[:, np.ravel(size)])

    def _above(self) -> Ints:
        """Bytes of the gradients of all layers before each, and of all; of shape (parts, layers + 1)."""
        return np.concatenate(
            [np.zeros((len(self._gradient_bytes), 1), np.int64), np.cumsum(self._gradient_bytes, axis=1)], axis=1
        )


def _bucket_bytes(sizes: Floats, first: Floats, cap: Floats) -> tuple[Floats, Floats, Floats]:
    """Number of buckets, bytes of one on average and of the last one; broadcast against each other."""
    behind = np.maximum(sizes - first, 0.0)
    more = np.ceil(behind / cap)
    return 1 + more, sizes / (1 + more), np.where(more > 0, behind - (more - 1) * cap, sizes)
