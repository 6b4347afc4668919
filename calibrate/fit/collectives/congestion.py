"""How often a collective is congested, and how much longer it takes then, from the calls that alpha and beta leave out.

A fit is of typical times: calls far from the rest count for nothing in it. One call in twenty may take five times as
long all the same, and of an iteration's hundred exchanges five then do (docs/model.md, "Congestion").

A call is held against its point's own median where the point has enough calls to have one, else, as where a log has one
exchange of each tensor, against the fit. Means over many calls have their congestion in them and tell nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.fit.collectives.communication_curve import Floats, Mask, Point
from calibrate.profile.collectives.communication import Congestion
from calibrate.statistics.blocks import FEWEST_FOR_OUTLIERS, MOST_OUTLIERS, block_sd, far_from_the_rest

DOUBLINGS = 4
"""Sizes within a factor of sixteen are taken as congested alike."""
RATIOS = 10
"""A profile keeps so many: means of equal parts of all of them, which leave their mean as it was."""


class Call(NamedTuple):
    """Calls of a point's block: over what is usual for them, and which are far above the rest."""

    point: Point
    block: int
    relative: Floats
    far: Mask


def congestion_of(points: Sequence[Point], fitted_s: Floats) -> tuple[Congestion, ...]:
    """Congestion of a regime's calls by rank count and sizes; none where none was seen, or only in spells.

    A spell that outlasts an iteration makes all of it slow, which the median over iterations leaves out. So the
    probability is that of a typical block: the median over blocks.

    Args:
        fitted_s: of each point, under the fit.
    """
    groups: dict[tuple[int, int], list[Call]] = {}
    for call in _held_against_usual(points, fitted_s):
        groups.setdefault((call.point.ranks, int(math.log2(call.point.message_bytes) // DOUBLINGS)), []).append(call)
    found = tuple(_of_group(groups[key]) for key in sorted(groups))
    return found if any(each.probability for each in found) else ()


def _of_group(group: Sequence[Call]) -> Congestion:
    sizes = [each.point.message_bytes for each in group]
    about: dict[str, Any] = {"ranks": group[0].point.ranks, "bytes_range": (min(sizes), max(sizes))}
    total = sum(len(each.far) for each in group)
    # Of blocks of one call each, a log's tensors, none tells of time.
    alone = total == len(group)
    blocks: dict[int, list[Call]] = {}
    for each in group:
        blocks.setdefault(0 if alone else each.block, []).append(each)
    shares = [float(np.concatenate([each.far for each in own]).mean()) for own in blocks.values()]
    probability = float(np.median(shares))
    # Single calls are held against the fit: where most of some sizes lie above it, it is the fit that misses them.
    if not probability or probability > MOST_OUTLIERS:
        return Congestion(**about, probability=0.0, ratios=(), relative_sd=0.0, calls=total)
    ratios = np.sort(np.concatenate([each.relative[each.far] for each in group]))
    probability_sd = math.hypot(
        math.sqrt(probability * (1 - probability) / total), block_sd(shares) / math.sqrt(len(shares))
    )
    excess = float(ratios.mean()) - 1
    # A single call tells nothing of how much others exceed by.
    excess_sd = float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else excess
    return Congestion(
        **about,
        probability=probability,
        ratios=_equal_parts(ratios),
        relative_sd=math.hypot(probability_sd / probability, excess_sd / excess),
        calls=total,
    )


def _equal_parts(ratios: Floats) -> tuple[float, ...]:
    """Means of parts of sorted values, each of as many values as another, and be it not a whole number of them."""
    count = len(ratios)
    parts = min(RATIOS, count)
    ends = np.interp(np.linspace(0, count, parts + 1), np.arange(count + 1), np.concatenate([[0.0], np.cumsum(ratios)]))
    return tuple((np.diff(ends) * parts / count).tolist())


def _held_against_usual(points: Sequence[Point], fitted_s: Floats) -> list[Call]:
    found: list[Call] = []
    few: list[Call] = []
    for point, seconds in zip(points, fitted_s.tolist(), strict=True):
        if point.of_means:
            continue
        numbers = point.numbers or tuple(range(len(point.blocks)))
        enough = sum(map(len, point.blocks)) >= FEWEST_FOR_OUTLIERS
        usual = point.seconds if enough else seconds
        calls = [
            Call(point, number, block / usual, far)
            for number, block, far in zip(numbers, point.blocks, far_from_the_rest(point.blocks), strict=True)
        ]
        (found if enough else few).extend(calls)
    if few:
        far = far_from_the_rest([call.relative for call in few])
        found += [call._replace(far=own) for call, own in zip(few, far, strict=True)]
    return [call._replace(far=call.far & (call.relative > 1)) for call in found]
