"""Seconds of one collective for any ranks and bytes: the pieces of its fit, and what measured times are of those."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.profile.collectives.communication_residuals import Residuals
from calibrate.profile.collectives.communication_time import Piece, piecewise_seconds
from paradl_bench.core.statistics import Floats


class CollectiveTimes(NamedTuple):
    """A collective through one library at one level, under so much contention.

    Attributes:
        residuals: none where a cluster file states alpha or beta.
    """

    pieces: tuple[Piece, ...]
    residuals: Residuals = Residuals()

    def seconds(self, ranks: ArrayLike, message_bytes: ArrayLike, per_node: ArrayLike) -> Floats:
        """Of shape (messages, points), or of what its arguments broadcast to.

        Args:
            ranks: of the group. per_node: how many of them share a node.
        """
        return np.asarray(
            fitted_seconds(self.pieces, ranks, message_bytes, per_node) * self.residuals.factor(ranks, message_bytes)
        )


def fitted_seconds(pieces: Sequence[Piece], ranks: ArrayLike, message_bytes: ArrayLike, per_node: ArrayLike) -> Floats:
    """As the profile's ``piecewise_seconds``, each message by those pieces alone that it needs."""
    if len(pieces) == 1 or any(piece.at_ranks for piece in pieces):
        return piecewise_seconds(pieces, ranks, message_bytes, per_node)
    p, m, g = np.broadcast_arrays(ranks, message_bytes, per_node)
    # Up to the end of the first piece, from there to the start of the second, up to its end, ...
    edges = [edge for low, high in itertools.pairwise(pieces) for edge in (low.high_bytes, high.low_bytes)]
    regime = np.searchsorted(edges, m / pieces[0].parts(p))
    found = np.empty(m.shape)
    for at in np.unique(regime).tolist():
        own = regime == at
        found[own] = piecewise_seconds(pieces[at // 2 : at // 2 + 1 + at % 2], p[own], m[own], g[own])
    return found
