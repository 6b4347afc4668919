"""What surrounds a collective and what that does to it, from the profile: the likest entry, flagged if it is another.

Nobody who did not measure compute beside collectives should be told that overlap is free: on GPUs it never was. Kernels
of a collective hold multiprocessors, and what they move goes through the memory that compute reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from calibrate.fitting.collectives.communication_spread import cholesky_columns
from calibrate.profile.collectives.communication_residuals import SizeRatios
from calibrate.profile.collectives.communication_time import outside
from calibrate.profile.collectives.contexts import InContext
from calibrate.profile.profile import Profile
from paradl_bench.core.statistics import Z90
from paradl_bench.records.contexts.context import Context
from predict.costs.sourced import Remark

PUBLISHED_COMPUTE_SLOWDOWN = 1.189
"""Compute with communication beside it over compute by itself: the mean over models, parallelism and A100, H100, MI210
and MI250 in "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning"
(arXiv:2507.03114, abstract; 1.4 at most). That is of all compute, whatever part had communication beside it, so the
least that it can be while both are under way. What it costs collectives is not told."""


def assumed_beside(*, shares_links: bool) -> tuple[float, float]:
    """How many times longer a call takes beside an all-reduce where nobody measured it, and the deviation of that.

    Libraries keep groups apart: NCCL in streams, gloo in threads. So both go on, and share the links if they use the
    same: twice as long, else as long as alone. It may be that much more or less.
    """
    return (2.0 if shares_links else 1.0), 1 / Z90


_UNMEASURED: dict[Context, str] = {
    "after-compute": "collectives that wait for compute: the added time was not measured",
    "with-all-reduce": "calls beside all-reduces were not measured: they are taken to go on, and to share links",
}


def measure_with(context: str) -> str:
    """The command that measures it."""
    return f"paradl-bench collectives --contexts {context}"


class Wanted(NamedTuple):
    """A call in a context, as it is looked for; ``spanned``: the level of the all-reduces in flight. 0: any will do."""

    context: Context
    operation: str
    level: str
    spanned: str = ""
    ranks: int = 0
    message_bytes: int = 0

    @property
    def words(self) -> str:
        """For a remark."""
        over = f" at level {self.spanned!r}" if self.spanned else ""
        context = "groups at once" if self.context == "groups" else self.context
        return f"{self.operation} at level {self.level!r} {context}{over}"


class Slowdown(NamedTuple):
    """How much slower compute and the collective each are side by side, with standard deviations over what ran."""

    compute: float
    communication: float
    compute_sd: float
    communication_sd: float


class ContextCosts:
    """Entries of one library, and the likest of them."""

    def __init__(self, profile: Profile, backend: str) -> None:
        self._entries: dict[Context, list[InContext]] = {}
        for entry in profile.contexts:
            if entry.library == backend and entry.of_compute:
                self._entries.setdefault(entry.context, []).append(entry)

    def has(self, context: Context) -> bool:
        """Whether any collective was measured in it."""
        return context in self._entries

    def likest(self, wanted: Wanted) -> tuple[InContext | None, tuple[Remark, ...]]:
        """What was measured of such a call, else of the most alike, which is said; None where nothing was."""
        known = self._entries.get(wanted.context, [])
        if wanted.context == "groups":
            # Links of another level say nothing of those of this one.
            known = [entry for entry in known if entry.level == wanted.level]
        if not known:
            what = _UNMEASURED.get(wanted.context, f"{wanted.context} was not measured")
            return None, (Remark(f"{what}: {measure_with(wanted.context)}", True),)
        entry = min(known, key=lambda measured: _unlikeness(measured, wanted))
        spanned = entry.spanned if wanted.spanned else ""
        likest = Wanted(wanted.context, entry.operation, entry.level, spanned)
        remarks = []
        if likest != wanted._replace(ranks=0, message_bytes=0):
            # Calls inside of groups whose gradients go over more ranks are swept by an option of its own.
            inside = wanted.spanned not in ("", wanted.level)
            how = f"; measure it: {measure_with(wanted.context)} --side-by-side R" if inside else ""
            remarks.append(Remark(f"{wanted.words}: as {likest.words}{how}", True))
        if entry.ranks[1] < wanted.ranks:
            remarks.append(Remark(f"{wanted.context} beyond the {entry.ranks[1]} ranks that were measured", True))
        return entry, tuple(remarks)

    def of_other_groups(self, entry: InContext) -> list[InContext]:
        """What was measured of all numbers of groups at once, of an entry's operation and level."""
        alike = (entry.operation, entry.level)
        return [other for other in self._entries["groups"] if (other.operation, other.level) == alike]

    def with_compute(self, wanted: Wanted, idle_s: float, *, of_gpu: bool) -> tuple[Slowdown, tuple[Remark, ...]]:
        """What compute and a collective side by side cost each other: as measured, else as published for GPUs.

        Where neither says, nothing, and flagged.
        """
        entry, remarks = self.likest(wanted)
        if entry is not None:
            factor, sd = entry.slowdown(idle_s) if idle_s else (entry.factor, entry.factor_sd)
            return Slowdown(entry.neighbour_factor, factor, entry.neighbour_sd, sd), remarks
        measure = f"measure it: {measure_with('with-compute')}"
        if of_gpu:
            text = (
                f"no interference was measured: simulate takes compute to last {PUBLISHED_COMPUTE_SLOWDOWN:g}"
                f" times as long beside communication, a published mean of GPUs (arXiv:2507.03114); {measure}"
            )
            return Slowdown(PUBLISHED_COMPUTE_SLOWDOWN, 1.0, 0.0, 0.0), (Remark(text, True),)
        return Slowdown(1.0, 1.0, 0.0, 0.0), (
            Remark(f"no interference was measured: overlap is taken as free; {measure}", True),
        )


def _unlikeness(entry: InContext, wanted: Wanted) -> tuple[object, ...]:
    return (
        entry.operation != wanted.operation,
        entry.level != wanted.level,
        wanted.spanned not in ("", entry.spanned),
        abs(math.log(entry.ranks[1] / wanted.ranks)) if wanted.ranks else 0.0,
        outside(wanted.message_bytes, entry.bytes_range) if wanted.message_bytes else 0.0,
        -entry.samples,
    )


def error_modes(entry: InContext, idle_s: float) -> tuple[tuple[str, float], ...]:
    """What one standard deviation of each number of an entry adds to a call that takes so long idle."""
    where = f"{entry.operation} {entry.context} at {entry.level}"
    return tuple(
        (f"{where}, {number}", first + second * idle_s)
        for number, (first, second) in enumerate(cholesky_columns(entry.covariance), start=1)
    )


def between_them(entry: InContext, swept_s: Callable[[int, int], float]) -> SizeRatios:
    """What idle calls between those in a context take of what a sweep finds, by size; the median over rank counts.

    A sweep's calls follow each other on the same buffers and on cores that nothing else was on: large ones find their
    data in the caches, which a run's do not, and where ranks share cores short ones hinder each other more. A size
    that its two neighbours agree against takes the nearer of theirs (a median of three): few pairs are behind each.

    Args:
        swept_s: of ranks and bytes, as they are predicted from the sweep.
    """
    ratios: dict[int, list[float]] = {}
    for point in entry.points:
        swept = swept_s(point.ranks, point.message_bytes)
        if swept > 0 and point.idle_s > 0 and point.message_bytes > 0:
            ratios.setdefault(point.message_bytes, []).append(math.log(point.idle_s / swept))
    sizes = sorted(ratios)
    raw = [median(ratios[size]) for size in sizes]
    inner = [median(raw[index - 1 : index + 2]) for index in range(1, len(raw) - 1)]
    return SizeRatios(tuple(map(math.log, sizes)), (*raw[:1], *inner, *raw[max(1, len(raw) - 1) :]))
