"""Seconds of a collective from its fit: the one place that reads regimes, for the fit itself and for predictions.

A fit may have several regimes, pieces over ranges of message sizes that each have their own alpha and beta (eager and
rendezvous protocols, caches). Inside a piece the algorithm's cost terms hold. Between the largest size of one piece
and the smallest of the next nothing was measured: time runs straight from the one to the other, so that it is
continuous in bytes. Beyond the first and the last piece their own lines go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrate.profile import CommunicationFit
from paradl_bench.spec.cost_terms import Algorithm, CollectiveOperation
from paradl_bench.spec.registry import lookup

Floats = NDArray[np.float64]


class Piece(NamedTuple):
    """One regime: the sizes that it was fitted on, the algorithm that held there, and its parameters."""

    algorithm: Algorithm
    low_bytes: float
    high_bytes: float
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float

    def seconds(self, ranks: ArrayLike, message_bytes: ArrayLike) -> Floats:
        """Seconds under this piece's parameters, wherever its range ends."""
        return self.algorithm.seconds(
            ranks,
            message_bytes,
            alpha_s=self.alpha_s,
            beta_s_per_byte=self.beta_s_per_byte,
            gamma_s_per_byte=self.gamma_s_per_byte,
        )


def pieces_of(operation: CollectiveOperation, fits: Sequence[CommunicationFit]) -> tuple[Piece, ...]:
    """The pieces of the fits of one (library, operation, level), from small messages to large.

    Raises:
        UserError: a fit names an algorithm that the operation lacks.
    """
    return tuple(
        Piece(
            lookup(dict(operation.algorithms), fit.algorithm, f"algorithm of {operation.name}"),
            float(fit.bytes_range[0]),
            float(fit.bytes_range[1]),
            fit.alpha_s,
            fit.beta_s_per_byte,
            fit.gamma_s_per_byte,
        )
        for fit in sorted(fits, key=lambda fit: fit.bytes_range)
    )


def piecewise_seconds(pieces: Sequence[Piece], ranks: ArrayLike, message_bytes: ArrayLike) -> Floats:
    """Seconds of a collective over ``ranks`` ranks and ``message_bytes``, broadcast against each other.

    Args:
        pieces: at least one, ordered by size, not overlapping.
    """
    p, m = np.broadcast_arrays(np.asarray(ranks, float), np.asarray(message_bytes, float))
    seconds = pieces[0].seconds(p, m)
    for lower, upper in itertools.pairwise(pieces):
        start, end = lower.seconds(p, lower.high_bytes), upper.seconds(p, upper.low_bytes)
        share = (m - lower.high_bytes) / (upper.low_bytes - lower.high_bytes)
        seconds = np.where(m > lower.high_bytes, start + (end - start) * share, seconds)
        seconds = np.where(m >= upper.low_bytes, upper.seconds(p, m), seconds)
    return np.asarray(seconds)


def communication_seconds(
    operation: CollectiveOperation, fits: Sequence[CommunicationFit], ranks: ArrayLike, message_bytes: ArrayLike
) -> Floats:
    """:func:`piecewise_seconds` of the fits of one (library, operation, level) of a profile; at least one fit."""
    return piecewise_seconds(pieces_of(operation, fits), ranks, message_bytes)
