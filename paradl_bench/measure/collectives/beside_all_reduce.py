"""Calls that a rank waits for while an all-reduce is in flight, as halos are exchanged while gradients are reduced.

A repetition is a pair. A: a few calls, about a millisecond of compute before each. B: the same behind an all-reduce
that was issued and not waited for, so that they find it in flight, with compute between, as in backward. Both are of
one run, so that a slow spell falls on both. The all-reduce goes through the group of the calls, as a run's does whose
layers are shared by all ranks; or through that of all ranks, while those side by side call among themselves, as where
each node has a replica whose layers its ranks share.

Whether a call waits for the all-reduce or goes on beside it is the library's to say, so it is measured: by whether the
all-reduce was still in flight when the call was done.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from paradl_bench.core.errors import WorkError
from paradl_bench.measure.collectives.behind_compute import ComputeBefore, behind_sizes
from paradl_bench.measure.collectives.calls import Calls
from paradl_bench.measure.collectives.ghosts_before import GHOSTS_S
from paradl_bench.plan.collectives.catalog import routines
from paradl_bench.plan.collectives.routine import ELEMENT_BYTES, Routine
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.ranks.groups.agreement import everyones, largest, ranks_of_hosts
from paradl_bench.ranks.groups.teams import SYSTEM
from paradl_bench.records.cluster import NODE
from paradl_bench.records.contexts.beside_all_reduce import BesideAllReduceSamples

CALLS, MOST_CALLS = 4, 16
"""A repetition, each behind compute: more where an all-reduce lasts long."""
EXCHANGE_BYTES, LARGEST_EXCHANGE_BYTES = 25 << 20, 1 << 30
"""DDP's bucket cap; doubled up to the latter until it lasts as long as the calls' compute, twice."""
LARGEST_BYTES = 1 << 20
"""Longer calls would outlast the all-reduce."""
MIN_PAIRS, MAX_PAIRS = 5, 30
_TRIALS = 3


def beside_order(operations: tuple[str, ...], sizes: tuple[int, ...], seed: int, block: int) -> list[tuple[str, int]]:
    """Operations and at most six sizes up to a MiB of one block, shuffled: alike on all ranks, unlike in all blocks."""
    short = tuple(size for size in sizes if size <= LARGEST_BYTES) or (min(sizes),)
    points = [(name, size) for name in operations for size in behind_sizes(short)]
    random.Random(f"{seed} in flight {block}").shuffle(points)
    return points


class Flight(Protocol):
    """An all-reduce under way, and marks of whether it was at certain moments."""

    def mark(self, stamp: Any) -> Any:
        """Note a moment, which is now; ``stamp`` is the clock's."""

    def land(self) -> Any:
        """Wait for it; the stamp of its end."""

    def were_before_its_end(self, marks: list[Any]) -> list[float]:
        """Of the moments noted, 1 where it was under way; after the clock has been synchronised."""


class CpuFlight:
    """Asks the library at the very moment."""

    def __init__(self, buffer: torch.Tensor, calls: Calls) -> None:
        self._clock = calls.clock
        self._work = dist.all_reduce(buffer, group=calls.context.group, async_op=True)

    def mark(self, stamp: Any) -> Any:
        """See :class:`Flight`."""
        return float(not self._work.is_completed())

    def land(self) -> Any:
        """See :class:`Flight`."""
        self._work.wait()
        return self._clock.stamp()

    def were_before_its_end(self, marks: list[Any]) -> list[float]:
        """See :class:`Flight`."""
        return marks


class CudaFlight:
    """Compares events, the all-reduce's end being one of a stream that waits for it and for nothing else."""

    def __init__(self, buffer: torch.Tensor, calls: Calls) -> None:
        work = dist.all_reduce(buffer, group=calls.context.group, async_op=True)
        with torch.cuda.stream(torch.cuda.Stream(calls.context.device)):  # type: ignore[no-untyped-call]
            work.wait()
            self._end = calls.clock.stamp()

    def mark(self, stamp: Any) -> Any:
        """See :class:`Flight`."""
        return stamp

    def land(self) -> Any:
        """See :class:`Flight`."""
        self._end.wait()
        return self._end

    def were_before_its_end(self, marks: list[Any]) -> list[float]:
        """See :class:`Flight`."""
        return [float(mark.elapsed_time(self._end) > 0) for mark in marks]


class _Chain(NamedTuple):
    """Calls one after the other: stamps in seconds, whether the all-reduce was in flight then, and how long it was."""

    start_s: list[float]
    end_s: list[float]
    begun: list[float]
    outlived: list[float]
    exchange_s: float


class BesideAllReduceBench:
    """Measures operations beside an all-reduce in flight over all ranks, on all of them at once.

    Args:
        calls: of one group of all ranks, or of groups of ranks side by side.
        layout: of emulated nodes, where ranks sleep instead of computing; None of real ones.
    """

    def __init__(self, calls: Calls, point_s: float, layout: NodeLayout | None) -> None:
        self._calls = calls
        self._point_s = point_s
        self._compute = ComputeBefore(calls, GHOSTS_S if layout else None)
        self._exchange, self._exchange_s = self._chosen_exchange()
        of_all = NODE if len(ranks_of_hosts(calls.context)) == 1 else SYSTEM
        self._exchange_level = "" if calls.team.count == 1 else of_all

    def measure(self, operation: str, size: int, block: int) -> list[BesideAllReduceSamples]:
        """One operation and size, a record a group; the same records on all ranks.

        Raises:
            WorkError: a result was wrong.
        """
        calls, routine = self._calls, routines()[operation]
        buffers = calls.buffers(routine, size)
        if not all(calls.verify(routine, buffers)):
            raise WorkError(f"a result of {operation} was wrong, of {size} bytes beside all-reduces; it is not kept")
        call_s = largest(calls.context, calls.warm(routine, buffers, _TRIALS))
        # As many calls as go into half of an all-reduce: beside it they take longer.
        in_half = int(self._exchange_s / 2 / (self._compute.seconds + call_s))
        number = max(CALLS, min(MOST_CALLS, in_half))
        pair_s = self._exchange_s + 2 * number * (self._compute.seconds + call_s)
        count = max(MIN_PAIRS, min(MAX_PAIRS, round(self._point_s / pair_s)))
        apart, beside = [], []
        for _ in range(count):
            apart.append(self._chain(routine, size, number, exchange=False))
            beside.append(self._chain(routine, size, number, exchange=True))
        told = _Told(calls, apart), _Told(calls, beside)
        return [self._record(operation, size, block, number, members, *told) for members in calls.team.groups]

    def _record(
        self, operation: str, size: int, block: int, number: int, members: range, apart: _Told, beside: _Told
    ) -> BesideAllReduceSamples:
        team = self._calls.team
        ranks = [members[side] for side in routines()[operation].sides(team.ranks)]
        return BesideAllReduceSamples(
            library=self._calls.context.backend,
            operation=operation,
            level=team.level,
            ranks=team.ranks,
            message_bytes=size,
            exchange_bytes=self._exchange.numel() * ELEMENT_BYTES,
            exchange_level=self._exchange_level,
            dtype="fp32",
            block=block,
            kernel=self._compute.kernel,
            calls=number,
            one_clock=self._one_clock,
            **apart.stamps(ranks, "apart_", one_clock=self._one_clock),
            **beside.stamps(ranks, "", one_clock=self._one_clock),
            begun=beside.flags("begun", ranks),
            outlived=beside.flags("outlived", ranks),
            exchange_s=tuple(beside.exchange_s[rank] for rank in ranks),
        )

    def step_s(self) -> float:
        """About how long one measurement takes."""
        return max(self._point_s, MIN_PAIRS * (self._exchange_s + 4 * CALLS * self._compute.seconds))

    @property
    def _one_clock(self) -> bool:
        """Whether stamps of all ranks are of one clock: the CPU's, which all processes of a host share."""
        return self._calls.context.device.type == "cpu" and self._calls.team.level == NODE

    def _chain(self, routine: Routine, size: int, number: int, *, exchange: bool) -> _Chain:
        calls = self._calls
        buffers = calls.buffers(routine, size)
        calls.meet()
        origin = calls.clock.stamp()
        flight = self._issued() if exchange else None
        stamps, marks = [], []
        for _ in range(number):
            self._compute.run()
            begun = flight.mark(calls.clock.stamp()) if flight else 0.0
            start, end = calls.stamped(routine, buffers)
            stamps.append((self._compute.over(start), end))
            marks.append((begun, flight.mark(end) if flight else 0.0))
        landed = flight.land() if flight else origin
        calls.clock.synchronise()
        zero_s = origin if isinstance(origin, float) else 0.0
        start_s, end_s = (
            [zero_s + calls.clock.seconds(origin, each) for each in own] for own in zip(*stamps, strict=True)
        )
        flags = [flight.were_before_its_end(list(own)) if flight else list(own) for own in zip(*marks, strict=True)]
        return _Chain(start_s, end_s, flags[0], flags[1], calls.clock.seconds(origin, landed))

    def _issued(self) -> Flight:
        of_device = CudaFlight if self._calls.context.device.type == "cuda" else CpuFlight
        return of_device(self._exchange, self._calls)

    def _chosen_exchange(self) -> tuple[torch.Tensor, float]:
        """A buffer whose all-reduce outlasts the compute before all calls, and its seconds; alike on all ranks."""
        size = EXCHANGE_BYTES
        while True:
            self._exchange = torch.zeros(size // ELEMENT_BYTES, device=self._calls.context.device)
            exchange_s = largest(self._calls.context, statistics.median(self._alone_s() for _ in range(_TRIALS)))
            if exchange_s >= 2 * CALLS * self._compute.seconds or 2 * size > LARGEST_EXCHANGE_BYTES:
                return self._exchange, exchange_s
            size *= 2

    def _alone_s(self) -> float:
        clock = self._calls.clock
        self._calls.meet()
        start = clock.stamp()
        end = self._issued().land()
        clock.synchronise()
        return clock.seconds(start, end)


class _Told:
    """What all ranks tell each other of their chains, one after the other; a collective.

    Attributes:
        exchange_s: a row a rank, a value a chain.
    """

    def __init__(self, calls: Calls, chains: Sequence[_Chain]) -> None:
        self._columns = {
            name: everyones(calls.context, [value for chain in chains for value in getattr(chain, name)])
            for name in ("start_s", "end_s", "begun", "outlived")
        }
        self.exchange_s = everyones(calls.context, [chain.exchange_s for chain in chains])

    def stamps(self, ranks: Sequence[int], prefix: str, *, one_clock: bool) -> dict[str, Any]:
        """Starts and ends of some ranks, by field of the record, from the first start of each call."""
        start, end = ([self._columns[name][rank] for rank in ranks] for name in ("start_s", "end_s"))
        first = [min(each) for each in zip(*start, strict=True)]
        # Of stamps on clocks of their own, only a rank's differences mean anything.
        origins = [first] * len(start) if one_clock else start
        return {
            f"{prefix}{name}": tuple(
                tuple(max(0.0, value - zero) for value, zero in zip(row, own, strict=True))
                for row, own in zip(rows, origins, strict=True)
            )
            for name, rows in (("start_s", start), ("end_s", end))
        }

    def flags(self, name: str, ranks: Sequence[int]) -> tuple[tuple[bool, ...], ...]:
        """Whether the all-reduce was in flight, a row a rank."""
        return tuple(tuple(map(bool, self._columns[name][rank])) for rank in ranks)
