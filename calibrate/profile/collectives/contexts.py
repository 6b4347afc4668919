"""What surrounds a collective and what that does: an entry a collective and context (docs/model/communication.md).

In a context a call takes ``added_s`` + ``factor`` x its time idle. Of groups at once the factor is ParaDL's phi, and
multiplies what bytes take: the start-up needs no link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from paradl_bench.core.bounds import (
    Bytes,
    Covariance,
    PositiveCount,
    Ranks,
    Relative,
    Seconds,
    Share,
    Slowdown,
)
from paradl_bench.core.checks import check_covariance, check_rises
from paradl_bench.records.contexts.context import Context
from paradl_bench.records.emulation import GHOSTS

_SHORTEST_S = 1e-12
"""No call is shorter."""
WAITS = 0.5
"""Share of calls from which on they count as waiting for the all-reduce in flight."""


class ContextPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size: medians idle and in the context, and the latter under the fit of all sizes."""

    ranks: Ranks
    message_bytes: Bytes
    idle_s: Seconds
    in_context_s: Seconds
    fitted_s: Seconds


class InContext(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time in a context = added + factor x time idle, of one (library, operation, level, context).

    Attributes:
        groups: how many call at once, of that context; else 1.
        neighbour_level: that an all-reduce in flight spans, where it goes over more ranks than the calls; else empty.
        neighbours: what surrounded the calls (``layers``, ``ghosts``, ``conv2d``, ...).
        ranks: the range of ranks of a group. bytes_range: of message sizes.
        added_s: at least 0. factor: at least 1: nothing makes a call faster, less is noise.
        covariance: of (added_s, factor), by bootstrap over blocks, sizes and repetitions.
        neighbour_factor, neighbour_sd: how many times longer compute beside the call takes, and its deviation.
        neighbour_s: median seconds of what surrounded a call; None where that was not timed.
        waiting: share of the calls begun beside an all-reduce that ended after it. Above :data:`WAITS` the library has
            calls wait for it, and the rest says nothing.
        residual_relative_median: median over sizes of how far the fit is off.
        samples: calls in the context.
    """

    library: str
    operation: str
    level: str
    context: Context
    groups: Ranks = 1
    neighbour_level: str = ""
    neighbours: tuple[str, ...] = ()
    ranks: tuple[Ranks, Ranks]
    bytes_range: tuple[Bytes, Bytes]
    added_s: Seconds
    factor: Slowdown
    covariance: tuple[tuple[Covariance, Covariance], tuple[Covariance, Covariance]]
    neighbour_factor: Slowdown = 1.0
    neighbour_sd: Relative = 0.0
    neighbour_s: Seconds | None = None
    waiting: Share = 0.0
    residual_relative_median: Relative = 0.0
    samples: PositiveCount
    points: tuple[ContextPoint, ...] = ()

    def __post_init__(self) -> None:
        check_rises(self, "ranks", "bytes_range")
        check_covariance(self, "covariance")
        if (self.groups > 1) != (self.context == "groups"):
            raise ValueError(f"groups has to be 1, or of the context 'groups' at least 2, not {self.groups}")

    @property
    def of_compute(self) -> bool:
        """Whether something computed beside the call, and did not sleep; also where nothing is beside it."""
        return self.context != "with-compute" or GHOSTS not in self.neighbours

    @property
    def added_sd_s(self) -> float:
        """Standard deviation of the latency."""
        return math.sqrt(max(self.covariance[0][0], 0.0))

    @property
    def factor_sd(self) -> float:
        """Standard deviation of the factor."""
        return math.sqrt(max(self.covariance[1][1], 0.0))

    @property
    def spanned(self) -> str:
        """The level that an all-reduce in flight spans."""
        return self.neighbour_level or self.level

    @property
    def waits(self) -> bool:
        """Whether a call waits for the all-reduce that is in flight, instead of going on beside it."""
        return self.waiting > WAITS

    def extra_s(self, idle_s: float) -> float:
        """Seconds that the context adds to a call that takes so long idle."""
        return self.added_s + (self.factor - 1) * idle_s

    def slowdown(self, idle_s: float) -> tuple[float, float]:
        """How many times longer a call of ``idle_s`` takes, and the standard deviation of that."""
        idle_s = max(idle_s, _SHORTEST_S)
        (added, both), (_, slope) = self.covariance
        variance = added / idle_s**2 + 2 * both / idle_s + slope
        return self.factor + self.added_s / idle_s, math.sqrt(max(variance, 0.0))


def contention_of(entries: Sequence[InContext], groups: float) -> tuple[float, float]:
    """phi for ``groups`` groups and its sd, from at least one entry of one (library, operation, level).

    Straight between neighbouring numbers of groups, from 1 for one group on. Beyond the largest the last slope goes on:
    flows that fill a link share it evenly, so that phi grows with their number.
    """
    if groups <= 1:
        return 1.0, 0.0
    known = [(1.0, 1.0, 0.0)]
    known += sorted((float(entry.groups), entry.factor, entry.factor_sd) for entry in entries)
    lower, upper = next((pair for pair in itertools.pairwise(known) if groups <= pair[1][0]), (known[-2], known[-1]))
    share = (groups - lower[0]) / (upper[0] - lower[0])
    factor = lower[1] + share * (upper[1] - lower[1])
    # Neighbours are measured apart: their errors are independent.
    sd = math.hypot((1 - share) * lower[2], share * upper[2])
    return max(1.0, factor), sd
