"""Cuts, halos and shards, against counting position by position and weight by weight."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.network.partition import (
    Box,
    ChannelShard,
    Halo,
    Interval,
    Window,
    box_elements,
    cut,
    cut_box,
    halos,
    meet,
    read_boxes,
    shard_channels,
    shard_filters,
)

Positions = set[tuple[int, ...]]


def positions(box: Box) -> Positions:
    return set(itertools.product(*(range(interval.start, interval.stop) for interval in box)))


@given(st.integers(0, 100), st.integers(1, 12))
def test_a_cut_covers_every_position_once_and_nearly_evenly(extent: int, parts: int) -> None:
    found = cut(extent, parts)
    assert len(found) == parts
    assert [position for part in found for position in range(part.start, part.stop)] == list(range(extent))
    assert max(part.extent for part in found) - min(part.extent for part in found) <= 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_boxes_cover_every_position_once_the_last_dim_fastest(extents: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=len(extents)))
    boxes = cut_box(extents, parts)
    covered = Counter(position for box in boxes for position in positions(box))
    assert covered == Counter(itertools.product(*map(range, extents)))
    assert sum(map(box_elements, boxes)) == len(covered)
    assert [box for box in boxes if box_elements(box)] == sorted(box for box in boxes if box_elements(box))


def test_an_interval_that_ends_before_it_starts_is_empty() -> None:
    assert Interval(5, 3).extent == 0
    assert meet((Interval(0, 3),), (Interval(3, 6),)) is None
    assert meet((Interval(0, 3), Interval(0, 4)), (Interval(2, 6), Interval(1, 2))) == (Interval(2, 3), Interval(1, 2))


windows = st.builds(
    Window, kernel=st.integers(1, 5), stride=st.integers(1, 4), padding=st.integers(0, 3), dilation=st.integers(1, 3)
)


def output_extent(window: Window, extent: int, *, more: bool = False) -> int:
    """Positions of the output; one more where ceil_mode lets the last window reach beyond the padding."""
    reach = window.dilation * (window.kernel - 1) + 1
    return (extent + 2 * window.padding - reach) // window.stride + 1 + more


def inputs_of(window: Window, output: int) -> list[int]:
    """What one output position reads."""
    return [output * window.stride - window.padding + window.dilation * tap for tap in range(window.kernel)]


@given(windows, st.integers(0, 20), st.integers(1, 8))
def test_a_window_reads_every_input_from_first_to_last_tap(window: Window, start: int, count: int) -> None:
    outputs = Interval(start, start + count)
    taps = [tap for output in range(outputs.start, outputs.stop) for tap in inputs_of(window, output)]
    assert window.read(outputs) == Interval(min(taps), max(taps) + 1)


class Cut(NamedTuple):
    """Extents of input and output, windows, and parts, one a dim; every rank owns a position of both."""

    extents: list[int]
    windows: list[Window]
    outputs: list[int]
    parts: list[int]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """One to three dims, each cut or whole."""
    dims = draw(st.integers(1, 3))
    found = Cut([], [], [], [])
    for _ in range(dims):
        window, parts = draw(windows), draw(st.integers(1, 5 if dims == 1 else 3))
        reach = window.dilation * (window.kernel - 1) + 1
        # As many inputs as make an output a rank.
        smallest = max(parts, reach + (parts - 1) * window.stride - 2 * window.padding)
        extent = draw(st.integers(smallest, smallest + 8))
        for values, value in zip(
            found,
            (extent, window, output_extent(window, extent, more=draw(st.booleans())), parts),
            strict=True,
        ):
            values.append(value)  # type: ignore[arg-type]
    return found


def halo(drawn: Cut) -> tuple[Halo, ...]:
    outputs = cut_box(drawn.outputs, drawn.parts)
    return halos(cut_box(drawn.extents, drawn.parts), read_boxes(outputs, drawn.windows))


@given(cuts())
def test_a_rank_receives_exactly_the_inputs_it_does_not_own(drawn: Cut) -> None:
    tensor = set(itertools.product(*map(range, drawn.extents)))
    for exchange in halo(drawn):
        needed = positions(exchange.read) & tensor
        assert (positions(exchange.kept) if exchange.kept is not None else set()) == needed & positions(exchange.owned)
        received = Counter(position for part in exchange.receives for position in positions(part.box))
        assert received == Counter(needed - positions(exchange.owned))


@given(cuts())
def test_every_window_finds_all_of_its_inputs(drawn: Cut) -> None:
    for exchange, box in zip(halo(drawn), cut_box(drawn.outputs, drawn.parts), strict=True):
        for dim, (window, interval) in enumerate(zip(drawn.windows, box, strict=True)):
            read = exchange.read[dim]
            for output in range(interval.start, interval.stop):
                assert all(read.start <= tap < read.stop for tap in inputs_of(window, output))


@given(cuts())
def test_what_one_rank_sends_the_other_receives(drawn: Cut) -> None:
    found = halo(drawn)
    sent = {(rank, part.peer): part.box for rank, exchange in enumerate(found) for part in exchange.sends}
    received = {(part.peer, rank): part.box for rank, exchange in enumerate(found) for part in exchange.receives}
    assert sent == received
    for rank, exchange in enumerate(found):
        for part in exchange.sends:
            assert part.peer != rank
            assert positions(part.box) <= positions(exchange.owned)
        for parts in (exchange.sends, exchange.receives):
            assert [part.peer for part in parts] == sorted({part.peer for part in parts})


def test_one_part_exchanges_nothing() -> None:
    (alone,) = halo(Cut([7], [Window(3, 1, 1, 1)], [7], [1]))
    assert (alone.sends, alone.receives) == ((), ())
    assert alone.read == (Interval(-1, 8),)
    assert alone.kept == (Interval(0, 7),)


def test_corners_come_from_diagonal_neighbours() -> None:
    first = halo(Cut([4, 4], [Window(3, 1, 1, 1)] * 2, [4, 4], [2, 2]))[0]
    sizes = {part.peer: box_elements(part.box) for part in first.receives}
    assert sizes == {1: 2, 2: 2, 3: 1}


def test_a_halo_may_reach_beyond_the_neighbour() -> None:
    found = halo(Cut([6], [Window(7, 1, 3, 1)], [6], [6]))
    assert [part.peer for part in found[2].receives] == [0, 1, 3, 4, 5]


layers = st.builds(
    lambda groups, filters, channels: (groups * filters, groups * channels, groups),
    st.sampled_from([1, 1, 2, 3, 4, 6, 8]),
    st.integers(1, 7),
    st.integers(1, 7),
)


def weights(shards: tuple[ChannelShard, ...]) -> Counter[tuple[int, int]]:
    """How often each (filter, channel of its group) is held."""
    return Counter(
        (filter_, channel)
        for shard in shards
        for filter_ in range(shard.filters.start, shard.filters.stop)
        for channel in range(shard.group_channels.start, shard.group_channels.stop)
    )


def reads(shards: tuple[ChannelShard, ...]) -> Counter[tuple[int, int]]:
    """How often each filter is computed with each channel of the input, by the groups of what each rank runs."""
    found: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        filters, channels = shard.filters.extent // shard.groups, shard.channels.extent // shard.groups
        for group, filter_, channel in itertools.product(range(shard.groups), range(filters), range(channels)):
            own_filter = shard.filters.start + group * filters + filter_
            found[own_filter, shard.channels.start + group * channels + channel] += 1
    return found


@pytest.mark.parametrize("split", [shard_filters, shard_channels])
@given(layer=layers, parts=st.integers(1, 9))
def test_shards_tile_the_weight_and_its_work_exactly_once(
    split: type[object], layer: tuple[int, int, int], parts: int
) -> None:
    out_channels, in_channels, groups = layer
    shards: tuple[ChannelShard, ...] | None = split(out_channels, in_channels, groups, parts)  # type: ignore[call-arg, assignment]
    group_filters, group_channels = out_channels // groups, in_channels // groups
    if shards is None:
        divided = group_filters if split is shard_filters else group_channels
        shares = -(-parts // groups)
        assert divided < shares or (1 < groups < parts and parts % groups)
        return
    assert len(shards) == parts
    assert all(shard.filters.extent and shard.channels.extent and shard.groups for shard in shards)
    assert weights(shards) == Counter(itertools.product(range(out_channels), range(group_channels)))
    assert reads(shards) == Counter(
        (filter_, filter_ // group_filters * group_channels + channel)
        for filter_ in range(out_channels)
        for channel in range(group_channels)
    )


@given(layer=layers, parts=st.integers(1, 9))
def test_filters_of_ranks_and_channels_of_ranks_follow_each_other(layer: tuple[int, int, int], parts: int) -> None:
    filters, channels = shard_filters(*layer, parts), shard_channels(*layer, parts)
    for shards, of in ((filters, "filters"), (channels, "channels")):
        if shards is not None:
            bounds = [getattr(shard, of) for shard in shards]
            assert bounds[0].start == 0
            assert bounds[-1].stop == (layer[0] if of == "filters" else layer[1])
            assert all(one.stop == other.start for one, other in itertools.pairwise(bounds))


def test_depthwise_layers_split_by_whole_groups() -> None:
    assert shard_filters(6, 6, 6, 4) == shard_channels(6, 6, 6, 4)
    assert [shard.groups for shard in shard_filters(6, 6, 6, 4) or ()] == [2, 2, 1, 1]


def test_filters_that_do_not_split_evenly() -> None:
    assert [shard.filters.extent for shard in shard_filters(100, 3, 1, 3) or ()] == [34, 33, 33]
