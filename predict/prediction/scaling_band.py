"""How far a ratio of two iterations may be off, from the intervals of both: efficiency, or what a setting gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from predict.prediction.interval import Interval


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
    own = efficiency * math.hypot(
        point.bounds.own_s / point.iteration_s, reference.bounds.own_s / reference.iteration_s
    )
    return _band(point, reference, efficiency, own, ())


def gain_band(point: Timed, reference: Timed) -> tuple[float, float]:
    """90% interval of the reference's iteration over the point's, less 1, where both run the same layers alike.

    As :func:`efficiency_band`, but layers' own errors are the same errors in both and move both at once; what one has
    more of them is its own.
    """
    ours, theirs = point.bounds.own_s, reference.bounds.own_s
    shared, ratio = min(ours, theirs), reference.iteration_s / point.iteration_s
    more = ratio * math.sqrt(abs(ours**2 - theirs**2)) / min(point.iteration_s, reference.iteration_s)
    ends = [(reference.iteration_s + by, point.iteration_s + by) for by in (shared, -shared)]
    low, high = _band(point, reference, ratio, more, [ends])
    return low - 1.0, high - 1.0


def _band(
    point: Timed, reference: Timed, value: float, own: float, moved: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, float]:
    """The interval of ``value``.

    Args:
        own: its half-width by errors that the two do not share.
        moved: beside the modes, seconds of reference and point at both ends of an error that they share.
    """
    scale = value * point.iteration_s / reference.iteration_s

    def moved_by(reference_s: float, point_s: float) -> float:
        return scale * reference_s / max(point_s, 1e-300) - value

    ours, theirs = point.bounds.moved_s, reference.bounds.moved_s
    unmoved = (reference.iteration_s,) * 2, (point.iteration_s,) * 2
    modes = [
        list(zip(theirs.get(name, unmoved[0]), ours.get(name, unmoved[1]), strict=True))
        for name in dict.fromkeys((*ours, *theirs))
    ]
    above, below = own**2, own**2
    for both in (*modes, *moved):
        gains = [moved_by(*seconds) for seconds in both]
        above += max(0.0, *gains) ** 2
        below += max(0.0, *(-gain for gain in gains)) ** 2
    unexplained = [
        moved_by(reference.iteration_s + missing_there, point.iteration_s + missing)
        for missing_there, missing in zip(reference.bounds.unexplained_s, point.bounds.unexplained_s, strict=False)
    ]
    low = value - math.sqrt(below) + min(0.0, *unexplained, 0.0)
    return max(low, 0.0), value + math.sqrt(above) + max(0.0, *unexplained, 0.0)
