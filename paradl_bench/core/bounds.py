"""Numbers of all formats: each type says the unit, the least and the most that a file may hold.

msgspec holds what it reads to these bounds and names the path of the first wrong field. The bounds are wider than any
machine, and narrow enough that sums, products and squares of a few such numbers stay finite. Checks between fields
stand in the formats themselves.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from paradl_bench.core.errors import UserError

LONGEST_S = 1e9
"""Thirty years: what is longer is no measurement, and its square no number."""
MOST_RANKS = 1 << 20
MOST_COUNTED = 1 << 40
MOST_BYTES = 1 << 60
MOST_ELEMENTS = 1 << 50
MOST_MICRO_BATCHES = 1 << 14
"""Of a pipeline's iteration: each has its own tasks in a plan."""
MOST_ACCUMULATED = 1 << 10
"""Of an iteration without a pipeline, whose plans add the tasks one by one: 16,384 take half a minute to validate."""
SHORTEST_S = 1e-15
"""A shorter time is no measurement; its reciprocal overflows easily."""
_MOST_RELATIVE = 1e9
_MOST_CLOCK_S = 1e12
_MOST_RATE = 1e24

Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
PositiveSeconds = Annotated[float, msgspec.Meta(ge=SHORTEST_S, le=LONGEST_S)]
SignedSeconds = Annotated[float, msgspec.Meta(ge=-LONGEST_S, le=LONGEST_S)]
"""A difference of two times."""
ClockSeconds = Annotated[float, msgspec.Meta(ge=-_MOST_CLOCK_S, le=_MOST_CLOCK_S)]
"""A clock's stamp, or what two clocks differ by."""
Samples = Annotated[tuple[Seconds, ...], msgspec.Meta(min_length=1)]
"""Raw times, at least one."""
SignedSamples = Annotated[tuple[SignedSeconds, ...], msgspec.Meta(min_length=1)]
WholeSeconds = Annotated[int, msgspec.Meta(ge=0, le=int(LONGEST_S))]
SecondsPerByte = Annotated[float, msgspec.Meta(ge=0, le=1e3)]
Covariance = Annotated[float, msgspec.Meta(ge=-1e36, le=1e36)]
"""An entry of a covariance matrix: the product of two quantities' units."""

Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
SignedBytes = Annotated[int, msgspec.Meta(ge=-MOST_BYTES, le=MOST_BYTES)]
"""A difference of two sizes."""
ElementBytes = Annotated[int, msgspec.Meta(ge=1, le=16)]
PositiveBytes = Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)]
EstimatedBytes = Annotated[float, msgspec.Meta(ge=0, le=float(MOST_BYTES))]
PositiveEstimatedBytes = Annotated[float, msgspec.Meta(ge=1, le=float(MOST_BYTES))]

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNTED)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNTED)]
MicroBatches = Annotated[int, msgspec.Meta(ge=1, le=MOST_MICRO_BATCHES)]
Accumulated = Annotated[int, msgspec.Meta(ge=1, le=MOST_ACCUMULATED)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNTED)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
RanksOrUnknown = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]
"""0 where nobody said."""
RankIndex = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
Extent = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNTED)]
"""Elements along one dimension."""
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
SchemaVersion = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]

MOST_NORM = 1e30
"""Of gradients; a square of it is finite in the widest type alone, and a larger one limits nothing."""
PositiveNorm = Annotated[float, msgspec.Meta(gt=0, le=MOST_NORM)]

Flops = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Work = Annotated[float, msgspec.Meta(ge=0, le=_MOST_RATE)]
"""FLOPs or bytes of a call."""
PositiveWork = Annotated[float, msgspec.Meta(gt=0, le=_MOST_RATE)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=_MOST_RATE)]
"""FLOPs or bytes a second."""
PositiveRate = Annotated[float, msgspec.Meta(ge=1e-3, le=_MOST_RATE)]

Relative = Annotated[float, msgspec.Meta(ge=0, le=_MOST_RELATIVE)]
"""A deviation, relative to what deviates."""
SignedRelative = Annotated[float, msgspec.Meta(ge=-_MOST_RELATIVE, le=_MOST_RELATIVE)]
Ratio = Annotated[float, msgspec.Meta(ge=1e-9, le=_MOST_RELATIVE)]
Slowdown = Annotated[float, msgspec.Meta(ge=1, le=_MOST_RELATIVE)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositiveShare = Annotated[float, msgspec.Meta(ge=1e-9, le=1)]
Cores = Annotated[float, msgspec.Meta(ge=0, le=float(MOST_RANKS))]
"""How many cores something kept busy, in the mean."""
AnyFloat = Annotated[float, msgspec.Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
"""Whatever a model computes or is told, if it is finite: losses, settings of layers."""
AnyInt = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Settings of layers: slices end at 2**63 - 1."""


def check_elements(extents: tuple[int, ...]) -> None:
    """Hold a shape to as many elements as a memory may have.

    Raises:
        UserError: it has more, as read from a file or as what is read there makes of it.
    """
    if math.prod(extents) > MOST_ELEMENTS:
        raise UserError(f"shape {'x'.join(map(str, extents))} holds more than {MOST_ELEMENTS} elements")
