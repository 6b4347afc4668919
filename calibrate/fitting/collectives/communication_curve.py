"""Measured points of one (library, operation, level) as arrays, with what their blocks say of their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.statistics.blocks import far_from_the_rest, quantile_covariance
from paradl_bench.core.statistics import IQR_TO_SD, MAD_TO_SD, Floats

Mask = NDArray[np.bool_]

DRAWS = 200
_FEWEST_BOTH_WAYS = 8


class Point(NamedTuple):
    """One (ranks, size): seconds of each call, an array a block in order; and how many of the ranks shared a node.

    Attributes:
        other_way_s: where one value is all there is, what the same run took with the other way of buffers (in place,
            out of place); 0 where it was not measured.
    """

    ranks: int
    message_bytes: int
    blocks: tuple[Floats, ...]
    ranks_per_node: int = 1
    other_way_s: float = 0.0

    @property
    def alone(self) -> bool:
        """Whether one value is all there is, which tells nothing of its spread."""
        return sum(len(block) for block in self.blocks) == 1

    @property
    def seconds(self) -> float:
        """Median over all calls but those far from the rest."""
        return float(np.median(np.concatenate(without_outliers(self.blocks))))


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one (library, operation, level) as arrays.

    Attributes:
        noise: relative standard deviation of a point's time, as the samples show it (median over points).
        precision: how much each point counts in the fit and in choosing it.
        drawn: (draws, points) times under resampled blocks.
        own: which points were measured at this level. The others lie inside one node; only hierarchical algorithms,
            which say what a node takes, are fitted to them too.
        ranks_per_node: of each point's group. places: distinct own (ranks, ranks per node), shape (places, 2).
        place: of each own point, the index of its place.
        blocks: that a point's calls come in (median over points).
    """

    ranks: Floats
    message_bytes: Floats
    seconds: Floats
    noise: float
    precision: Floats
    drawn: Floats
    own: Mask
    ranks_per_node: Floats
    places: Floats
    place: NDArray[np.int64]
    blocks: int

    def __len__(self) -> int:
        return len(self.seconds)

    def part(self, chosen: Mask) -> Curve:
        """The chosen points alone, at least one of them own."""
        kept = {
            name: getattr(self, name)[chosen]
            for name in ("ranks", "message_bytes", "seconds", "precision", "own", "ranks_per_node")
        }
        places, place = np.unique(self.place[chosen], return_inverse=True)
        return replace(self, **kept, drawn=self.drawn[:, chosen], places=self.places[places], place=place)


def build_curve(points: Sequence[Point], *, inside: Sequence[Point] = ()) -> Curve:
    """Arrays of the points, and their times under resampled blocks.

    All points draw the same blocks, since what slows a block slows all sizes in it; a point of one block draws
    repetitions. Deviations are stretched by sqrt(n / (n - 1)) of n blocks, which resampling alone leaves out.

    Args:
        inside: points of the level inside a node.
    """
    at_level = np.array([True] * len(points) + [False] * len(inside))
    points = [*points, *inside]
    generator = np.random.default_rng(0)
    seconds = np.array([point.seconds for point in points])
    picks = generator.random((DRAWS, max(len(point.blocks) for point in points)))
    drawn = np.empty((DRAWS, len(points)))
    for index, point in enumerate(points):
        drawn[:, index] = _draw_medians(without_outliers(point.blocks), picks, generator)
    alone = np.array([point.alone for point in points])
    unknown_sd = _sd_where_alone(points, drawn[:, ~alone] / seconds[~alone])
    drawn[:, alone] *= 1 + unknown_sd * generator.standard_normal((DRAWS, int(alone.sum())))
    drawn = np.maximum(drawn, seconds * 1e-3)
    relative_sd = np.sqrt(np.diag(quantile_covariance(drawn / seconds)))
    relative_sd[alone] = unknown_sd
    ranks, per_node = (
        np.array([getattr(point, name) for point in points], float) for name in ("ranks", "ranks_per_node")
    )
    together = np.stack([ranks, per_node], axis=1)
    places, of_own = np.unique(together[at_level], axis=0, return_inverse=True)
    place = np.zeros(len(points), np.int64)
    place[at_level] = of_own.reshape(-1)
    return Curve(
        ranks=ranks,
        message_bytes=np.array([point.message_bytes for point in points], float),
        seconds=seconds,
        noise=float(np.median(relative_sd)),
        precision=_precision(np.maximum(relative_sd, [_spread_of_calls(point) for point in points])),
        drawn=drawn,
        own=at_level,
        ranks_per_node=per_node,
        places=places,
        place=place,
        blocks=int(np.median([len(point.blocks) for point in points])),
    )


def _sd_where_alone(points: Sequence[Point], others: Floats) -> float:
    """Relative standard deviation of points of one value: by both ways of buffers, else as of ``others``."""
    between_ways = noise_between_ways(points)
    if between_ways is not None:
        return between_ways
    # A spread of 0 would have them decide the fit over points whose spread is known.
    return float(np.median(np.sqrt(np.diag(quantile_covariance(others))))) if others.size else 0.0


def noise_between_ways(points: Sequence[Point]) -> float | None:
    """Relative standard deviation of one time, from a run's two of each size: in place and out of place.

    The ways themselves may differ, by a copy that grows with the size. So each log ratio is held against the mean of
    those of the next smaller and the next larger size (Gasser, Sroka and Jennen-Steinmetz 1986), whose variance
    is three halves of a ratio's, which holds that of two times. It is the noise within a run; what runs differ by is
    more. None where fewer than eight sizes were timed both ways.
    """
    apart: list[float] = []
    for ranks in {point.ranks for point in points}:
        pairs = sorted((p.message_bytes, p.seconds, p.other_way_s) for p in points if p.ranks == ranks)
        ratios = np.log([other_s / own_s for _, own_s, other_s in pairs if other_s > 0])
        apart += (ratios[1:-1] - (ratios[:-2] + ratios[2:]) / 2).tolist()
    if len(apart) < _FEWEST_BOTH_WAYS:
        return None
    return MAD_TO_SD * float(np.median(np.abs(apart))) / float(np.sqrt(1.5 * 2))


def without_outliers(blocks: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """Blocks without calls far from the rest; a block of nothing else holds what the others kept."""
    kept = [block[~far] for block, far in zip(blocks, far_from_the_rest(blocks), strict=True)]
    rest = np.concatenate(kept)
    return tuple(block if len(block) else rest for block in kept)


def _spread_of_calls(point: Point) -> float:
    """Interquartile range of single calls as a relative standard deviation, over the root of the number of blocks.

    A median of calls that take one of two times hardly moves from draw to draw while one of them has the majority.
    """
    low, high = np.quantile(np.concatenate(point.blocks), [0.25, 0.75])
    return IQR_TO_SD * float(high - low) / point.seconds / float(np.sqrt(len(point.blocks)))


def _precision(relative_sd: Floats) -> Floats:
    """Weights of points from the relative standard deviations of their times: min(1, (2 quartile / sd)^2).

    Only what is noisier than twice the lower quartile counts less, as sizes whose time jumps between two modes (gloo's
    small messages, when its threads share a pinned core): a point's own spread is known from a few blocks only.
    """
    quartile = max(float(np.quantile(relative_sd, 0.25)), 1e-6)
    return np.asarray(np.minimum(1.0, (2 * quartile / np.maximum(relative_sd, 1e-6)) ** 2))


def _draw_medians(blocks: tuple[Floats, ...], picks: Floats, generator: np.random.Generator) -> Floats:
    count = len(blocks)
    if count == 1:
        calls = blocks[0]
        medians = np.median(generator.choice(calls, size=(len(picks), calls.size)), axis=1)
        return np.asarray(medians)
    longest = max(block.size for block in blocks)
    table = np.stack([np.resize(block, longest) for block in blocks])
    chosen = table[(picks[:, :count] * count).astype(int)].reshape(len(picks), -1)
    middle = np.median(np.concatenate(blocks))
    return np.asarray(middle + (np.median(chosen, axis=1) - middle) * np.sqrt(count / (count - 1)))
