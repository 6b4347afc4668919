"""What every prediction carries beside its seconds: where they come from, and how far they may be off.

Each *part* (a distinct work of a plan, or a sum that a closed form reads) has seconds, a source, and a spread of its
own. What several parts share (a slow machine, the slope of a communication fit) is a :class:`CorrelatedError`: one
random number that moves all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

UNIFORM_TO_SD = 1 / math.sqrt(12)
"""Standard deviation over width of a uniform distribution."""
MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for normal samples."""


UNKNOWN_RELATIVE_SD = 1 / math.sqrt(3)
"""Where no second measurement says how far a scaling is off: anything from nothing to twice is as likely."""


class Source(IntEnum):
    """Where a predicted second comes from, from the best on.

    ``PUBLISHED`` is a fit to somebody else's published measurements of such a device. ``STATED`` is a number of a
    cluster file: neither measured here nor derived. ``SCALED_BY_ROOFLINE`` is any of the former, on a device that was
    not measured. ``DATA_SHEET`` is a roofline of what the device's maker says.
    """

    MEASURED = 0
    REGRESSED = 1
    INTERPOLATED = 2
    PUBLISHED = 3
    SCALED = 4
    STATED = 5
    SCALED_BY_ROOFLINE = 6
    ROOFLINE = 7
    DATA_SHEET = 8


MEANINGS = {
    Source.MEASURED: "timed inside real iterations",
    Source.REGRESSED: "a fit to measurements, inside the range that it was fitted on",
    Source.INTERPOLATED: "between two measured batches",
    Source.PUBLISHED: "a fit to measurements of this kind of device that others published",
    Source.SCALED: "scaled from measurements, beyond their range",
    Source.STATED: "a number that a cluster file or an option gives, or that the model assumes; nobody measured it",
    Source.SCALED_BY_ROOFLINE: "scaled by the roofline from another device",
    Source.ROOFLINE: "FLOPs and bytes at the measured rates of the device",
    Source.DATA_SHEET: "FLOPs and bytes at the rates of the maker's data sheet",
}
"""What each source is, for a reader of a report."""


class UnmeasuredCollective(UserError):
    """The profile holds no fit of a collective that a strategy issues."""

    def __init__(self, operation: str, backend: str) -> None:
        command = f"paradl-bench collectives --ranks 2 --backend {backend} --ops {operation} -o DIR"
        super().__init__(
            f"the profile holds no fit of {operation} through {backend}; measure it: {command}, then calibrate fit"
        )
        self.operation = operation


class Remark(NamedTuple):
    """What a prediction has to say of a cost; equal texts are said once, with the names (layers) that they hold for."""

    text: str
    extrapolated: bool
    name: str = ""


CONTENTION = "contention"
"""The effect of groups that communicate at once."""
HOST_DISPATCH = "host dispatch"
"""The effect of a host that dispatches kernels more slowly than its device runs them."""


class Adjustment(NamedTuple):
    """Seconds that one effect adds to a cost (negative where it takes some away), by the effect's name."""

    effect: str
    seconds: float


class Cost(NamedTuple):
    """Seconds of one work.

    Attributes:
        seconds: with all adjustments in. independent_sd_s: spread of its own.
        batch_sd_s: what interpolating or scaling over the batch leaves open, shared by all works that it touched.
        method_sd_s: what another scaling, or a roofline, leaves open, shared by all works of the same ``method``.
        adjustments: what single effects changed of the seconds. base_source: of the seconds before; None for the same.
    """

    seconds: float
    source: Source
    independent_sd_s: float = 0.0
    batch_sd_s: float = 0.0
    method_sd_s: float = 0.0
    remarks: tuple[Remark, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()
    base_source: Source | None = None
    method: str = ""

    @property
    def method_relative_sd(self) -> float:
        """What the method leaves open, over the seconds; infinite of none. Regressed and scaled times compare by it."""
        return self.method_sd_s / self.seconds if self.seconds else math.inf

    @property
    def origin(self) -> Source:
        """Where the seconds before any adjustment come from."""
        return self.source if self.base_source is None else self.base_source

    @property
    def base_s(self) -> float:
        """Seconds before any adjustment."""
        return self.seconds - sum(change.seconds for change in self.adjustments)

    def adjusted(self, effect: str, seconds: float) -> Cost:
        """So many seconds instead; the difference is the effect's."""
        added_s = seconds - self.seconds
        change = (Adjustment(effect, added_s),) if added_s else ()
        return self._replace(seconds=seconds, adjustments=(*self.adjustments, *change), base_source=self.origin)

    def times(self, factor: float) -> Cost:
        """So many times as much of all of it: seconds, what effects add to them, and what they may be off."""
        return self._each(lambda seconds: seconds * factor)

    def over(self, parts: float) -> Cost:
        """One of so many equal parts of it."""
        return self._each(lambda seconds: seconds / parts)

    def _each(self, change: Callable[[float], float]) -> Cost:
        return self._replace(
            seconds=change(self.seconds),
            independent_sd_s=change(self.independent_sd_s),
            batch_sd_s=change(self.batch_sd_s),
            method_sd_s=change(self.method_sd_s),
            adjustments=tuple(Adjustment(effect, change(added)) for effect, added in self.adjustments),
        )


class CorrelatedError(NamedTuple):
    """One source of error that moves many parts together: what one standard deviation of it changes, per part."""

    name: str
    seconds: Floats
    compute_slowdown: Floats
    communication_slowdown: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Parts as arrays, all of length n.

    Attributes:
        seconds: of one occurrence of a part, on an otherwise idle device. counts: how often it occurs in an iteration.
        source: index of :class:`Source`; parts of mixed origin hold shares, so shape (n, sources), rows adding up to 1.
        measurement: parts with equal numbers share one measurement, whose error they share.
        compute_slowdown, communication_slowdown: of the two while this collective runs beside compute; 1 for others.
    """

    seconds: Floats
    counts: Floats
    source: Floats
    independent_sd_s: Floats
    measurement: Ints
    is_communication: NDArray[np.bool_]
    compute_slowdown: Floats
    communication_slowdown: Floats
    modes: tuple[CorrelatedError, ...]

    @property
    def total_s(self) -> Floats:
        """Seconds of all occurrences, per part."""
        return np.asarray(self.seconds * self.counts)

    @property
    def sd_s(self) -> Floats:
        """Standard deviation of one occurrence of each part, its own and what it shares with others."""
        shared = sum((mode.seconds**2 for mode in self.modes), start=np.zeros(len(self.seconds)))
        return np.asarray(np.sqrt(self.independent_sd_s**2 + shared))

    @property
    def compute_s(self) -> float:
        """Seconds of all parts that are no communication."""
        return float(self.total_s[~self.is_communication].sum())

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives, unhindered."""
        return float(self.total_s[self.is_communication].sum())

    @property
    def independent_total_sd_s(self) -> float:
        """Standard deviation of the sum of all parts from their own spreads, in quadrature over measurements."""
        weighted = np.bincount(self.measurement, weights=self.independent_sd_s * self.counts)
        return float(np.sqrt(np.sum(weighted**2)))

    def source_shares(self) -> dict[str, float]:
        """Share of all predicted seconds by source, in lower case; they add up to 1 where there are any seconds."""
        total = self.total_s
        whole = float(total.sum())
        shares = total @ self.source / whole if whole else np.zeros(len(Source))
        return {source.name.lower(): float(shares[source]) for source in Source}


@dataclass(slots=True)
class Remarks:
    """Remarks of all parts of a prediction, each text once, in the order of its first occurrence."""

    _names: dict[tuple[str, bool], dict[str, None]] = field(default_factory=dict)

    def add(self, *remarks: Remark) -> None:
        """Take remarks in."""
        for remark in remarks:
            names = self._names.setdefault((remark.text, remark.extrapolated), {})
            if remark.name:
                names[remark.name] = None

    def extrapolated(self) -> tuple[str, ...]:
        """Lines on what lies beyond measurement."""
        return self._lines(extrapolated=True)

    def notes(self) -> tuple[str, ...]:
        """All other lines."""
        return self._lines(extrapolated=False)

    def _lines(self, *, extrapolated: bool) -> tuple[str, ...]:
        return tuple(
            text + (f": {_first_few(list(names))}" if names else "")
            for (text, is_extrapolated), names in self._names.items()
            if is_extrapolated == extrapolated
        )


def _first_few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
