"""What the trace event format asks of a trace, and what Perfetto does, checked event by event."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

_TYPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
    **{phase: {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": (int, float)} for phase in "stf"},
}
_METADATA = {"process_name": "name", "process_sort_index": "sort_index"}
_METADATA |= {"thread_name": "name", "thread_sort_index": "sort_index"}
_ROUNDING_US = 1e-6
"""What adding up doubles leaves: a thousandth of the nanosecond that viewers count in."""


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


def check_trace(trace: dict[str, Any]) -> None:
    """Fields and their types; names of all processes and threads; no overlaps; arrows between tasks that are there."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = set()
    for event in trace["traceEvents"]:
        for field, kind in _TYPES[event["ph"]].items():
            assert isinstance(event[field], kind), (field, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "M":
            assert list(event["args"]) == [_METADATA[event["name"]]]
            named.add((event["name"], event["pid"], event.get("tid")))
    threads = by_thread(trace)
    for pid, tid in threads:
        assert {("process_name", pid, None), ("thread_name", pid, tid)} <= named
    assert len({tid for _, tid in threads}) == len(threads)
    for events in threads.values():
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + _ROUNDING_US, (before, after)
    _check_arrows(trace, threads)


def _check_arrows(trace: dict[str, Any], threads: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
    arrows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    for events in arrows.values():
        assert "".join(event["ph"] for event in events) in ("sf", "stf")
        assert events[-1]["bp"] == "e"
        moments = [event["ts"] for event in events]
        assert moments == sorted(moments)
        for event in events:
            assert held_by(event, threads), event


def held_by(arrow: dict[str, Any], threads: dict[tuple[int, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Tasks that an end of an arrow is bound to: those of its thread that are under way at that moment."""
    own = threads[arrow["pid"], arrow["tid"]]
    return [task for task in own if task["dur"] and task["ts"] <= arrow["ts"] < task["ts"] + task["dur"]]
