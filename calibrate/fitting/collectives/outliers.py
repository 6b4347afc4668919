"""Repetitions of collectives far from the rest: how many, how far, and when."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from calibrate.fitting.collectives.communication_curve import Point
from calibrate.profile.collectives.communication import CommunicationFit, Outliers
from calibrate.statistics.blocks import far_from_the_rest
from paradl_bench.core.units import format_bytes

SHOWN_OUTLIERS = 5
"""Lines that a person is shown; the profile holds all."""


def outliers_of(point: Point) -> tuple[Outliers, ...]:
    """Repetitions of a point far from the rest, as one entry; none where there are none."""
    far = far_from_the_rest(point.blocks)
    everything, outside = np.concatenate(point.blocks), np.concatenate(far)
    if not outside.any():
        return ()
    outliers = Outliers(
        ranks=point.ranks,
        message_bytes=point.message_bytes,
        repetitions=int(outside.sum()),
        total=len(everything),
        ratio=float(np.median(everything[outside]) / np.median(everything[~outside])),
        blocks=tuple(number for number, block in enumerate(far) if block.any()),
    )
    return (outliers,)


def outlier_words(fits: Iterable[CommunicationFit]) -> tuple[str, ...]:
    """One line for each point that has outliers, those first that weigh most (how many times how far)."""
    points = [(fit, point) for fit in fits for point in fit.outliers]
    points.sort(key=lambda pair: -pair[1].repetitions / pair[1].total * abs(np.log(max(pair[1].ratio, 1e-9))))
    return tuple(_line(fit, point) for fit, point in points)


def _line(fit: CommunicationFit, far: Outliers) -> str:
    """``slower than the rest: 3 of 40 repetitions of gloo all_reduce, 64.0 MiB on 2 ranks, took ...``."""
    kind = "slower than the rest" if far.ratio > 1 else "faster than the rest"
    blocks = ", ".join(map(str, far.blocks))
    when = f"all in block {blocks}" if len(far.blocks) == 1 else f"in blocks {blocks}"
    return (
        f"{kind}: {far.repetitions} of {far.total} repetitions of {fit.library} {fit.operation}, "
        f"{format_bytes(far.message_bytes)} on {far.ranks} ranks, took {far.ratio:.1f} times the median, {when}"
    )
