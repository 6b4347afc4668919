"""The sweep: every operation at every size through torch.distributed, verified, in blocks spread over time.

Ranks meet in a barrier before each repetition, then each times its own call. A block visits all operations and sizes in
shuffled order, so that a slow spell of the machine does not fall on neighbouring sizes. Groups of ranks that share
links call in turn, while the others wait.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from paradl_bench.core.errors import WorkError
from paradl_bench.core.terminal.command_line import Progress, progress, say
from paradl_bench.core.units import counted, format_bytes, format_seconds
from paradl_bench.measure.collectives.beside_compute import BesideComputeBench, order_beside_compute
from paradl_bench.measure.collectives.calls import Calls
from paradl_bench.measure.collectives.in_context import ContextBench, order_in
from paradl_bench.measure.collectives.request import CollectivesRequest
from paradl_bench.measure.machine.measured_nodes import note_places
from paradl_bench.measure.opening import open_directory
from paradl_bench.plan.collectives.catalog import routines
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.environment import host_memory_bytes
from paradl_bench.ranks.groups.agreement import everyones, largest, of_first, ranks_of_hosts
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.groups.teams import form_teams, leave_team
from paradl_bench.records.contexts.context import CONTEXTS_FILE, Context, ContextSamples
from paradl_bench.records.measurement import COLLECTIVES_FILE
from paradl_bench.records.samples import CollectiveSamples

WARMUP_CALLS = 2
"""Besides the verified one."""
ESTIMATE_CALLS = 3
WRITE_AFTER_S = 2.0
"""What is measured is written about so often, between two points: so much is lost at most when all is killed."""
MIN_REPETITIONS, MAX_REPETITIONS = 3, 100

_REFUSAL = re.compile(r"not supported|unsupported|not implemented|does not support|no backend type", re.IGNORECASE)

Sort = Literal["sweep"] | Context
_Measured = dict[Sort, list[CollectiveSamples | ContextSamples]]


class Step(NamedTuple):
    """One thing to measure in one block, at one size: an operation, idle or in a context, or a kernel beside one."""

    block: int
    sort: Sort
    name: str
    message_bytes: int


def measure_collectives(
    request: CollectivesRequest, context: RankContext, output: Path, command_line: tuple[str, ...]
) -> None:
    """Measure on this rank together with all others; rank 0 writes, or goes on in what an interrupted run left.

    Raises:
        UserError: a directory of something else, or too little memory.
        WorkError: a result was wrong (the measurements are kept, marked as not verified).
    """
    hosts = ranks_of_hosts(context)
    if context.device.type == "cpu":
        on_host = max(hosts) if request.layout is None else context.ranks
        request.check_memory(ranks_on_host=on_host, memory_bytes=host_memory_bytes())
    directory = None
    if context.rank == 0:
        settings = {"dtype": "fp32", **context.settings}
        directory = open_directory(output, "collectives", request.arguments(), command_line, request.device, settings)
    hosts_noted = note_places(context, directory)
    team = form_teams(context, request.groups, side_by_side=request.side_by_side is not None)
    sweep = CollectiveSweep(request, Calls(request, context, team))
    accepted = tuple(name for name in request.operations if sweep.accepts(name))
    steps = _unmeasured(request, _steps(request, accepted), directory, context)
    sorts = dict.fromkeys(step.sort for step in steps)
    benches: dict[Sort, _Bench] = {sort: _bench(sort, request, sweep, hosts_noted.attempt) for sort in sorts}
    estimate_s = sum(
        benches[sort].estimate_s([step for step in steps if step.sort == sort]) for sort in sorted(benches)
    )
    if directory is not None:
        _announce(request, directory, steps, estimate_s)
    with progress("collectives", len(steps)) as bar:
        for _, block in itertools.groupby(steps, key=lambda step: step.block):
            _measure_block(list(block), benches, directory, bar)
            hosts_noted.again()
    leave_team(context, sweep.calls.team)
    if directory is not None:
        directory.finish()
        _check_verified(directory)


def _steps(request: CollectivesRequest, accepted: tuple[str, ...]) -> list[Step]:
    steps = []
    for block in range(request.blocks):
        swept = [point for point in request.order(block) if point[0] in accepted]
        sorts: tuple[Sort, ...] = ("sweep", "groups") if request.concurrent > 1 else ("sweep",)
        steps += [Step(block, sort, name, size) for sort in sorts for name, size in swept]
        for context in request.contexts:
            if context == "with-compute":
                points = order_beside_compute(request.seed, block, request.layout)
            else:
                points = order_in(context, accepted, request.sizes, request.seed, block)
            steps += [Step(block, context, name, size) for name, size in points]
    return steps


def _unmeasured(
    request: CollectivesRequest, steps: list[Step], directory: MeasurementDirectory | None, context: RankContext
) -> list[Step]:
    """What an earlier, interrupted run did not measure: rank 0 looks, and all ranks agree."""
    noted: Counter[Step] = Counter()
    if directory is not None and directory.resumed:
        for swept in directory.records(COLLECTIVES_FILE, CollectiveSamples):
            # Older sweeps hold groups at once too.
            sort: Sort = "sweep" if swept.concurrent == 1 else "groups"
            noted[Step(swept.block, sort, swept.operation, swept.message_bytes)] += 1
        for record in directory.records(CONTEXTS_FILE, ContextSamples):
            name = record.neighbour if record.context == "with-compute" else record.operation
            noted[Step(record.block, record.context, name, record.message_bytes)] += 1
    # A step of several groups is done when all of their records are there.
    wanted = of_first(context, [int(noted[step] < request.groups) for step in steps])
    return [step for step, is_wanted in zip(steps, wanted, strict=True) if is_wanted]


def _bench(sort: Sort, request: CollectivesRequest, sweep: CollectiveSweep, attempt: int) -> _Bench:
    if sort == "sweep":
        return sweep
    if sort == "groups":
        return AtOnceBench(sweep)
    if sort == "with-compute":
        return BesideComputeBench(sweep.calls, request.layout)
    return ContextBench(sort, sweep.calls, request.point_s, attempt, request.layout)


def _announce(
    request: CollectivesRequest, directory: MeasurementDirectory, steps: list[Step], estimate_s: float
) -> None:
    if directory.resumed:
        say(f"going on in {directory.path}: {counted(len(steps), 'measurement')} to go")
    if steps:
        counts = {"operation": len(request.operations), "size": len(request.sizes), "block": request.blocks}
        what = ", ".join(counted(number, noun) for noun, number in counts.items())
        groups = f"{request.groups} groups of " if request.groups > 1 else ""
        about = format_seconds(estimate_s)
        say(f"collectives over {request.backend} on {groups}{request.of_group} ranks: {what}; about {about}")


def _measure_block(
    steps: list[Step], benches: dict[Sort, _Bench], directory: MeasurementDirectory | None, bar: Progress
) -> None:
    """Measure the steps of one block; what is measured when it is interrupted is kept."""
    measured: _Measured = {}
    written_s = time.monotonic()
    try:
        for step in steps:
            bar.describe(f"{step.name} {format_bytes(step.message_bytes)}")
            records = benches[step.sort].measure(step.name, step.message_bytes, step.block)
            measured.setdefault(step.sort, []).extend(records)
            bar.advance()
            if time.monotonic() - written_s > WRITE_AFTER_S:
                _write(measured, directory)
                written_s = time.monotonic()
    finally:
        _write(measured, directory)


def _write(measured: _Measured, directory: MeasurementDirectory | None) -> None:
    """Append what was measured, by rank 0, and forget it."""
    while measured:
        sort, records = measured.popitem()
        if directory is not None:
            directory.append(COLLECTIVES_FILE if sort == "sweep" else CONTEXTS_FILE, records)


def _check_verified(directory: MeasurementDirectory) -> None:
    records = directory.records(COLLECTIVES_FILE, CollectiveSamples)
    wrong = sorted({(record.operation, record.message_bytes) for record in records if not record.verified})
    if wrong:
        listed = ", ".join(f"{name} of {size} bytes" for name, size in wrong[:5])
        raise WorkError(
            f"{len(wrong)} results were wrong ({listed}); {directory.path} holds them, marked as not verified"
        )


class CollectiveSweep:
    """Measures single points by one or several teams of ranks."""

    def __init__(self, request: CollectivesRequest, calls: Calls) -> None:
        self._request = request
        self.calls = calls

    def accepts(self, operation: str) -> bool:
        """Whether the backend has the operation: the smallest message is tried. Where not, says so."""
        context, routine = self.calls.context, routines()[operation]
        try:
            self.calls.seconds(routine, self.calls.buffers(routine, min(self._request.sizes)))
        except (RuntimeError, NotImplementedError) as error:
            if not is_refusal(error):
                raise
            if context.rank == 0:
                reason = " ".join(str(error).split())
                say(f"skipped {operation}: backend {context.backend} refuses it: {reason}")
            return False
        return True

    def estimate_s(self, steps: list[Step]) -> float:
        """About how long steps take, from calls of each operation at its smallest and largest size."""
        total = 0.0
        for name in sorted({step.name for step in steps}):
            sizes = [step.message_bytes for step in steps if step.name == name]
            small_s, large_s = (self._point_s(name, size) for size in (min(sizes), max(sizes)))
            # Between the two, time goes by bytes; a small message's is the least of any.
            total += sum(max(small_s, large_s * size / max(sizes)) for size in sizes)
        return total

    def _point_s(self, operation: str, size: int) -> float:
        """About how long one point takes, from one verified call and a few that are timed with their barrier."""
        calls, routine = self.calls, routines()[operation]
        buffers = calls.buffers(routine, size)
        start = time.perf_counter()
        calls.verify(routine, buffers)
        verified = time.perf_counter()
        call_s = statistics.median(calls.seconds(routine, buffers) for _ in range(ESTIMATE_CALLS))
        with_barrier_s = (time.perf_counter() - verified) / ESTIMATE_CALLS
        count = WARMUP_CALLS + self.count(largest(calls.context, call_s)) * self._request.concurrent
        return verified - start + count * with_barrier_s

    def count(self, call_s: float) -> int:
        """Repetitions of one point, for which teams that share links take turns."""
        count, turns = repetitions(call_s, self._request.point_s), self._request.concurrent
        return max(MIN_REPETITIONS, -(-count // turns))

    def measure(self, operation: str, size: int, block: int) -> list[CollectiveSamples]:
        """One operation and size, verified, then repeated; a record a team, the same on all ranks.

        Teams that share links call in turn, teams side by side at once.
        """
        calls, routine = self.calls, routines()[operation]
        buffers = calls.buffers(routine, size)
        verified = calls.verify(routine, buffers)
        count = self.count(largest(calls.context, calls.warm(routine, buffers, WARMUP_CALLS)))
        call = calls.in_turn if self._request.concurrent > 1 else calls.seconds
        times = everyones(calls.context, [call(routine, buffers) for _ in range(count)])
        return [
            CollectiveSamples(
                **calls.about(operation, size, block, members),
                tool="torch",
                samples_s=tuple(times[members[side]] for side in routine.sides(len(members))),
                verified=is_verified,
                ranks_per_node=calls.team.ranks_per_node,
            )
            for members, is_verified in zip(calls.team.groups, verified, strict=True)
        ]


class AtOnceBench:
    """Measures pairs of calls of groups that share links: each in its turn, and all at once."""

    def __init__(self, sweep: CollectiveSweep) -> None:
        self._sweep = sweep
        self.estimate_s = sweep.estimate_s

    def measure(self, operation: str, size: int, block: int) -> list[ContextSamples]:
        """One operation and size, a record a group; the same on all ranks. The sweep before has verified results."""
        calls, routine = self._sweep.calls, routines()[operation]
        buffers = calls.buffers(routine, size)
        buffers.clear()
        count = self._sweep.count(largest(calls.context, calls.warm(routine, buffers, WARMUP_CALLS)))
        pairs = [(calls.in_turn(routine, buffers), calls.seconds(routine, buffers)) for _ in range(count)]
        idle_s, at_once_s = (everyones(calls.context, list(column)) for column in zip(*pairs, strict=True))
        return [
            ContextSamples(
                **calls.about(operation, size, block, members),
                context="groups",
                groups=calls.team.count,
                ranks_per_node=calls.team.ranks_per_node,
                idle_end_s=tuple(idle_s[members[side]] for side in routine.sides(len(members))),
                end_s=tuple(at_once_s[members[side]] for side in routine.sides(len(members))),
            )
            for members in calls.team.groups
        ]


_Bench = CollectiveSweep | AtOnceBench | BesideComputeBench | ContextBench


def repetitions(call_s: float, point_s: float) -> int:
    """How many calls of ``call_s`` fill about ``point_s``: many of a small message, few of a large one."""
    return max(MIN_REPETITIONS, min(MAX_REPETITIONS, round(point_s / max(call_s, 1e-9))))


def is_refusal(error: Exception) -> bool:
    """Whether a backend says that it does not have an operation, rather than that a call failed."""
    return isinstance(error, NotImplementedError) or bool(_REFUSAL.search(str(error)))
