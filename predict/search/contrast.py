"""What a search is worth: the best candidate beside the one in the middle and the worst (DistSim, table 2).

DistSim predicts every strategy of a small grid. A search predicts few of many candidates, and those are the ones that
may be the best; of the others it has estimates, from below where layers run whole. So it tells both: the contrast of
what it predicted, and that of all that memory does not rule out.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from predict.costs.sourced import Floats


class Contrasted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate: its strategy, with the options that decide its memory, and its seconds.

    Attributes:
        best_is_faster: by which factor the best one is.
    """

    candidate: str
    iteration_s: float
    best_is_faster: float


class Contrast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one in the middle (the faster of two) and the worst of so many candidates, against the best prediction."""

    candidates: int
    median: Contrasted
    worst: Contrasted


def contrast_of(seconds: Floats, best_s: float, described: Callable[[int], str]) -> Contrast:
    """The contrast of candidates by their seconds; at least one.

    Args:
        described: a candidate in words, by its place in ``seconds``.
    """
    middle = (len(seconds) - 1) // 2
    places = int(np.argpartition(seconds, middle)[middle]), int(np.argmax(seconds))
    median, worst = (
        Contrasted(
            candidate=described(place),
            iteration_s=float(seconds[place]),
            best_is_faster=float(seconds[place]) / best_s,
        )
        for place in places
    )
    return Contrast(candidates=len(seconds), median=median, worst=worst)
