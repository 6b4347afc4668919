"""A predicted iteration in the trace event format, which Perfetto and chrome://tracing open.

A process is a rank, a thread a stream, a complete event (``X``) a task; stamps are microseconds, to the nanosecond.
Arrows (flow events) lead from what a collective waited for last to the collective, and from what a stage computed over
its message to what the next stage does with it. Written piece by piece: a long pipeline has a million tasks.

Source: "Trace Event Format" (Google, 2016), sections on complete, flow and metadata events and the JSON object format.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import rank_at
from paradl_bench.plan.tasks import Plan, Stream
from predict.simulation.simulator import BLOCKING
from predict.timeline.timeline import IterationTimeline, RoleTimeline
from predict.timeline.trace_arrows import (
    STAMP_NS,
    Process,
    arrows_of_collectives,
    arrows_of_messages,
    stamps_of,
    thread_number,
)
from predict.timeline.trace_works import WorkDescriptions, describe_works

_EVENTS_A_PIECE = 20_000
MOST_TASKS = 5_000_000
"""Tasks of all ranks together that a trace may show: about 1.5 GB of JSON."""


class _Complete(msgspec.Struct, tag_field="ph", tag="X"):
    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: msgspec.Raw


class _Metadata(msgspec.Struct, tag_field="ph", tag="M", omit_defaults=True):
    name: str
    pid: int
    args: dict[str, str | int]
    tid: int | None = None


def trace_json(
    timeline: IterationTimeline, other: Mapping[str, object], *, every_rank: bool = False
) -> Iterator[bytes]:
    """The trace as pieces of one JSON object.

    Args:
        other: what stands under ``otherData``.
        every_rank: a process a rank; else one a role, for the first rank that plays it.

    Raises:
        UserError: the ranks have more than :data:`MOST_TASKS` tasks; before the first piece.
    """
    shown = ((role, role.ranks if every_rank else 1) for role in timeline.roles)
    tasks = sum(ranks * role.of_plan.tasks for role, ranks in shown)
    if tasks > MOST_TASKS:
        fewer = ", --ranks-shown roles shows ranks that do the same once" if every_rank else ""
        raise UserError(f"a trace of {tasks} tasks is more than a viewer can open ({MOST_TASKS}){fewer}")
    return _pieces(timeline, list(_lines_shown(timeline, every_rank=every_rank)), other)


def _pieces(
    timeline: IterationTimeline, lines: Sequence[tuple[Process, ...]], other: Mapping[str, object]
) -> Iterator[bytes]:
    described = describe_works(timeline.priced)
    numbers = itertools.count(1)
    # Lines of one role send none, so that a slow rank's may stand for that of its role.
    messages = {line.roles[0].role: line for line in timeline.lines}
    yield b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(other) + b',"traceEvents":[\n'
    separator = b""
    for events in _batches(
        itertools.chain.from_iterable(
            itertools.chain(
                *(_events_of(process, described) for process in line),
                arrows_of_collectives(line, described, numbers),
                arrows_of_messages(line, messages[line[0].role.role], numbers),
            )
            for line in lines
        )
    ):
        yield separator + events
        separator = b",\n"
    yield b"\n]}\n"


def _batches(events: Iterable[object]) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    rest = iter(events)
    while batch := list(itertools.islice(rest, _EVENTS_A_PIECE)):
        yield encoder.encode(batch)[1:-1]


def _lines_shown(timeline: IterationTimeline, *, every_rank: bool) -> Iterator[tuple[Process, ...]]:
    """Processes that are shown, line by line, stages in their order."""
    plan = timeline.plan
    ranks_of: list[list[int]] = [[] for _ in plan.roles]
    for rank in range(plan.strategy.ranks) if every_rank else ranks_of_each_kind(plan):
        ranks_of[plan.role_of(rank)].append(rank)
    for line in timeline.lines:
        first = line.roles[0]
        if len(line.roles) == 1 and (first.rank, first.apart) != (None, None):
            yield from _beside_slow(first, every_rank=every_rank)
            continue
        # The n-th ranks of a line's roles stand at one place along the other axes.
        alike = zip(*(ranks_of[role.role] for role in line.roles), strict=every_rank)
        for ranks in alike if every_rank else itertools.islice(alike, 1):
            yield tuple(_process(rank, role, every_rank) for rank, role in zip(ranks, line.roles, strict=True))


def _beside_slow(role: RoleTimeline, *, every_rank: bool) -> Iterator[tuple[Process, ...]]:
    """A slow rank by itself, or the others of its role: all of them, or the first."""
    plan = role.plan
    if role.rank is not None:
        ranks: Iterable[int] = (role.rank,)
    else:
        others = range(plan.strategy.ranks)
        ranks = (rank for rank in others if rank != role.apart and plan.role_of(rank) == role.role)
    for rank in ranks if every_rank else itertools.islice(ranks, 1):
        yield (_process(rank, role, every_rank),)


def ranks_of_each_kind(plan: Plan) -> Iterator[int]:
    """Ascending ranks with the first of every role among them, as many as the plan has positions at most.

    Replicas do the same but for their place on a node, which comes again after ``per_node`` of them at the latest.
    """
    axes = plan.strategy.axes
    shown = (range(min(axis.degree, plan.per_node) if axis.has(Trait.DIVIDES_BATCH) else axis.degree) for axis in axes)
    return (rank_at(plan.strategy, place) for place in itertools.product(*shown))


def _process(rank: int, role: RoleTimeline, every_rank: bool) -> Process:
    for_all = f", stands for {role.ranks} ranks" if role.ranks > 1 and not every_rank else ""
    slow = ", slow" if role.rank is not None else ""
    return Process(rank, f"rank {rank} ({role.of_plan.name}{slow}{for_all})", role)


def _events_of(process: Process, described: WorkDescriptions) -> Iterator[msgspec.Struct]:
    """Names of a rank and its streams, then its tasks in the plan's order."""
    rank, role = process.rank, process.role.of_plan
    yield _Metadata("process_name", rank, {"name": process.name})
    yield _Metadata("process_sort_index", rank, {"sort_index": rank})
    threads = process.role.threads
    for stream in sorted(set(threads.tolist())):
        tid = thread_number(rank, stream)
        yield _Metadata(
            "thread_name",
            rank,
            {"name": "blocking communication" if stream == BLOCKING else Stream(stream).name.lower()},
            tid,
        )
        yield _Metadata("thread_sort_index", rank, {"sort_index": stream}, tid)
    arguments = described.arguments_at(rank, np.unique(role.work).tolist())
    marks = _marks(process.role)
    stamps = stamps_of(process.role)
    start_us, length_us = stamps.start / STAMP_NS, (stamps.end - stamps.start) / STAMP_NS
    columns = (column.tolist() for column in (role.work, role.phase, threads, start_us, length_us))
    for work, phase, stream, ts, dur, mark in zip(*columns, marks, strict=True):
        name, category = described.named(work, phase)
        yield _Complete(
            name, category, rank, thread_number(rank, stream), ts, dur, msgspec.Raw(arguments[work] + mark + b"}")
        )


def _marks(role: RoleTimeline) -> Iterable[bytes]:
    """Per task, the end of its arguments: the stage, micro-batch and action (FW, BW, BW_input, BW_weight) of it."""
    if role.actions is None:
        return itertools.repeat(b"", role.of_plan.tasks)
    texts = [
        b',"stage":%d,"micro_batch":%d,"action":"%s"' % (action.stage, action.micro_batch, action.direction.encode())
        for action in role.actions.actions
    ]
    return [texts[index] if index >= 0 else b"" for index in role.actions.of_task.tolist()]
