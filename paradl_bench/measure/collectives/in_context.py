"""Calls after compute, and calls with an all-reduce in flight: each in pairs with calls that it does not surround.

Of ``after-compute`` A is a call right behind a barrier, as a sweep makes it, and B the same behind about a millisecond
of compute on every rank. Layers do that before a run's collectives: it fills the caches with other data and leaves the
communication library's threads asleep. Of ``with-all-reduce`` A is a few calls with compute before each, and B the same
behind an all-reduce that was issued and not waited for, as in backward. It goes through the group of the calls; or
through that of all ranks, as where each node has a replica whose layers its ranks share. Whether a call waits for it is
the library's to say, so it is measured: by whether that was still in flight when the call was done.

On emulated nodes ghosts of a few layers stand for compute. A call counts from the moment at which they were to be over,
since ranks on one core begin their calls one after the other. What precedes them is a call as well, and no barrier,
which lets ranks go by and by. What follows is what follows in a run: what a gather brought is put in its places, and
ghosts are dispatched. Where ranks share a core, one that is done keeps another from ending its part of the call
meanwhile: that is a quarter of what short gathers take.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from paradl_bench.measure.collectives.calls import Calls
from paradl_bench.measure.collectives.ghosts_before import GHOSTS_S, ghosts_seconds
from paradl_bench.measure.collectives.neighbours import AllReduceInFlight, ComputeBefore
from paradl_bench.plan.collectives.catalog import routines
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.ranks.groups.agreement import everyones, largest
from paradl_bench.records.cluster import NODE
from paradl_bench.records.contexts.context import ContextSamples

Paired = Literal["after-compute", "with-all-reduce"]

MOST_SIZES = 6
LARGEST_BYTES: dict[Paired, int] = {"after-compute": 16 << 20, "with-all-reduce": 1 << 20}
"""What compute adds to a call is nothing beside longer ones; and those would outlast the all-reduce."""
CALLS, MOST_CALLS = 4, 16
"""A repetition with an all-reduce in flight: more where that lasts long."""
MIN_PAIRS, MAX_PAIRS = 5, 60
_WARMUP = 3
_SAMPLES = 16
"""Of a batch whose gathered parts are put in their places; at most."""


def sizes_in(context: Paired, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a sweep's sizes that are measured in a context: at most six, spread evenly, none too large."""
    chosen = sorted(size for size in set(sizes) if size <= LARGEST_BYTES[context]) or [min(sizes)]
    count = min(MOST_SIZES, len(chosen))
    places = [round(index * (len(chosen) - 1) / max(count - 1, 1)) for index in range(count)]
    return tuple(chosen[place] for place in places)


def order_in(
    context: Paired, operations: tuple[str, ...], sizes: tuple[int, ...], seed: int, block: int
) -> list[tuple[str, int]]:
    """Operations and sizes of one block, shuffled: alike on all ranks, unlike in all blocks."""
    points = [(name, size) for name in operations for size in sizes_in(context, sizes)]
    random.Random(f"{seed} {context} {block}").shuffle(points)
    return points


class _Chain(NamedTuple):
    """Calls one after the other, as one rank stamped them, in seconds; compute before them, the all-reduce beside.

    ``begun`` and ``outlived`` are 1 of each call where the all-reduce was in flight then.
    """

    start_s: list[float]
    end_s: list[float]
    begun: list[float]
    outlived: list[float]
    compute_s: list[float]
    all_reduce_s: list[float]


class ContextBench:
    """Measures operations in a context, on all ranks at once: of one group, or of groups side by side.

    With a layout of emulated nodes ranks sleep instead of computing.
    """

    def __init__(self, context: Paired, calls: Calls, point_s: float, attempt: int, layout: NodeLayout | None) -> None:
        self._context = context
        self._calls = calls
        self._point_s = point_s
        self._attempt = attempt
        alone = context == "after-compute"
        ghosts_s = None if layout is None else ghosts_seconds(layout.ranks) if alone else GHOSTS_S
        self._compute = ComputeBefore(calls, ghosts_s)
        self._all_reduce = None if alone else AllReduceInFlight(calls, CALLS * self._compute.seconds)
        self._as_in_a_run = alone and self._compute.sleeps

    def measure(self, operation: str, size: int, block: int) -> list[ContextSamples]:
        """One operation and size, a record a group; the same on all ranks. The sweep before has verified results."""
        calls, routine = self._calls, routines()[operation]
        buffers = calls.buffers(routine, size)
        buffers.clear()
        call_s = largest(calls.context, calls.warm(routine, buffers, _WARMUP))
        number = self._calls_of(call_s)
        count = max(MIN_PAIRS, min(MAX_PAIRS, round(self._point_s / (self._lead_s(number) + 2 * number * call_s))))
        idle, surrounded = [], []
        for _ in range(count):
            idle.append(self._idle(routine, buffers, number))
            surrounded.append(self._chain(routine, buffers, number, in_flight=self._all_reduce is not None))
        told = _Told(calls, idle, ("start_s", "end_s")), _Told(calls, surrounded, _Chain._fields)
        return [self._record(operation, size, block, number, members, *told) for members in calls.team.groups]

    def estimate_s(self, steps: Sequence[object]) -> float:
        """About how long measurements take."""
        return max(self._point_s, MIN_PAIRS * self._lead_s(1 if self._all_reduce is None else CALLS)) * len(steps)

    def _calls_of(self, call_s: float) -> int:
        """As many calls as go into half of an all-reduce: beside it they take longer."""
        if self._all_reduce is None:
            return 1
        return max(CALLS, min(MOST_CALLS, int(self._all_reduce.seconds / 2 / (self._compute.seconds + call_s))))

    def _lead_s(self, number: int) -> float:
        """What stands round the calls of a repetition, about."""
        if self._all_reduce is None:
            return self._compute.seconds * (3 if self._as_in_a_run else 1)
        return self._all_reduce.seconds + 2 * number * self._compute.seconds

    def _idle(self, routine: Routine, buffers: Buffers, number: int) -> _Chain:
        if self._all_reduce is not None:
            return self._chain(routine, buffers, number, in_flight=False)
        return _Chain([0.0], [self._calls.seconds(routine, buffers)], [], [], [], [])

    def _chain(self, routine: Routine, buffers: Buffers, number: int, *, in_flight: bool) -> _Chain:
        calls, clock = self._calls, self._calls.clock
        calls.meet()
        if self._as_in_a_run:
            self._compute.run()
            self._called_for_a_layer(routine, buffers)
        origin = clock.stamp()
        flight = self._all_reduce.issue() if in_flight and self._all_reduce else None
        stamps, marks = [], []
        for _ in range(number):
            self._compute.run()
            begun = flight.mark(clock.stamp()) if flight else 0.0
            called = self._called_for_a_layer if self._as_in_a_run else calls.stamped
            start, end = called(routine, buffers)
            stamps.append((self._compute.over(start), end))
            marks.append((begun, flight.mark(end) if flight else 0.0))
        landed = flight.land() if flight else origin
        if self._as_in_a_run:
            self._compute.run()
        clock.synchronise()
        # The CPU's stamps are seconds of a clock that all processes of a host share; a GPU's are events.
        zero_s = origin if isinstance(origin, float) else 0.0
        start_s, end_s = (
            [zero_s + clock.seconds(origin, stamp) for stamp in column] for column in zip(*stamps, strict=True)
        )
        begun_then, outlived = (
            flight.were_before_its_end(list(column)) if flight else list(column) for column in zip(*marks, strict=True)
        )
        return _Chain(start_s, end_s, begun_then, outlived, [start_s[0] - zero_s], [clock.seconds(origin, landed)])

    def _called_for_a_layer(self, routine: Routine, buffers: Buffers) -> tuple[Any, Any]:
        """Stamps round a call on tensors that are new, as a layer's are, and what the layer then does with a gather."""
        taken = torch.empty_like(buffers.output) if buffers.input.numel() else buffers.output.clone()
        stamps = self._calls.stamped(routine, Buffers(buffers.input.clone(), taken))
        if taken.numel() > buffers.input.numel() > 0:
            _put_in_place(taken, self._calls.team.ranks)
        return stamps

    def _record(
        self, operation: str, size: int, block: int, number: int, members: range, idle: _Told, surrounded: _Told
    ) -> ContextSamples:
        calls, all_reduce = self._calls, self._all_reduce
        ranks = [members[side] for side in routines()[operation].sides(len(members))]
        on_cpu = calls.context.device.type == "cpu"
        # Stamps of all ranks are of one clock on one host: the CPU's, which all processes share.
        one_clock = on_cpu and calls.team.level == NODE
        stamped = all_reduce is None and on_cpu and not one_clock and ranks == list(members)
        idle_start_s, idle_end_s = idle.stamps(ranks, one_clock=one_clock and all_reduce is not None)
        start_s, end_s = surrounded.stamps(ranks, one_clock=one_clock)
        return ContextSamples(
            **calls.about(operation, size, block, members),
            context=self._context,
            neighbour=self._compute.kernel,
            neighbour_bytes=all_reduce.bytes if all_reduce else 0,
            neighbour_level=all_reduce.level if all_reduce else "",
            calls=number,
            one_clock=one_clock,
            idle_start_s=idle_start_s if all_reduce else (),
            idle_end_s=idle_end_s,
            start_s=start_s,
            end_s=end_s,
            begun=surrounded.flags("begun", ranks) if all_reduce else (),
            outlived=surrounded.flags("outlived", ranks) if all_reduce else (),
            neighbour_s=surrounded.rows("all_reduce_s" if all_reduce else "compute_s", ranks),
            host_start_s=surrounded.rows("start_s", ranks) if stamped else (),
            attempt=self._attempt,
        )


class _Told:
    """What all ranks tell each other of their chains, one after the other; a collective."""

    def __init__(self, calls: Calls, chains: Sequence[_Chain], names: Sequence[str]) -> None:
        self._columns = {
            name: everyones(calls.context, [value for chain in chains for value in getattr(chain, name)])
            for name in names
        }

    def rows(self, name: str, ranks: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        return tuple(self._columns[name][rank] for rank in ranks)

    def flags(self, name: str, ranks: Sequence[int]) -> tuple[tuple[bool, ...], ...]:
        return tuple(tuple(map(bool, row)) for row in self.rows(name, ranks))

    def stamps(
        self, ranks: Sequence[int], *, one_clock: bool
    ) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
        """Starts and ends of some ranks, from the first start of each call."""
        start, end = (np.array(self.rows(name, ranks)) for name in ("start_s", "end_s"))
        # Of stamps on clocks of their own, only a rank's differences mean anything.
        origins = start.min(axis=0) if one_clock else start
        since, until = (np.maximum(0.0, stamps - origins).tolist() for stamps in (start, end))
        return tuple(map(tuple, since)), tuple(map(tuple, until))


def _put_in_place(gathered: torch.Tensor, parts: int) -> torch.Tensor:
    """What ranks hold of each sample side by side, as filters and rows of images are."""
    held = gathered.numel() // parts
    samples = math.gcd(_SAMPLES, held)
    whole = gathered.new_empty(samples, parts, held // samples)
    for part, rows in enumerate(gathered.view(parts, samples, -1)):
        whole[:, part].copy_(rows)
    return whole
