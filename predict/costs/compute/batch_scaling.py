"""A time as a function of the local batch, from the batches at which it was measured.

Between measured batches time runs straight from one to the next. Beyond them the slope of the two nearest is kept, but
never less than none and never more than proportional to the batch; where one batch was measured alone, time is taken
as proportional (kernels: ParaDL's linear form) or constant. A larger batch takes no less time, and no more per sample:
inside of what these two bound, any value is as likely as another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from predict.costs.sourced import UNIFORM_TO_SD, Cost, Remark, Source

BATCH = "local batch"
"""The effect of another batch than one that was measured."""


class Knot(NamedTuple):
    """A measured batch: seconds, and the standard deviation of what was measured."""

    batch: int
    seconds: float
    sd_s: float


def at_batch(knots: Sequence[Knot], batch: int, *, proportional: bool, what: str = "compute") -> Cost:
    """The cost at ``batch``, its base the nearest that was measured; it says where it is of another batch.

    Args:
        knots: at least one, ordered by batch.
        proportional: whether a single measured batch is taken as proportional beyond itself, or as constant.
    """
    for knot in knots:
        if knot.batch == batch:
            return _cost(knot, knot.seconds, knot.sd_s, 0.0, Source.MEASURED)
    inside = knots[0].batch < batch < knots[-1].batch
    cost = _between(knots, batch) if inside else _beyond(knots, batch, proportional=proportional)
    return cost._replace(remarks=(_remark(what, [knot.batch for knot in knots], batch),))


def _cost(nearest: Knot, seconds: float, sd_s: float, batch_sd_s: float, source: Source) -> Cost:
    return Cost(nearest.seconds, Source.MEASURED, sd_s, batch_sd_s).adjusted(BATCH, seconds)._replace(source=source)


def _between(knots: Sequence[Knot], batch: int) -> Cost:
    above = next(index for index, knot in enumerate(knots) if knot.batch > batch)
    low, high = knots[above - 1], knots[above]
    share = (batch - low.batch) / (high.batch - low.batch)
    floor = max(low.seconds, high.seconds * batch / high.batch)
    ceiling = min(high.seconds, low.seconds * batch / low.batch)
    return _cost(
        low if share < 0.5 else high,
        low.seconds + share * (high.seconds - low.seconds),
        (1 - share) * low.sd_s + share * high.sd_s,
        max(0.0, ceiling - floor) * UNIFORM_TO_SD,
        Source.INTERPOLATED,
    )


def _beyond(knots: Sequence[Knot], batch: int, *, proportional: bool) -> Cost:
    nearest = knots[0] if batch < knots[0].batch else knots[-1]
    other = knots[min(1, len(knots) - 1)] if batch < knots[0].batch else knots[max(len(knots) - 2, 0)]
    steepest = nearest.seconds / nearest.batch
    if other.batch == nearest.batch:
        slope = steepest if proportional else 0.0
    else:
        slope = (other.seconds - nearest.seconds) / (other.batch - nearest.batch)
    slope = min(max(slope, 0.0), steepest)
    seconds = nearest.seconds + slope * (batch - nearest.batch)
    factor = seconds / nearest.seconds if nearest.seconds else 1.0
    width = abs(nearest.seconds * batch / nearest.batch - nearest.seconds)
    return _cost(nearest, seconds, nearest.sd_s * factor, width * UNIFORM_TO_SD, Source.SCALED)


def _remark(what: str, measured: Sequence[int], batch: int) -> Remark:
    if measured[0] < batch < measured[-1]:
        low = max(value for value in measured if value < batch)
        high = min(value for value in measured if value > batch)
        return Remark(f"{what} at local batch {batch}: interpolated between {low} and {high}", False)
    nearest, end = (measured[0], "smallest") if batch < measured[0] else (measured[-1], "largest")
    return Remark(f"{what} at local batch {batch}: scaled from {nearest}, the {end} measured", True)
