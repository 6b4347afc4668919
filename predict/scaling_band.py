"""How far the efficiency of a point may be off, from the intervals of the point and of what it is compared with."""

from __future__ import annotations

import math
from typing import NamedTuple

from predict.interval import Interval


class Timed(NamedTuple):
    """An iteration and its interval."""

    iteration_s: float
    bounds: Interval


def efficiency_band(point: Timed, reference: Timed, efficiency: float) -> tuple[float, float]:
    """90% interval of ``efficiency``, which goes as the reference's iteration over the point's.

    An error that both share moves both at once (a slow spell of the machine takes nothing from efficiency), so each
    mode is moved in both and the ratio taken anew; gains and losses are added in quadrature, each side by itself, as in
    the interval of an iteration. Layers' own errors are taken as independent between the two, which is on the safe
    side. What parts left unexplained counts in both.
    """
    scale = efficiency * point.iteration_s / reference.iteration_s

    def moved_by(reference_s: float, point_s: float) -> float:
        return scale * reference_s / max(point_s, 1e-300) - efficiency

    ours, theirs = point.bounds.moved_s, reference.bounds.moved_s
    own = efficiency * math.hypot(
        point.bounds.own_s / point.iteration_s, reference.bounds.own_s / reference.iteration_s
    )
    above, below = own**2, own**2
    for name in ours.keys() | theirs.keys():
        both = zip(
            theirs.get(name, (reference.iteration_s,) * 2), ours.get(name, (point.iteration_s,) * 2), strict=True
        )
        gains = [moved_by(*seconds) for seconds in both]
        above += max(0.0, *gains) ** 2
        below += max(0.0, *(-gain for gain in gains)) ** 2
    unexplained = [
        moved_by(reference.iteration_s + missing_there, point.iteration_s + missing)
        for missing_there, missing in zip(reference.bounds.unexplained_s, point.bounds.unexplained_s, strict=False)
    ]
    low = efficiency - math.sqrt(below) + min(0.0, *unexplained, 0.0)
    return max(low, 0.0), efficiency + math.sqrt(above) + max(0.0, *unexplained, 0.0)
