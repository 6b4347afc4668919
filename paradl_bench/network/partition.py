"""How extents are cut over ranks, and which ranks hold what a window operation reads: halos, derived and never guessed.

A box is one interval a dim, in global coordinates. Halos follow from two lists of boxes, what each rank owns and what
each rank reads; kernel, stride, padding, dilation and uneven cuts need no case of their own, and corners of a cut over
several dims come out as messages between diagonal neighbours. The plan counts these messages; the run sends them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """Positions from ``start`` to before ``stop`` along one dim; may reach beyond the tensor into its padding."""

    start: int
    stop: int

    @property
    def extent(self) -> int:
        """Number of positions; 0 where it ends before it starts."""
        return max(0, self.stop - self.start)

    def shifted(self, by: int) -> Interval:
        """As many positions, ``by`` further on."""
        return Interval(self.start + by, self.stop + by)

    def meet(self, other: Interval) -> Interval:
        """What both hold."""
        return Interval(max(self.start, other.start), min(self.stop, other.stop))


Box = tuple[Interval, ...]


# Layers repeat, and are cut alike.
@functools.lru_cache(maxsize=1024)
def cut(extent: int, parts: int) -> tuple[Interval, ...]:
    """``parts`` intervals of nearly equal extent; the first ``extent % parts`` hold one position more."""
    small, larger = divmod(extent, parts)
    bounds = [0, *itertools.accumulate(small + (part < larger) for part in range(parts))]
    return tuple(Interval(start, stop) for start, stop in itertools.pairwise(bounds))


def cut_box(extents: Sequence[int], parts: Sequence[int]) -> tuple[Box, ...]:
    """Boxes of all ranks of a grid, the last dim counting fastest; dims beyond ``parts`` stay whole."""
    whole = (1,) * (len(extents) - len(parts))
    return tuple(
        itertools.product(*(cut(extent, count) for extent, count in zip(extents, (*parts, *whole), strict=True)))
    )


def box_elements(box: Box) -> int:
    """Positions in a box."""
    return math.prod(interval.extent for interval in box)


def meet(one: Box, other: Box) -> Box | None:
    """What both boxes hold; None where that is nothing."""
    shared = tuple(a.meet(b) for a, b in zip(one, other, strict=True))
    return shared if box_elements(shared) else None


class Window(NamedTuple):
    """What one output position reads along one dim: ``kernel`` inputs, ``dilation`` apart.

    ``padding`` is what stands before the first input; what follows the last one shows in the output's extent, with
    ``ceil_mode`` or without.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int

    def read(self, output: Interval) -> Interval:
        """Inputs that an interval of outputs reads; outside the tensor where it reads padding."""
        start = output.start * self.stride - self.padding
        reach = self.dilation * (self.kernel - 1) + 1
        return Interval(start, (output.stop - 1) * self.stride - self.padding + reach)


def read_boxes(outputs: Sequence[Box], windows: Sequence[Window]) -> tuple[Box, ...]:
    """What each rank reads of the input for its box of the output."""
    return tuple(tuple(window.read(interval) for window, interval in zip(windows, box, strict=True)) for box in outputs)


class Transfer(NamedTuple):
    """A box that is sent to, or received from, ``peer`` (a rank of the group)."""

    peer: int
    box: Box


class Halo(NamedTuple):
    """What one rank does so that it holds what it reads.

    Attributes:
        owned, read: boxes before and after; ``read`` may reach into padding.
        kept: what it owns of what it reads; None where that is nothing.
        sends, receives: by ascending peer.
    """

    owned: Box
    read: Box
    kept: Box | None
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def halos(owned: Sequence[Box], read: Sequence[Box]) -> tuple[Halo, ...]:
    """What every rank sends and receives; nobody is sent what it owns, and padding is sent by nobody.

    Args:
        owned: per rank; parts of a grid (:func:`cut_box`), so that boxes that differ share nothing.
    """
    sends: list[list[Transfer]] = [[] for _ in owned]
    receives: list[list[Transfer]] = [[] for _ in owned]
    kept: list[Box | None] = [None] * len(owned)
    owner_of = _Owners(owned)
    for reader, box in enumerate(read):
        for source in owner_of(box):
            part = meet(owned[source], box)
            if source == reader:
                kept[reader] = part
            elif part is not None:
                sends[source].append(Transfer(reader, part))
                receives[reader].append(Transfer(source, part))
    return tuple(
        Halo(owned[rank], read[rank], kept[rank], tuple(sends[rank]), tuple(receives[rank]))
        for rank in range(len(owned))
    )


class _Owners:
    """Which ranks of a grid own some of a box, ascending; as many steps as there are such ranks, not as ranks."""

    def __init__(self, owned: Sequence[Box]) -> None:
        self._rank_of = {box: rank for rank, box in enumerate(owned)}
        self._intervals = [sorted(set(of_dim)) for of_dim in zip(*owned, strict=True)]

    def __call__(self, box: Box) -> list[int]:
        met = [
            [interval for interval in intervals if interval.meet(wanted).extent]
            for intervals, wanted in zip(self._intervals, box, strict=True)
        ]
        return sorted(self._rank_of[owned] for owned in itertools.product(*met))


class ChannelShard(NamedTuple):
    """One rank's part of a convolution or fully connected layer that is split by filters or by input channels.

    Attributes:
        filters, channels: of the output and of the input that it computes with.
        group_channels: of the channels of one group, those whose weights it holds (the weight's second dim).
        groups: of the convolution that it runs.
    """

    filters: Interval
    channels: Interval
    group_channels: Interval
    groups: int


def shard_filters(out_channels: int, in_channels: int, groups: int, parts: int) -> tuple[ChannelShard, ...] | None:
    """Shards by filters: whole groups a rank, or an equal share of one group; None where neither works out.

    Filters of ranks follow each other in the order of ranks.
    """
    return _shards(out_channels, in_channels, groups, parts, by_filters=True)


def shard_channels(out_channels: int, in_channels: int, groups: int, parts: int) -> tuple[ChannelShard, ...] | None:
    """Shards by input channels, likewise."""
    return _shards(out_channels, in_channels, groups, parts, by_filters=False)


def _shards(
    out_channels: int, in_channels: int, groups: int, parts: int, *, by_filters: bool
) -> tuple[ChannelShard, ...] | None:
    filters, channels = Interval(0, out_channels // groups), Interval(0, in_channels // groups)
    if groups >= parts and groups > 1:
        return tuple(
            ChannelShard(
                Interval(part.start * filters.stop, part.stop * filters.stop),
                Interval(part.start * channels.stop, part.stop * channels.stop),
                channels,
                part.extent,
            )
            for part in cut(groups, parts)
        )
    divided = filters if by_filters else channels
    if parts % groups or divided.extent < parts // groups:
        return None
    shards = []
    for group in range(groups):
        for share in cut(divided.extent, parts // groups):
            own_filters, own_channels = (share, channels) if by_filters else (filters, share)
            shards.append(
                ChannelShard(
                    own_filters.shifted(group * filters.stop),
                    own_channels.shifted(group * channels.stop),
                    own_channels,
                    1,
                )
            )
    return tuple(shards)
