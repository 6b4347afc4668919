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


class BatchEstimate(NamedTuple):
    """Seconds at a batch, the measurement's spread, and what the way from the measured batches leaves open.

    Attributes:
        measured_s: at the nearest batch that was measured.
    """

    seconds: float
    sd_s: float
    batch_sd_s: float
    source: Source
    measured_s: float

    @property
    def cost(self) -> Cost:
        """As a cost, with what the batch adds to the measured seconds."""
        measured = Cost(self.measured_s, Source.MEASURED, self.sd_s, self.batch_sd_s)
        return measured.adjusted(BATCH, self.seconds)._replace(source=self.source)


def at_batch(knots: Sequence[Knot], batch: int, *, proportional: bool) -> BatchEstimate:
    """Seconds at ``batch``.

    Args:
        knots: at least one, ordered by batch.
        proportional: whether a single measured batch is taken as proportional beyond itself, or as constant.
    """
    for knot in knots:
        if knot.batch == batch:
            return BatchEstimate(knot.seconds, knot.sd_s, 0.0, Source.MEASURED, knot.seconds)
    if knots[0].batch < batch < knots[-1].batch:
        return _between(knots, batch)
    return _beyond(knots, batch, proportional=proportional)


def _between(knots: Sequence[Knot], batch: int) -> BatchEstimate:
    above = next(index for index, knot in enumerate(knots) if knot.batch > batch)
    low, high = knots[above - 1], knots[above]
    share = (batch - low.batch) / (high.batch - low.batch)
    floor = max(low.seconds, high.seconds * batch / high.batch)
    ceiling = min(high.seconds, low.seconds * batch / low.batch)
    return BatchEstimate(
        low.seconds + share * (high.seconds - low.seconds),
        (1 - share) * low.sd_s + share * high.sd_s,
        max(0.0, ceiling - floor) * UNIFORM_TO_SD,
        Source.INTERPOLATED,
        (low if share < 0.5 else high).seconds,
    )


def _beyond(knots: Sequence[Knot], batch: int, *, proportional: bool) -> BatchEstimate:
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
    return BatchEstimate(seconds, nearest.sd_s * factor, width * UNIFORM_TO_SD, Source.SCALED, nearest.seconds)


def batch_remark(what: str, knots: Sequence[Knot], batch: int) -> tuple[Remark, ...]:
    """What to say where a batch was not measured; nothing where it was."""
    measured = [knot.batch for knot in knots]
    if batch in measured:
        return ()
    if measured[0] < batch < measured[-1]:
        low = max(value for value in measured if value < batch)
        high = min(value for value in measured if value > batch)
        return (Remark(f"{what} at local batch {batch}: interpolated between {low} and {high}", False),)
    nearest, end = (measured[0], "smallest") if batch < measured[0] else (measured[-1], "largest")
    return (Remark(f"{what} at local batch {batch}: scaled from {nearest}, the {end} measured", True),)
