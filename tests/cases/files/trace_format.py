"""What the trace event format asks of a trace, and what Perfetto's importer makes of it, checked event by event.

The format is Google's "Trace Event Format" (2016). Perfetto's importer, as its sources have it, counts in nanoseconds,
rounding a start and a length each by itself; sorts events by when they start, those of one moment as they stand in the
file; keeps a stack of slices a thread; drops, or moves to another lane, a slice that ends after the one that it starts
in; ties an end of an arrow to the slice on top of its thread's stack; and takes the ends of an arrow for one by id,
category and name together.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any, NamedTuple

_TYPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
    **{phase: {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": (int, float)} for phase in "stf"},
}
_METADATA: dict[str, tuple[str, type]] = {"process_name": ("name", str), "process_sort_index": ("sort_index", int)}
_METADATA |= {"thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}
_LARGEST_NS = 2**53
"""Beyond it stamps in doubles are no longer of single nanoseconds."""


def complete_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The tasks."""
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def by_thread(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Tasks of each thread in order."""
    found = defaultdict(list)
    for event in complete_events(trace):
        found[event["pid"], event["tid"]].append(event)
    return {
        key: sorted(events, key=lambda event: (event["ts"], event["ts"] + event["dur"]))
        for key, events in found.items()
    }


def nanoseconds(stamp_us: float) -> int:
    """A stamp as Perfetto reads it: rounded, halves away from 0."""
    return math.floor(stamp_us * 1000.0 + 0.5)


class Imported(NamedTuple):
    """What Perfetto's importer makes of a trace.

    Attributes:
        dropped: slices that would overlap the one before on their lane.
        bound: per event of an arrow, by its place among all events, the slice that it is tied to; None for none.
    """

    dropped: list[dict[str, Any]]
    bound: dict[int, dict[str, Any] | None]


def imported(trace: dict[str, Any]) -> Imported:
    """The trace through the importer's stacks."""
    stacks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    found = Imported([], {})
    timed = [(nanoseconds(event["ts"]), place) for place, event in enumerate(trace["traceEvents"]) if "ts" in event]
    for start, place in sorted(timed):
        event = trace["traceEvents"][place]
        stack = stacks[event["pid"], event["tid"]]
        if event["ph"] != "X":
            found.bound[place] = stack[-1] if stack else None
            continue
        length = nanoseconds(event["dur"])
        while stack and _end(stack[-1]) <= start and not (_end(stack[-1]) == start and _is_moment(stack[-1], length)):
            stack.pop()
        if stack and start < _end(stack[-1]) < start + length:
            found.dropped.append(event)
            continue
        stack.append(event)
    return found


def _end(event: dict[str, Any]) -> int:
    return nanoseconds(event["ts"]) + nanoseconds(event["dur"])


def _is_moment(event: dict[str, Any], length: int) -> bool:
    """Slices without length stay under others without."""
    return not length and not nanoseconds(event["dur"])


def check_trace(trace: dict[str, Any]) -> None:
    """Fields and their types; names of all processes and threads; no overlaps; arrows between tasks that are there."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    _check_fields(trace)
    _check_names(trace)
    for events in by_thread(trace).values():
        for before, after in itertools.pairwise(events):
            assert _end(before) <= nanoseconds(after["ts"]), (before, after)
    found = imported(trace)
    assert not found.dropped
    _check_arrows(trace, found)


def _check_fields(trace: dict[str, Any]) -> None:
    for event in trace["traceEvents"]:
        for field, kind in _TYPES[event["ph"]].items():
            assert isinstance(event[field], kind), (field, event)
            assert not isinstance(event[field], bool), (field, event)
        assert event["name"]
        for field in ("ts", "dur"):
            stamp = event.get(field, 0)
            assert 0 <= stamp * 1000 < _LARGEST_NS, event
            # Whole nanoseconds: else what is rounded apart does not meet.
            assert stamp == nanoseconds(stamp) / 1000, event


def _check_names(trace: dict[str, Any]) -> None:
    named: dict[tuple[str, int, int | None], object] = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "M":
            continue
        field, kind = _METADATA[event["name"]]
        assert list(event["args"]) == [field], event
        assert isinstance(event["args"][field], kind), event
        assert ("tid" in event) == event["name"].startswith("thread_"), event
        key = event["name"], event["pid"], event.get("tid")
        assert key not in named, event
        named[key] = event["args"][field]
    threads = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] != "M"}
    for pid, tid in threads:
        assert named["process_name", pid, None]
        assert named["thread_name", pid, tid]
    # Perfetto tells threads of a trace apart by their number, whatever process they are said to be of.
    assert len({tid for _, tid in threads}) == len(threads)
    labels = [(pid, label) for (what, pid, _), label in named.items() if what == "thread_name"]
    assert len(set(labels)) == len(labels)


def _check_arrows(trace: dict[str, Any], found: Imported) -> None:
    arrows = defaultdict(list)
    for place, event in enumerate(trace["traceEvents"]):
        if event["ph"] in "stf":
            arrows[event["id"]].append((place, event))
    threads = by_thread(trace)
    for ends in arrows.values():
        events = [event for _, event in ends]
        assert "".join(event["ph"] for event in events) in ("sf", "stf"), events
        assert len({(event["cat"], event["name"]) for event in events}) == 1, events
        # Without it the end of an arrow is tied to the slice that starts next.
        assert events[-1]["bp"] == "e", events
        moments = [event["ts"] for event in events]
        assert moments == sorted(moments), events
        slices = [found.bound[place] for place, _ in ends]
        for event, slice_ in zip(events, slices, strict=True):
            assert held_by(event, threads) == [slice_], event
        assert len({id(slice_) for slice_ in slices}) == len(slices), events


def held_by(arrow: dict[str, Any], threads: dict[tuple[int, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Tasks that an end of an arrow is bound to: those of its thread that are under way at that moment."""
    at = nanoseconds(arrow["ts"])
    return [task for task in threads[arrow["pid"], arrow["tid"]] if nanoseconds(task["ts"]) <= at < _end(task)]
