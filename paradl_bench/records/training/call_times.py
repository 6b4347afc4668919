"""What the calls of a run took: how long each rank waited for the last one, and how long the transfer was from then on.

Stamps of all ranks are brought to one clock (:mod:`paradl_bench.records.hosts.host_clocks`). A rank that issues a call
early waits until the last rank of its group has issued it; from then on the call is a transfer.

OSF (section 3.3, figures 5 and 7) parts the communication of Horovod into NEGOTIATE, ALLREDUCE, WAIT (for more tensors
to send together) and MISC. PyTorch negotiates nothing: its buckets have one order on all ranks. A rank that was early
waits in the call for the others, where Horovod would negotiate; between calls it waits until the next bucket is full.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.training.timed_call import TimedCall
from paradl_bench.records.training.training_record import TrainingIterations

Floats = NDArray[np.float64]
PARTS = ("waiting_s", "transferring_s", "filling_s", "copying_s", "rest_s")
"""Fields of :class:`RankSpent`."""


class CallKey(NamedTuple):
    """Which call of an iteration; ``place`` counts those that are otherwise alike."""

    operation: str
    message_bytes: int
    group: tuple[int, ...]
    sender: int | None
    receiver: int | None
    place: int


class CallTimes(NamedTuple):
    """One call over a run: arrays of shape (ranks that take part, iterations), seconds on rank 0's clock.

    A message's ranks are its sender and its receiver; it ends for both when it was received, or before.
    """

    key: CallKey
    ranks: tuple[int, ...]
    begin_s: Floats
    end_s: Floats

    @property
    def ready_s(self) -> Floats:
        """When the last rank came, per iteration."""
        return np.asarray(self.begin_s.max(axis=0))

    @property
    def waits_s(self) -> Floats:
        """What each rank waited for the last one, as far as it did: a sender may be done before."""
        return np.asarray(np.minimum(self.ready_s, self.end_s) - self.begin_s)

    @property
    def transfers_s(self) -> Floats:
        """From when the last rank came until the call was done on all, per iteration."""
        return np.asarray(np.maximum(self.end_s.max(axis=0) - self.ready_s, 0.0))


class RankSpent(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank spent an iteration with: medians over iterations. Of each iteration they add up to all of it.

    Attributes:
        waiting_s: calls under way, to none of which all of their ranks had come.
        transferring_s: a call under way to which all had come.
        filling_s: between the first and the last call of gradients, none under way: the next bucket is not full yet.
            0 where calls for layers lie in backward as well.
        copying_s: from the end of the last call of gradients to the end of backward.
        rest_s: all else, which is compute beside no call.
    """

    rank: int
    waiting_s: float
    transferring_s: float
    filling_s: float
    copying_s: float
    rest_s: float


def call_times(records: Iterable[TrainingIterations], clocks: HostClocks) -> tuple[CallTimes, ...]:
    """The calls of a run, in the order in which the lowest rank issues them.

    None where they were not timed, where ranks share no clock, or where chunks hold unlike calls.
    """
    parts: dict[CallKey, list[_Part]] = defaultdict(list)
    chunks = _timed_chunks(records, clocks)
    for chunk in chunks:
        for key, part in _of_chunk(chunk).items():
            parts[key].append(part)
    return tuple(
        CallTimes(key, of_key[0].ranks, *(np.concatenate([part[side] for part in of_key], axis=1) for side in (1, 2)))
        for key, of_key in parts.items()
        if len(of_key) == len(chunks)
    )


def spent_by_rank(records: Sequence[TrainingIterations], clocks: HostClocks) -> tuple[RankSpent, ...]:
    """What each rank of a run spent its iterations with; none where :func:`call_times` has none."""
    calls = call_times(records, clocks)
    chunks = _timed_chunks(records, clocks) if calls else []
    return tuple(
        _spent(rank, [chunk[rank] for chunk in chunks], calls) for rank in (sorted(chunks[0]) if chunks else ())
    )


class _Part(NamedTuple):
    """A call in a chunk of iterations; as :class:`CallTimes`."""

    ranks: tuple[int, ...]
    begin_s: Floats
    end_s: Floats


class _Timed(NamedTuple):
    """Iterations of one rank whose calls were timed, and when each began on rank 0's clock."""

    record: TrainingIterations
    starts_s: Floats


def _timed_chunks(records: Iterable[TrainingIterations], clocks: HostClocks) -> list[Mapping[int, _Timed]]:
    """The same iterations of all ranks, by rank, where calls were timed on all and have one clock."""
    chunks: dict[tuple[int, int], dict[int, _Timed]] = defaultdict(dict)
    for record in records:
        aligned = clocks.on_one_clock(record.attempt, record.rank, record.host_begin_s)
        if record.calls and record.host_begin_s and aligned is not None:
            chunks[record.attempt, record.first_iteration][record.rank] = _Timed(record, aligned.stamps_s)
    ranks = max((len(chunk) for chunk in chunks.values()), default=0)
    whole = [chunks[key] for key in sorted(chunks) if len(chunks[key]) == ranks]
    return [
        chunk
        for chunk in whole
        if chunk.keys() == whole[0].keys() and len({len(timed.starts_s) for timed in chunk.values()}) == 1
    ]


def _of_chunk(chunk: Mapping[int, _Timed]) -> dict[CallKey, _Part]:
    """The calls of a chunk, from the ranks that take part in each."""
    sides: dict[CallKey, dict[int, tuple[Floats, Floats]]] = defaultdict(dict)
    members: dict[CallKey, tuple[int, ...]] = {}
    for rank, (record, starts_s) in sorted(chunk.items()):
        for key, call in _keyed(record.calls):
            members[key] = call.ranks
            sides[key][rank] = starts_s + np.array(call.begin_s), starts_s + np.array(call.end_s)
    parts = {}
    for key, of_ranks in sides.items():
        if of_ranks.keys() == set(members[key]):
            begin_s, end_s = (np.array([of_ranks[rank][side] for rank in members[key]]) for side in (0, 1))
            if key.sender is not None:
                # Whoever sends may wait for that long after; the message is there when it was received.
                end_s = np.maximum(np.minimum(end_s, end_s[-1]), begin_s)
            parts[key] = _Part(members[key], begin_s, end_s)
    return parts


def _keyed(calls: Sequence[TimedCall]) -> Iterator[tuple[CallKey, TimedCall]]:
    seen: Counter[CallKey] = Counter()
    for call in calls:
        alike = CallKey(call.operation, call.message_bytes, call.group, call.sender, call.receiver, 0)
        yield alike._replace(place=seen[alike]), call
        seen[alike] += 1


def _spent(rank: int, timed: Sequence[_Timed], calls: Sequence[CallTimes]) -> RankSpent:
    records = [record for record, _ in timed]

    def column(of: Callable[[TrainingIterations], Sequence[float] | Floats]) -> Floats:
        return np.concatenate([np.asarray(of(record), float) for record in records])

    forward_s = np.concatenate([starts_s for _, starts_s in timed]) + column(lambda record: record.fw_s)
    backward_s = forward_s + column(lambda record: np.add(record.bw_s, record.exposed_ge_s))
    taken_part = [(call, call.ranks.index(rank)) for call in calls if rank in call.ranks]
    shape = len(taken_part), len(forward_s)
    begin_s = np.reshape([call.begin_s[place] for call, place in taken_part], shape)
    end_s = np.reshape([call.end_s[place] for call, place in taken_part], shape)
    ready_s = begin_s + np.reshape([call.waits_s[place] for call, place in taken_part], shape)
    in_layers = any(record.fw_communication_s or record.bw_communication_s or record.turns for record in records)
    rows = []
    for index, (forward, backward) in enumerate(zip(forward_s, backward_s, strict=True)):
        begin, ready, end = begin_s[:, index], ready_s[:, index], end_s[:, index]
        transferring = _covered(ready, end)
        exchange = (begin >= forward) & (begin < backward) & (not in_layers)
        filling = copying = 0.0
        if exchange.any():
            filling = end[exchange].max() - begin[exchange].min() - _covered(begin[exchange], end[exchange])
            copying = max(backward - end[exchange].max(), 0.0)
        rows.append((_covered(begin, end) - transferring, transferring, filling, copying))
    parts_s = np.array(rows)
    rest_s = column(lambda record: record.iteration_s) - parts_s.sum(axis=1)
    medians = map(float, np.median(np.column_stack([parts_s, rest_s]), axis=0))
    return RankSpent(rank=rank, **dict(zip(PARTS, medians, strict=True)))


def _covered(begin_s: Floats, end_s: Floats) -> float:
    """Seconds in which any of some spans lies."""
    order = np.argsort(begin_s, kind="stable")
    begin, end = begin_s[order], end_s[order]
    before = np.concatenate([begin[:1], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(begin, before), 0.0).sum())
