"""Which part of a call's time its bytes take: groups at once act on that alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibrate.fitting.contexts.pairs import NotFitted, Point
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_time import pieces_of, piecewise_seconds
from paradl_bench.core.statistics import Floats
from paradl_bench.plan.cost_terms.terms import CollectiveOperation

_LEAST_SHARE = 0.3
"""Of the time at some size that bytes have to take, or phi is lost in the noise of the start-up."""


def byte_shares(points: Sequence[Point], operation: CollectiveOperation, fits: Sequence[CommunicationFit]) -> Floats:
    """What doubling beta adds to a time, relative, under the fits that predict it; one value a point.

    Raises:
        NotFitted: no fit says it, or bytes take too little of every time.
    """
    if not fits:
        raise NotFitted("there is no fit of alpha and beta, so the part of the time that the bytes take is unknown")
    once = pieces_of(operation, fits)
    twice = [piece._replace(beta_s_per_byte=2 * piece.beta_s_per_byte) for piece in once]
    known = max(fit.inner.ranks if fit.inner else 1 for fit in fits)
    of_points = [(point.ranks, point.message_bytes, point.ranks_per_node or known) for point in points]
    once_s, twice_s = (
        np.array([float(piecewise_seconds(pieces, *point)) for point in of_points]) for pieces in (once, twice)
    )
    shares = np.asarray(twice_s / once_s - 1)
    if (most := float(shares.max())) < _LEAST_SHARE:
        raise NotFitted(f"bytes take at most {most:.0%} of the time at the sizes measured: sweep larger sizes")
    return shares
